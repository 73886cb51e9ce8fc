"""AdamW (arXiv 1711.05101) with states of one byte per value, and bf16 weights that are rounded stochastically.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Everything is computed in fp32; between steps m is kept in 8 bits and sqrt(v) too. The root, where the 8-bit optimizers of the
field keep v: its values span the same range as m, so none vanishes before its m does. With bf16 weights the new weight is
rounded up or down at random, by its distance, so that updates below half a unit still count; the random bits are a function of
(seed, step, parameter), and a resumed run draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from karui.configs.errors import KaruiError, nearest
from karui.kernels.quantize.noise import noise_bits
from karui.lowprec.optim.blocks import decode, encode

STATES = ("fp32", "dynamic", "fp8")
_AT_ONCE = 2**22  # values that are rounded stochastically at a time, a multiple of 4
_SMALLEST = 4096  # values; smaller tensors keep fp32 states, as their memory does not matter


class AdamWLowState(torch.optim.Optimizer):
    """AdamW over parameters of fp32, bf16 or fp16.

    State of a parameter: `step` fp32 []; either `exp_avg` and `exp_avg_sq` in fp32, or `exp_avg`, `exp_root` as codes with
    `exp_avg_scale`, `exp_root_scale` fp32 [ceil(n/256)].

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        state: fp32, dynamic (8-bit dynamic map) or fp8 (E4M3).
        stochastic: round bf16 weights stochastically; fp32 and fp16 weights never are.
        seed: of that rounding.
        offload: states lie in main memory and visit the device one parameter at a time.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "dynamic",
        stochastic: bool = True,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        if state not in STATES:
            raise KaruiError(f"optimizer state {state!r} is not known; use one of {', '.join(STATES)}.{nearest(state, STATES)}")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise KaruiError(f"AdamW: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}: lr, eps and weight_decay "
                             f"are at least 0, betas in [0, 1).")  # fmt: skip
        self.kind, self.stochastic, self.seed, self.offload = state, stochastic, seed, offload
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step over every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group, index)
                index += 1
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any], index: int) -> None:
        if p.grad is None or p.grad.is_sparse:
            raise KaruiError("AdamW with small states takes dense gradients.")
        state = self.state[p]
        small = p.numel() < _SMALLEST or self.kind == "fp32"

        def there(name: str) -> torch.Tensor:
            return state[name].to(p.device, non_blocking=True)

        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            m = v = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        elif small:
            m, v = there("exp_avg"), there("exp_avg_sq")
        else:
            m = decode(there("exp_avg"), there("exp_avg_scale"))
            v = decode(there("exp_root"), there("exp_root_scale"), up=True).square_()
        b1, b2 = group["betas"]
        state["step"] += 1
        t = float(state["step"])
        g = p.grad.float()
        m = m * b1 + g * (1 - b1)
        v = v * b2 + g * g * (1 - b2)
        w = p.float() * (1 - group["lr"] * group["weight_decay"])
        w.addcdiv_(m, (v / (1 - b2**t)).sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - b1**t))
        if p.dtype == torch.bfloat16 and self.stochastic:
            key = dict(seed=self.seed, step=int(t), layer=index, tensor=0)
            rounded = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
            for at, part in enumerate(w.reshape(-1).split(_AT_ONCE)):  # random bits are made of some 100 bytes for each of theirs
                noise = noise_bits(part.shape, **key, start=at * _AT_ONCE, device=p.device)
                rounded[at * _AT_ONCE : at * _AT_ONCE + len(part)] = round_bf16(part, noise)
            p.copy_(rounded.view(p.shape))
        else:
            p.copy_(w)
        if small:
            self._keep(state, {"exp_avg": m, "exp_avg_sq": v})
        else:
            for name, value, up in (("exp_avg", m, False), ("exp_root", v.sqrt_(), True)):
                codes, scale = encode(value, self.kind, up=up)
                self._keep(state, {name: codes, f"{name}_scale": scale})

    def _keep(self, state: dict[str, Any], new: dict[str, torch.Tensor]) -> None:
        """Put new states where they live between steps. From a GPU they go to pinned memory, which it reads and writes by itself
        while the host goes on with the next parameter."""
        for name, value in new.items():
            if not self.offload or not value.is_cuda:
                state[name] = value
                continue
            if name not in state or not state[name].is_pinned():
                state[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            state[name].copy_(value, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """As in torch, after what is on its way to main memory has arrived."""
        if self.offload and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but codes keep their dtype: torch would cast every state to the parameter's.

        Raises:
            KaruiError: states of another kind.
        """
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        for at, saved in state_dict["state"].items():
            p = order[at]
            home = torch.device("cpu") if self.offload else p.device
            kind = _kind(saved)
            expected = "fp32" if p.numel() < _SMALLEST else self.kind
            if kind != expected:
                raise KaruiError(f"optimizer states saved as {kind} cannot be loaded into an optimizer with {expected} states.")
            self.state[p] = {k: v.clone() if k == "step" else v.detach().clone().to(home) for k, v in saved.items()}

    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(v.numel() * v.element_size() for s in self.state.values() for v in s.values())


def round_bf16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, up with the probability of the distance from below; noise int32 in [0, 2^31). Inf and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + (noise >> 15)) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def _kind(saved: dict[str, torch.Tensor]) -> str:
    if "exp_avg_sq" in saved:
        return "fp32"
    return "dynamic" if saved["exp_avg"].dtype == torch.uint8 else "fp8"
