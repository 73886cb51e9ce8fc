"""AutoRound (Cheng et al., arXiv 2309.05516): learn each weight's rounding and each group's scale by signed gradient descent.

    q = clamp(round(W / s' + V)),  s' = s * a;   V in [-1/2, 1/2] per weight, a per group around 1
    minimise || block(x; q) - block_fp(x_fp) ||^2 per block; update by lr * sign(gradient), lr falling linearly to 0, the better
    of start and end kept

x comes from the already quantized prefix, the target from the unquantized model. Departures: the start may be GPTQ's result
(`start`): each weight then begins inside the cell of its code, `MARGIN` off the centre towards W, and the signs of the search's
scales are kept. Few iterations take smaller steps than the paper's 1 / iterations (`MOST`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.func import functional_call

from karui.configs.errors import UnsupportedError
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import DTYPES, grouped
from karui.qat import gptq
from karui.qat.calibration import Block
from karui.qat.rtn import RTNConfig, rounded
from karui.qat.search import weight_error
from karui.qat.types import LayerReport, MethodConfig

MARGIN = 0.3  # of a grid step: nearer the edge of its cell than that, the first noisy steps undo what GPTQ decided
MOST = 0.02  # of a grid step: larger steps, which few iterations would have by the paper's rule, turn codes at random
Precision = Literal["auto", "float32", "bfloat16"]


class AutoRoundConfig(MethodConfig):
    """iterations, batch (rows per step); lr: None is 1 / iterations, at most 0.02; start: where rounding starts, `gptq` or `rtn`
    (the paper's); scale_range: how far a may leave 1; lr_scale: step of a as a share of lr; precision of the products while
    learning: auto is bfloat16 where the processor computes with it."""

    iterations: int = Field(200, ge=1)
    batch: int = Field(8, ge=1)
    lr: float | None = Field(None, gt=0)
    lr_scale: float = Field(0.05, ge=0)
    scale_range: float = Field(0.3, ge=0, lt=1)
    start: Literal["gptq", "rtn"] = "gptq"
    precision: Precision = "auto"


CONFIG = AutoRoundConfig


def in_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Whether products run in bfloat16: asked for, or `auto` on hardware with instructions for it."""
    if precision == "auto":
        if device.type == "cuda":
            return bool(torch.cuda.is_bf16_supported())
        return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())
    return precision == "bfloat16"


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def positions(w: torch.Tensor, start: QTensor, margin: float) -> torch.Tensor:
    """Where each weight of w [out, in] lies in grid steps, [R, G, n], zero point included: rounded, it is `start`'s code.

    Where the start did not round w to nearest (GPTQ), the weight is moved into the start's cell, `margin` off its centre.
    """
    low, high = start.spec.code_range
    scale = start.scale.float()
    ratio = grouped(w, start.spec) / scale.masked_fill(scale == 0, 1.0).unsqueeze(-1)
    if start.zero is not None:
        ratio = ratio + start.zero.float().unsqueeze(-1)
    codes = grouped(start.codes.float(), start.spec)
    ratio = ratio.clamp(low - 0.49, high + 0.49)
    return torch.where(ratio.round() == codes, ratio, codes + margin * (ratio - codes).clamp(-1, 1))


class LearnedRounding:
    """V and a of one weight; `value()` is differentiable in both, `codes()` is final. The two agree bit for bit."""

    def __init__(self, w: torch.Tensor, start: QTensor) -> None:
        spec = start.spec
        if spec.format != "int":
            raise UnsupportedError(f"AutoRound serves int grids, not {spec}; use rtn for it.")
        self.spec, self.shape = spec, tuple(w.shape)
        self.scale = start.scale.float()
        self.zero = None if start.zero is None else start.zero.float().unsqueeze(-1)
        self.base = positions(w, start, MARGIN)
        self.v = torch.zeros_like(self.base, requires_grad=True)
        self.a = torch.ones_like(self.scale, requires_grad=True)

    def _scale(self) -> torch.Tensor:
        stored = (self.scale * self.a).to(DTYPES[self.spec.scale_dtype]).float()
        return self.scale * self.a + (stored - self.scale * self.a).detach()

    def _codes(self, scale: torch.Tensor) -> torch.Tensor:
        low, high = self.spec.code_range
        base = self.base if self.zero is None else self.base - self.zero
        safe = torch.where(scale == 0, torch.ones_like(scale), scale)
        moved = base * (self.scale / safe).unsqueeze(-1)
        if self.zero is not None:
            moved = moved + self.zero
        return _Round.apply(moved + self.v).clamp(low, high)

    def value(self) -> torch.Tensor:
        scale = self._scale()
        codes = self._codes(scale)
        if self.zero is not None:
            codes = codes - self.zero
        return (codes * scale.unsqueeze(-1)).reshape(self.shape)

    @torch.no_grad()
    def codes(self) -> QTensor:
        scale = self._scale()
        codes = self._codes(scale).reshape(self.shape)
        zero = None if self.zero is None else self.zero.squeeze(-1).to(torch.uint8)
        return QTensor(
            codes=codes.to(torch.int8 if self.spec.symmetric else torch.uint8), scale=scale.to(DTYPES[self.spec.scale_dtype]),
            zero=zero, spec=self.spec, shape=self.shape,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, lr: float, lr_scale: float, reach: float) -> None:
        for p, rate, low, high in ((self.v, lr, -0.5, 0.5), (self.a, lr * lr_scale, 1 - reach, 1 + reach)):
            if p.grad is not None:
                p.sub_(p.grad.sign(), alpha=rate).clamp_(low, high)
            p.grad = None


