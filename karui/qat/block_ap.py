"""Block-AP, the first phase of EfficientQAT (Chen et al., arXiv 2407.11062): a block's weights and scales trained on its output.

    q = clamp(round(W / s + z)),  value = (q - z) s;   W and s train (rounding straight through, so s gets LSQ's gradient)
    minimise || block(x; value) - block_fp(x_fp) ||^2 over the calibration rows, x from the already quantized prefix

AdamW without decay, lr of scales 1e-4, of weights 1e-5 (2 bit: 2e-5), cosine to 1/20, gradient norm clipped to 0.3. Departures:
the start is GPTQ's result; zero points stay as they are; scales train relative to their start, so their lr does not depend on
the weights' size. The better of start and end, on the same rows, is committed. The second phase, E2E-QP, is not in this file.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch.nn.utils import clip_grad_norm_

from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import DTYPES
from karui.qat import gptq
from karui.qat.autoround import LearnedRounding, _loss, _Round, gradients, targets_of
from karui.qat.calibration import Block
from karui.qat.search import weight_error
from karui.qat.types import LayerReport, MethodConfig


class BlockAPConfig(MethodConfig):
    """epochs over the rows, batch rows per step; lr_scale, lr_weight (None: 1e-5, at 2 bit 2e-5);
    clip: largest gradient norm."""

    epochs: int = Field(2, ge=1)
    batch: int = Field(2, ge=1)
    lr_scale: float = Field(1e-4, gt=0)
    lr_weight: float | None = Field(None, gt=0)
    clip: float = Field(0.3, gt=0)


CONFIG = BlockAPConfig


class LearnedGrid(LearnedRounding):
    """`LearnedRounding` whose v is the weight itself (without bounds) and whose codes follow W / s for a moving s."""

    def __init__(self, w: torch.Tensor, start: QTensor) -> None:
        super().__init__(w, start)
        base = self.base if self.zero is None else self.base - self.zero
        self.v = (base * self.scale.unsqueeze(-1)).detach().requires_grad_(True)

    def _codes(self, scale: torch.Tensor) -> torch.Tensor:
        low, high = self.spec.code_range
        moved = self.v / torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(-1)
        return _Round.apply((moved if self.zero is None else moved + self.zero).clamp(low, high))

    def _scale(self) -> torch.Tensor:
        scale = self.scale * self.a.clamp_min(1e-2)
        return scale + (scale.to(DTYPES[self.spec.scale_dtype]).float() - scale).detach()


def quantize_block(block: Block, config: BlockAPConfig) -> None:
    """Train the block's grids together and commit them."""
    block.next_targets = targets_of(block)
    original = {n: m.weight.detach().float().clone() for n, m in block.linears.items()}
    gptq.quantize_block(block, gptq.GPTQConfig())
    starts = {n: v for n, v in block.weights.items() if isinstance(v, QTensor)}
    fallen = {r.name: r.fallback for r in block.report}
    block.weights.clear()
    block.report.clear()
    block.forget()
    learned = {n: LearnedGrid(w, starts[n].to(block.device)) for n, w in original.items()}
    local = {n: n.removeprefix(f"{block.name}.") for n in learned}
    starting = {n: g.codes() for n, g in learned.items()}
    groups = [
        {"params": [g.v], "lr": config.lr_weight or (2e-5 if g.spec.bits == 2 else 1e-5)} for g in learned.values()
    ] + [{"params": [g.a for g in learned.values()], "lr": config.lr_scale}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    samples, generator = len(block.inputs), block.generator()
    steps = config.epochs * math.ceil(samples / config.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(i / steps, 1.0)))
    )  # fmt: skip
    every = [p for g in learned.values() for p in (g.v, g.a)]
    with gradients(block.module):
        for _ in range(config.epochs):
            order = torch.randperm(samples, generator=generator)
            for i in range(0, samples, config.batch):
                _loss(block, {local[n]: g.value() for n, g in learned.items()}, order[i : i + config.batch]).backward()
                clip_grad_norm_(every, config.clip)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    chosen = {n: g.codes() for n, g in learned.items()}
    judged = torch.arange(min(samples, 16))
    with torch.no_grad():
        before, after = (
            float(_loss(block, {local[n]: q.dequantize() for n, q in codes.items()}, judged)) for codes in (starting, chosen)
        )  # fmt: skip
    for name, q in (chosen if after <= before else starting).items():
        note = f"block loss {before:.4g} -> {min(before, after):.4g}"
        error, spec = weight_error(original[name], q), str(q.spec)
        entry = LayerReport(
            name=name, spec=spec, method="block_ap", error=error, tokens=block.tokens, fallback=fallen[name], note=note
        )  # fmt: skip
        block.commit(name, q, entry)
