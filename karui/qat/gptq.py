"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after another, each error made up for by the columns still
open.

    H = 2/N sum x x^T over the layer's inputs, taken from the already quantized prefix of the model and of the block itself
    U = upper Cholesky factor of (H + damp * mean(diag H) * I)^-1
    for each input j in order of falling H_jj ("static act-order": the groups' scales are fixed beforehand, in the original
    order, so the result needs no index of columns):
        q_j = round(w_j),   e = (w_j - q_j) / U_jj,   w_k -= e U_jk for k > j

Blocks of columns are updated lazily (section 3.3). If the factorisation fails the damping grows tenfold, up to `max_damp`; then
the layer
is rounded to nearest and the report says so. An input that is always zero has no say: its weights are rounded to nearest.
A weight of which at least a twentieth is zero counts as pruned: its zeros stay zero, and what they would have taken of the errors
goes to the columns behind them (llm-compressor does the same; SparseGPT, arXiv 2301.00774, section 3.5, in one pass).
Departure from the paper: scales come from a search weighted by diag(H) (`scale_search`), and q, k, v (gate, up) share one
Hessian.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.rounding import round_columns
from karui.qat.calibration import Block, Group, Stage
from karui.qat.grids import check_solvable, coded, element, ruled, searched, step_of, zero_of
from karui.qat.rtn import RTNConfig, rounded
from karui.qat.types import LayerReport, MethodConfig

log = logging.getLogger(__name__)


class GPTQConfig(MethodConfig):
    """damp: share of the mean diagonal added to it; max_damp: largest share tried after a failed factorisation;
    block: columns per lazy update; act_order: columns in order of falling importance, scales static; scale_search: what a
    group's scale minimises: `range` (nothing: absmax), `mse`, or `hessian` (squared error weighted by diag H);
    signed_scale: see RTN; min_tokens: an expert that saw fewer tokens than this is rounded to nearest and named."""

    damp: float = Field(0.01, gt=0)
    max_damp: float = Field(1.0, gt=0)
    block: int = Field(128, ge=1)
    act_order: bool = True
    scale_search: Literal["range", "mse", "hessian"] = "hessian"
    steps: int = Field(24, ge=1)
    signed_scale: bool = True
    min_tokens: int = Field(256, ge=1)


CONFIG = GPTQConfig
PRUNED = 0.05  # share of zeros from which a weight counts as pruned
_HELD = 1e30  # a step on whose grid every weight is 0


def quantize_block(block: Block, config: GPTQConfig) -> None:
    """Commit the block's linears stage by stage: each stage's inputs already feel the stages before it."""
    for stage in block.stages():
        grams, counts = accumulate(block, stage)
        for i, group in enumerate(stage):
            names = group.names
            if counts[i] < (config.min_tokens if group.routed else 1):
                _nearest(
                    block,
                    names,
                    counts[i],
                    f"rtn: only {counts[i]} of {block.tokens} tokens reached it, {config.min_tokens} needed",
                )
                continue
            for same in _alike(names, block.specs):
                spec = block.specs[same[0]]
                weights = [block.linears[n].weight.detach().float() for n in same]
                joint = torch.cat(weights)
                result = solve(joint, grams[i], spec, config, name=same[0])
                if result is None:
                    _nearest(
                        block,
                        tuple(same),
                        counts[i],
                        f"rtn: the Hessian is not positive definite even with damping {config.max_damp}",
                    )
                    continue
                q, damp = result
                for n, w, part in zip(same, weights, split(q, [len(w) for w in weights])):
                    notes = [f"damping {damp:g}"] if damp != config.damp else []
                    if (zeros := pruned(w)) is not None:
                        notes.append(f"{100 * zeros.float().mean():.1f} % zeros kept")
                    note = ", ".join(notes)
                    error = output_error(w, part, grams[i])
                    block.commit(
                        n,
                        part,
                        LayerReport(
                            name=n, spec=str(spec), method="gptq", error=error, error_of="output", tokens=counts[i], note=note
                        ),
                    )


def _alike(names: tuple[str, ...], specs: dict[str, QuantSpec]) -> list[list[str]]:
    """Linears of one group that are solved as one matrix: usually all. Mixed precision splits them, a scale per tensor too."""
    together: dict[tuple[QuantSpec, str], list[str]] = {}
    for n in names:
        together.setdefault((specs[n], n if specs[n].granularity == "tensor" else ""), []).append(n)
    return list(together.values())


def _nearest(block: Block, names: tuple[str, ...], tokens: int, why: str) -> None:
    for n in names:
        log.warning("%s: %s", n, why)
        w = block.linears[n].weight.detach().float()
        q = rounded(w, block.specs[n], RTNConfig(), n)
        error = float((w - q.dequantize()).square().sum() / w.square().sum().clamp_min(1e-30))
        block.commit(n, q, LayerReport(name=n, spec=str(q.spec), method="rtn", error=error, tokens=tokens, fallback=why))


def accumulate(
    block: Block, stage: Stage, watch: Callable[[Group, torch.Tensor], None] | None = None
) -> tuple[list[torch.Tensor], list[int]]:
    """2/N sum x x^T in fp32, [in, in], and the tokens N of each group of the stage; refuses NaN and Inf by the layer's name.

    `watch` sees every group's inputs [tokens, in] on the way.
    """
    grams = [
        torch.zeros(block.linears[g.names[0]].in_features, block.linears[g.names[0]].in_features, device=block.device)
        for g in stage
    ]
    counts = [0] * len(stage)
    position = {g: i for i, g in enumerate(stage)}
    for group, x in block.capture(stage):
        i = position[group]
        add_gram(grams[i], x.float())
        if watch is not None:
            watch(group, x)
        counts[i] += x.shape[0]
    for i, group in enumerate(stage):
        if not torch.isfinite(grams[i].diagonal()).all():
            raise KaruiError(f"{group.names[0]}: its inputs hold NaN or infinite values; {block.diagnose(block.slices()[0])}")
        upper = grams[i].triu_()
        grams[i] = (upper + upper.triu(1).T).mul_(2.0 / max(counts[i], 1))
    return grams, counts