def targets_of(block: Block) -> torch.Tensor:
    """Outputs of the unquantized block on the unquantized hidden states, [samples, length, width] fp32."""
    assert block.targets is not None
    out = torch.empty_like(block.targets)
    for rows in block.slices():
        with torch.no_grad():
            out[rows] = block.forward(block.targets[rows].to(block.device)).cpu().float()
    return out


@contextmanager
def gradients(module: nn.Module) -> Iterator[None]:
    """No gradient for the block's own parameters while rounding is learned."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    for p, _ in before:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


def _loss(block: Block, weights: dict[str, torch.Tensor], pick: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the block's output with these weights (by name within the block) on the picked rows."""
    assert block.next_targets is not None
    out = functional_call(block.module, weights, (block.inputs[pick].to(block.device),), block.kwargs)
    out = out[0] if isinstance(out, tuple) else out
    return (out - block.next_targets[pick].to(block.device)).square().mean()


def quantize_block(block: Block, config: AutoRoundConfig) -> None:
    """Learn the rounding of the block's linears together and commit the best step's codes."""
    block.next_targets = targets_of(block)
    original = {n: m.weight.detach().float().clone() for n, m in block.linears.items()}
    starts: dict[str, QTensor] = {}
    if config.start == "gptq":
        gptq.quantize_block(block, gptq.GPTQConfig())
        starts = {n: v for n, v in block.weights.items() if isinstance(v, QTensor)}
        block.weights.clear()
        fallen = {r.name: r.fallback for r in block.report}
        block.report.clear()
        block.forget()
    else:
        starts = {n: rounded(w, block.specs[n], RTNConfig(), n) for n, w in original.items()}
        fallen = dict.fromkeys(original)
    learned = {n: LearnedRounding(w, starts[n].to(block.device)) for n, w in original.items()}
    local = {n: n.removeprefix(f"{block.name}.") for n in learned}
    generator = block.generator()
    starting = {n: r.codes() for n, r in learned.items()}
    half = in_bfloat16(config.precision, block.device)
    samples, lr = len(block.inputs), config.lr or min(1 / config.iterations, MOST)
    with gradients(block.module):
        for i in range(config.iterations):
            pick = torch.randperm(samples, generator=generator)[: config.batch]
            with torch.autocast(block.device.type, torch.bfloat16, enabled=half):
                loss = _loss(block, {local[n]: r.value() for n, r in learned.items()}, pick)
            loss.backward()
            for r in learned.values():
                r.step(lr * (1 - i / config.iterations), config.lr_scale, config.scale_range)
        judged = torch.arange(
            min(samples, 4 * config.batch)
        )  # single batches differ more than steps do: compare on the same rows
        chosen = {n: r.codes() for n, r in learned.items()}
        with torch.no_grad():
            before, after = (
                float(_loss(block, {local[n]: q.dequantize() for n, q in codes.items()}, judged)) for codes in (starting, chosen)
            )
    if after > before:
        chosen = starting
    for name, q in chosen.items():
        error = weight_error(original[name], q)
        block.commit(
            name, q,
            LayerReport(name=name, spec=str(q.spec), method="autoround", error=error, tokens=block.tokens,
                        fallback=fallen.get(name),
                        note=f"block loss {before:.4g} -> {min(before, after):.4g}"),
        )  # fmt: skip
