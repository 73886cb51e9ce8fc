"""On-policy distillation as a policy gradient (Thinking Machines, "On-Policy Distillation", 2025; importance ratio as in PPO).

A token x drawn by the sampler has advantage A = -(log p_sampler(x) - log q_teacher(x)), a constant. With the importance ratio
r = p(x) / p_sampler(x) the loss is -r A, whose gradient at r = 1 is that of the reverse KL's per-token estimate. The ratio is
cut at `max_ratio` (a constant there, so such a token gives no gradient), which bounds what a stale or drifted sampler can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class PolicyGradient:
    """targets [N] drawn tokens; sampler [N] their logprobs when drawn; teacher [N] the teacher's logprobs of them."""

    targets: torch.Tensor
    sampler: torch.Tensor
    teacher: torch.Tensor
    max_ratio: float = 5.0

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = logits.log_softmax(-1)
        target = self.targets[start:stop].unsqueeze(1)
        sampler = self.sampler[start:stop].to(logits.dtype)
        advantage = self.teacher[start:stop].to(logits.dtype) - sampler
        ratio = (log_p.gather(1, target).squeeze(1) - sampler).exp()
        pull = torch.where(ratio <= self.max_ratio, ratio * advantage, 0.0).unsqueeze(1)
        gradient = log_p.exp_().mul_(pull).scatter_add_(1, target, -pull)
        return -ratio.clamp(max=self.max_ratio) * advantage, gradient