def add_gram(gram: torch.Tensor, x: torch.Tensor) -> None:
    """gram += x^T x for x [tokens, in], upper triangle only, in strips: 2/3 of the work of the whole product."""
    width = x.shape[1]
    step = max(192, -(-width // 4))
    for a in range(0, width, step):
        gram[a : a + step, a:].addmm_(x[:, a : a + step].T, x[:, a:])


def factor(gram: torch.Tensor, damp: float, max_damp: float) -> tuple[torch.Tensor, float] | None:
    """U with U^T U = (gram + damp * mean diag * I)^-1 and the damping that worked, or None."""
    mean = gram.diagonal().mean()
    while damp <= max_damp:
        h = gram.clone()
        h.diagonal().add_(damp * mean)
        # h = V V^T with V upper (the Cholesky factor of h read backwards), so h^-1 = (V^-1)^T V^-1 and V^-1 is upper
        lower, info = torch.linalg.cholesky_ex(h.flip(0, 1))
        if int(info) == 0:
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(len(h), device=h.device), upper=True)
            if bool(torch.isfinite(upper).all()):
                return upper, damp
        damp *= 10
    return None


def solve(
    w: torch.Tensor, gram: torch.Tensor, spec: QuantSpec, config: GPTQConfig, *, name: str = "tensor"
) -> tuple[QTensor, float] | None:
    """GPTQ on one weight w [out, in] with its Hessian [in, in]; the codes and the damping used, None when no damping worked.

    Raises:
        UnsupportedError: a grid without a fixed step per weight (nf4, binary).
    """
    check_solvable(spec, "GPTQ", name)
    diagonal = gram.diagonal().clone()
    dead = diagonal == 0
    if dead.any():
        gram = gram.clone()
        gram.diagonal()[dead] = diagonal[~dead].mean() if bool((~dead).any()) else 1.0
    found = factor_ordered(gram, config)
    if found is None:
        return None
    upper, order, damp = found
    if config.scale_search == "range":
        grid = ruled(w, spec, name=name)
    else:
        weight = diagonal if config.scale_search == "hessian" else None
        grid = searched(w, spec, weight=weight, steps=config.steps, signed=config.signed_scale, name=name)
    rows, width = w.shape
    low, high = spec.code_range
    # everything below is [in, out]: one column of the weight is one contiguous row
    zero = zero_of(grid)
    steps, zeros = step_of(grid).T[order].contiguous(), None if zero is None else zero.T[order].contiguous()
    if (held := pruned(w)) is not None:
        steps = torch.where(held.T[order], _HELD, steps)
    work = w.T[order].contiguous()
    codes = torch.empty_like(work)
    rest = upper / upper.diagonal()[:, None]  # row j holds U_jk / U_jj
    for a in range(0, width, config.block):
        b = min(a + config.block, width)
        shift = None if zeros is None else zeros[a:b]
        codes[a:b], err = round_columns(work[a:b], rest[a:b, a:b], steps[a:b], shift, low, high, element(spec))
        if b < width:
            work[b:].addmm_(rest[a:b, b:].T, err, alpha=-1.0)
    back = torch.empty_like(codes)
    back[order] = codes
    return coded(grid, back.T), damp


def factor_ordered(gram: torch.Tensor, config: GPTQConfig) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The factor for the columns in the order they are processed, that order, and the damping."""
    width = len(gram)
    order = (
        torch.argsort(gram.diagonal(), descending=True, stable=True)
        if config.act_order
        else torch.arange(width, device=gram.device)
    )
    found = factor(gram[order][:, order], config.damp, config.max_damp)
    return None if found is None else (found[0], order, found[1])


def pruned(w: torch.Tensor) -> torch.Tensor | None:
    """Where w is zero, if so much of it is that it must have been pruned."""
    zeros = w == 0
    return zeros if float(zeros.float().mean()) >= PRUNED else None


def split(q: QTensor, rows: list[int]) -> list[QTensor]:
    """Cut a row-wise concatenation back into its weights; they share NVFP4's global scale, as its kernels want it."""
    assert q.spec.granularity != "tensor" or len(rows) == 1, "a scale per tensor is not shared between tensors"
    parts, start = [], 0
    for n in rows:
        part = slice(start, start + n) if len(rows) > 1 else slice(None)
        start += n
        zero = None if q.zero is None else q.zero[part].contiguous()
        codes, scale = q.codes[part].contiguous(), q.scale[part].contiguous()
        parts.append(QTensor(codes=codes, scale=scale, zero=zero, spec=q.spec, shape=(n, q.shape[1]), extra=q.extra))
    return parts


def output_error(w: torch.Tensor, q: QTensor, gram: torch.Tensor) -> float:
    """|| (W - Q) X ||^2 / || W X ||^2 from the Hessian alone, over some 256 rows, evenly spread."""
    every = max(1, len(w) // 256)
    delta = (w - q.dequantize())[::every]
    w = w[::every]
    return float(((delta @ gram) * delta).sum() / ((w @ gram) * w).sum().clamp_min(1e-30))
