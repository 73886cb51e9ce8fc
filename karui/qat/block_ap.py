"""Block-AP, the first phase of EfficientQAT (Chen et al., arXiv 2407.11062): a block's weights and scales trained on its output.

    q = clamp(round(W / s + z)),  value = (q - z) s;   W and s train (rounding straight through, so s gets LSQ's gradient)
    minimise || block(x; value) - block_fp(x_fp) ||^2 over the calibration rows, x from the already quantized prefix

AdamW without decay, cosine to 1/20, gradient norm unclipped. Departures: the start is GPTQ's result; zero points stay as they
are. The paper's learning rates (weights 1e-5, 2 bit 2e-5) belong to its 4096 steps a block; with a hundredth of them they move
no code. So rates are in units of the grid: `lr_weight` in steps s (per tensor, its mean s), `lr_scale` as a share of s. Products
run in bfloat16 where the processor has instructions for it; master values and the closing judgement stay in float32. The better
of start and end, on the same rows, is committed.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field

from karui.configs.errors import UnsupportedError
from karui.kernels.qtensor import QTensor
from karui.qat import gptq
from karui.qat.autoround import Precision, gradients, in_bfloat16, positions, targets_of
from karui.qat.autoround import _loss as block_loss
from karui.qat.calibration import Block
from karui.qat.lsq import LearnedStep, Stored, codes_on
from karui.qat.rtn import RTNConfig, rounded
from karui.qat.search import weight_error
from karui.qat.types import LayerReport, MethodConfig


class BlockAPConfig(MethodConfig):
    """epochs over the rows (0: the start as it is), batch rows per step; lr_weight in grid steps, lr_scale as a share of the
    scale; start: codes and scales at the beginning; precision of the products in training: auto is bfloat16 where the
    processor computes with it."""

    epochs: int = Field(1, ge=0)
    batch: int = Field(2, ge=1)
    lr_weight: float = Field(0.02, gt=0)
    lr_scale: float = Field(5e-3, gt=0)
    start: Literal["gptq", "rtn"] = "gptq"
    precision: Precision = "auto"


CONFIG = BlockAPConfig


class LearnedGrid:
    """W and the relative scale a of one weight; `value()` is differentiable in both, `codes()` is final and bit-equal to it.

    Where the start did not round W to nearest (GPTQ), W is moved just inside the start's cell.
    """

    def __init__(self, w: torch.Tensor, start: QTensor) -> None:
        spec = start.spec
        if spec.format != "int":
            raise UnsupportedError(f"Block-AP serves int grids, not {spec}; use rtn for it.")
        self.spec, self.shape, self.zero = spec, tuple(w.shape), start.zero
        self.scale = start.scale.float()
        step = self.scale.masked_fill(self.scale == 0, 1.0).unsqueeze(-1)
        shift = 0 if start.zero is None else start.zero.float().unsqueeze(-1)
        self.w = ((positions(w, start, 0.49) - shift) * step).requires_grad_(True)
        self.a = torch.ones_like(self.scale, requires_grad=True)

    def _step(self) -> torch.Tensor:
        step: torch.Tensor = Stored.apply(self.scale * self.a, self.spec)
        return step

    def value(self) -> torch.Tensor:
        zero = None if self.zero is None else self.zero.float().unsqueeze(-1)
        value: torch.Tensor = LearnedStep.apply(self.w, self._step(), zero, *self.spec.code_range, 1.0)
        return value.view(self.shape)

    @torch.no_grad()
    def codes(self) -> QTensor:
        return codes_on(self.w.detach().reshape(self.shape), self.spec, self._step(), self.zero)


def quantize_block(block: Block, config: BlockAPConfig) -> None:
    """Train the block's grids together and commit them."""
    block.next_targets = targets_of(block)
    original = {n: m.weight.detach().float().clone() for n, m in block.linears.items()}
    starts, fallen = _starts(block, original, config)
    learned = {n: LearnedGrid(w, starts[n].to(block.device)) for n, w in original.items()}
    local = {n: n.removeprefix(f"{block.name}.") for n in learned}
    starting = {n: g.codes() for n, g in learned.items()}
    groups = [{"params": [g.w], "lr": config.lr_weight * float(g.scale.abs().mean())} for g in learned.values()]
    groups.append({"params": [g.a for g in learned.values()], "lr": config.lr_scale})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    samples, generator = len(block.inputs), block.generator()
    steps = max(1, config.epochs * math.ceil(samples / config.batch))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(i / steps, 1.0)))
    )  # fmt: skip
    half = in_bfloat16(config.precision, block.device)
    with gradients(block.module):
        for _ in range(config.epochs):
            order = torch.randperm(samples, generator=generator)
            for i in range(0, samples, config.batch):
                with torch.autocast(block.device.type, torch.bfloat16, enabled=half):
                    loss = block_loss(block, {local[n]: g.value() for n, g in learned.items()}, order[i : i + config.batch])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    chosen = {n: g.codes() for n, g in learned.items()}
    judged = torch.arange(min(samples, 16))
    with torch.no_grad():
        before, after = (
            float(block_loss(block, {local[n]: q.dequantize() for n, q in codes.items()}, judged)) for codes in (starting, chosen)
        )  # fmt: skip
    for name, q in (chosen if after <= before else starting).items():
        note = f"block loss {before:.4g} -> {min(before, after):.4g}"
        error, spec = weight_error(original[name], q), str(q.spec)
        entry = LayerReport(
            name=name, spec=spec, method="block_ap", error=error, tokens=block.tokens, fallback=fallen[name], note=note
        )  # fmt: skip
        block.commit(name, q, entry)


def _starts(
    block: Block, original: dict[str, torch.Tensor], config: BlockAPConfig
) -> tuple[dict[str, QTensor], dict[str, str | None]]:
    """Codes and scales to start from, and which linears fell back to rounding."""
    if config.start == "rtn":
        return {n: rounded(w, block.specs[n], RTNConfig(), n) for n, w in original.items()}, dict.fromkeys(original)
    gptq.quantize_block(block, gptq.GPTQConfig())
    starts = {n: v for n, v in block.weights.items() if isinstance(v, QTensor)}
    fallen = {r.name: r.fallback for r in block.report}
    block.weights.clear()
    block.report.clear()
    block.forget()
    return starts, fallen
