"""AWQ (Lin et al., arXiv 2306.00978): scale up the input channels that see large activations before rounding, and scale the
activations down.

    s = mean|x|^alpha per input channel, normalised to sqrt(max s * min s) = 1, alpha on a grid of 20 steps in [0, 1)   (eq. 4, 5)
    W' = W diag(s), x' = x / s; 1 / s is folded into what feeds the linear (see `fold`), so nothing is added at run time
    then the range of each group is searched by the error of the group's own output (section 4, "clip"); on ternary and float
    grids the scales are searched by squared error weighted by the inputs' mean squares (see `grids`)

The loss of a candidate is || (Q(W s)/s - W) X ||^2 of all linears that share the input, over some 512 rows of each, computed from
H = X^T X without running the block; the paper's search runs the parent module instead. alpha = 0 (no scaling) is among the
candidates, so scaling never loses on it.
"""

from __future__ import annotations

import logging

import torch
from pydantic import Field

from karui.configs.quantspec import QuantSpec
from karui.kernels.quantize import quantize
from karui.kernels.quantize.grid import grouped, inverse
from karui.kernels.quantize.integer import find_range
from karui.qat.calibration import Block, Group, Stage
from karui.qat.fold import Pair, all_groups, pairs
from karui.qat.gptq import accumulate, output_error
from karui.qat.grids import check_solvable, ruled, searched
from karui.qat.search import encode, search_scale, some_rows
from karui.qat.types import LayerReport, MethodConfig

log = logging.getLogger(__name__)


class AWQConfig(MethodConfig):
    """grid: values of alpha tried; clip_search: search each group's range by its output error, else by absmax;
    steps: ratios tried for it; signed_scale: see RTN; min_tokens: an expert that saw fewer tokens than this gets its scales from
    the weight alone and is named."""

    grid: int = Field(20, ge=2)
    clip_search: bool = True
    steps: int = Field(16, ge=2)
    signed_scale: bool = True
    min_tokens: int = Field(256, ge=1)


CONFIG = AWQConfig


def quantize_block(block: Block, config: AWQConfig) -> None:
    """Search and fold factors on the unquantized block, then clip and round its linears."""
    for name in block.linears:
        check_solvable(block.specs[name], "AWQ", name)
    stages = block.stages()
    grams: dict[Group, torch.Tensor] = {}
    counts: dict[Group, int] = {}
    means: dict[Group, torch.Tensor] = {}
    for stage in stages:
        found, seen = _statistics(block, stage, means)
        grams |= dict(zip(stage, found))
        counts |= dict(zip(stage, seen))
    block.forget()
    targeted = {n: g for g in grams for n in g.names}
    used: dict[str, str] = {}
    for pair in pairs(block, all_groups(block)):
        readers = [n for n in pair.consumers if n in targeted]
        if len(readers) != len(pair.consumers):
            continue  # an untargeted reader would carry the factor in high precision: legal, but nothing to gain from mixing
        group = targeted[readers[0]]
        alpha, s = _search_alpha(block, pair, group, grams[group], means[group], config)
        if alpha > 0:
            pair.fold(s, block.linears_all)
            grams[group] = grams[group] / s[:, None] / s[None, :]
            block.weights[pair.producer] = pair.module.weight.detach().cpu().clone()  # type: ignore[operator]
            used |= dict.fromkeys(readers, f"alpha {alpha:.2f} folded into {pair.producer}")
    for group, gram in grams.items():
        for name in group.names:
            w = block.linears[name].weight.detach().float()
            spec = block.specs[name]
            fallback = None
            if counts[group] < (config.min_tokens if group.routed else 1):
                fallback = f"rtn: only {counts[group]} of {block.tokens} tokens reached it, {config.min_tokens} needed"
                log.warning("%s: %s", name, fallback)
                q = searched(w, spec, name=name)
            elif not config.clip_search:
                q = ruled(w, spec, name=name)
            elif spec.format == "int":
                q = encode(w, spec, *clip(w, spec, gram, config), tuple(w.shape))
            else:
                q = searched(w, spec, weight=gram.diagonal(), steps=config.steps, name=name)
            block.commit(
                name, q,
                LayerReport(name=name, spec=str(spec), method="awq", error=output_error(w, q, gram), error_of="output",
                            tokens=counts[group], fallback=fallback, note=used.get(name, "")),
            )  # fmt: skip


def _statistics(block: Block, stage: Stage, means: dict[Group, torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Hessians and counts of a stage, and mean |x| of every group into `means`, from one pass."""
    sums: dict[Group, torch.Tensor] = {}

    def watch(group: Group, x: torch.Tensor) -> None:
        total = x.abs().sum(0, dtype=torch.float32)
        sums[group] = sums[group] + total if group in sums else total

    grams, counts = accumulate(block, stage, watch)
    for group, count in zip(stage, counts):
        means[group] = sums[group] / count if count else torch.ones(len(grams[stage.index(group)]))
    return grams, counts


def _search_alpha(
    block: Block, pair: Pair, group: Group, gram: torch.Tensor, mean: torch.Tensor, config: AWQConfig
) -> tuple[float, torch.Tensor]:
    best, best_alpha, best_s = float("inf"), 0.0, torch.ones_like(mean)
    weights = []
    for n in group.names:
        weights.append((some_rows(block.linears[n].weight.detach().float()), block.specs[n]))
    for step in range(config.grid):
        alpha = step / config.grid
        s = mean.clamp_min(1e-4) ** alpha
        s = pair.share(s / (s.max() * s.min()).sqrt())
        loss = 0.0
        for w, spec in weights:
            delta = quantize(w * s, spec).dequantize() / s - w
            loss += float(((delta @ gram) * delta).sum())
        if loss < best:
            best, best_alpha, best_s = loss, alpha, s
    return best_alpha, best_s


def clip(w: torch.Tensor, spec: QuantSpec, gram: torch.Tensor, config: AWQConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero [R, G] whose groups' own outputs err least: sum over a group of delta H_group delta^T."""
    x = grouped(w, spec)
    if spec.granularity == "tensor":
        return search_scale(w, spec, weight=gram.diagonal(), steps=config.steps, signed=config.signed_scale)
    rows, groups, n = x.shape
    inner = torch.stack([gram[i * n : (i + 1) * n, i * n : (i + 1) * n] for i in range(groups)])  # [G, n, n]
    start, zero = find_range(x, spec)
    diagonal, dzero = search_scale(w, spec, weight=gram.diagonal(), steps=config.steps, signed=config.signed_scale)
    best_scale, best_zero = start, zero
    best = torch.full((rows, groups), float("inf"), device=w.device)
    candidates: list[tuple[torch.Tensor, torch.Tensor | None]] = [(start, zero), (diagonal, dzero)]
    for ratio in torch.linspace(0.8, 1.2, 9).tolist():
        scale = (diagonal.float() * ratio).to(start.dtype)
        candidates.append((scale, dzero))
    for scale, z in candidates:
        codes = torch.round(x / inverse(scale).unsqueeze(-1))
        if z is not None:
            codes += z.float().unsqueeze(-1)
        codes.clamp_(*spec.code_range)
        if z is not None:
            codes -= z.float().unsqueeze(-1)
        delta = (codes * scale.float().unsqueeze(-1) - x).transpose(0, 1)  # [G, R, n]
        err = (torch.bmm(delta, inner) * delta).sum(-1).T
        better = err < best
        best = torch.where(better, err, best)
        best_scale = torch.where(better, scale, best_scale)
        if z is not None and best_zero is not None:
            best_zero = torch.where(better, z, best_zero)
    return best_scale, best_zero
