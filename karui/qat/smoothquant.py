"""SmoothQuant (Xiao et al., arXiv 2211.10438): move the difficulty of outlier channels from activations into weights.

    s_j = max|X_j|^a / max|W_j|^(1-a)      (eq. 4), folded into the norm in front: X / s comes for free, W' = W diag(s)

Maxima run over the calibration tokens and over all linears that read the tensor. Afterwards weights are rounded to nearest on
the given grid (w8a8, the paper's; any other works) and activations are quantized per token at run time when the spec says a8.
Departures: the paper folds into norms only; here v_proj and up_proj take factors too (`everywhere`, see `fold`), because the
hardest channels are down_proj's inputs, which no norm feeds; and the paper's one alpha for the whole model is searched for each
tensor instead, by the error of the products that read it (docs/log.md, W8A8).
The report holds each linear's static activation scale, max|X / s| / 127, for runtimes that want one. An expert's inputs are not
smoothed: its norm also feeds the router, which has no say in the factors.
"""

from __future__ import annotations

import torch
from pydantic import Field

from karui.kernels.quantize import quantize
from karui.qat.activations import fake_quantize_tokens
from karui.qat.calibration import Block, Group
from karui.qat.fold import Pair, all_groups, pairs
from karui.qat.rtn import RTNConfig, rounded
from karui.qat.search import some_rows, weight_error
from karui.qat.types import LayerReport, MethodConfig

ALPHAS = tuple(i / 20 for i in range(4, 20))
TOKENS = 1024  # evenly spread, judge an alpha


class SmoothQuantConfig(MethodConfig):
    """alpha: 0.5 (the paper's) shares the difficulty, 0.8 suits models with harder outliers; None: searched for each tensor;
    everywhere: fold into linears too, not only into norms; clip_search: search weight scales as RTN does (int8 weights gain next
    to nothing)."""

    alpha: float | None = Field(None, ge=0, le=1)
    everywhere: bool = True
    clip_search: bool = False


CONFIG = SmoothQuantConfig


def quantize_block(block: Block, config: SmoothQuantConfig) -> None:
    """Fold the block's factors, then round its linears."""
    largest, tokens, samples = statistics(block)
    targeted = {n: g for g in largest for n in g.names}
    notes: dict[str, str] = {}
    for pair in pairs(block, all_groups(block)):
        if pair.module.weight.ndim != 1 and not config.everywhere:
            continue
        if any(n not in targeted for n in pair.consumers):
            continue
        group = targeted[pair.consumers[0]]
        peak = torch.stack([block.linears[n].weight.detach().float().abs().amax(0) for n in pair.consumers]).amax(0)
        alpha = search_alpha(block, pair, group, largest[group], peak, samples[group]) if config.alpha is None else config.alpha
        s = pair.share(factors(largest[group], peak, alpha))
        pair.fold(s, block.linears_all)
        largest[group] = largest[group] / s
        block.weights[pair.producer] = pair.module.weight.detach().cpu().clone()  # type: ignore[operator]
        notes |= dict.fromkeys(pair.consumers, f"smoothed into {pair.producer}, alpha {alpha:.2f}")
    for name, linear in block.linears.items():
        w = linear.weight.detach().float()
        q = rounded(w, block.specs[name], RTNConfig(clip_search=config.clip_search), name)
        seen, scale = tokens[targeted[name]], float(largest[targeted[name]].max()) / 127
        block.commit(
            name, q,
            LayerReport(name=name, spec=str(q.spec), method="smoothquant", error=weight_error(w, q), tokens=seen,
                        note=notes.get(name, "") if seen else "no token reached it: no static activation scale",
                        activation_scale=scale if scale > 0 else None),
        )  # fmt: skip


def factors(x_max: torch.Tensor, w_max: torch.Tensor, alpha: float) -> torch.Tensor:
    """s of eq. 4; channels that are always zero on either side keep the factor 1."""
    s = x_max.clamp_min(1e-5) ** alpha / w_max.clamp_min(1e-5) ** (1 - alpha)
    return torch.where((x_max == 0) | (w_max == 0), torch.ones_like(s), s).clamp(1e-4, 1e4)


def search_alpha(
    block: Block, pair: Pair, group: Group, x_max: torch.Tensor, w_max: torch.Tensor, x: torch.Tensor
) -> float:
    """The alpha of `ALPHAS` whose rounded operands give the products x W^T nearest to the exact ones, in relative error over all
    readers of the tensor; x [n, in] is a sample of it."""
    readers = []
    for n in group.names:
        w = some_rows(block.linears[n].weight.detach().float())
        exact = x @ w.T
        readers.append((w, block.specs[n], exact, float(exact.square().sum()) or 1.0))

    def error(alpha: float) -> float:
        s = pair.share(factors(x_max, w_max, alpha))
        total = 0.0
        for w, spec, exact, size in readers:
            smooth = x / s
            seen = fake_quantize_tokens(smooth) if spec.activation_bits == 8 else smooth
            total += float((seen @ quantize(w * s, spec).dequantize(torch.float32).T - exact).square().sum()) / size
        return total

    return min(ALPHAS, key=error) if len(x) else 0.5


def statistics(block: Block) -> tuple[dict[Group, torch.Tensor], dict[Group, int], dict[Group, torch.Tensor]]:
    """Of every group, the block still unquantized: max|x| per input channel over all calibration tokens, their number, and a
    sample of the inputs [n, in]."""
    largest: dict[Group, torch.Tensor] = {}
    tokens: dict[Group, int] = {}
    samples: dict[Group, list[torch.Tensor]] = {}
    step = max(1, block.tokens // TOKENS)
    for stage in block.stages():
        for group in stage:
            largest[group] = torch.zeros(block.linears[group.names[0]].in_features, device=block.device)
            tokens[group] = 0
            samples[group] = [largest[group].new_empty(0, len(largest[group]))]
        for group, x in block.capture(stage):
            if len(x):
                largest[group] = torch.maximum(largest[group], x.detach().float().abs().amax(0))
                samples[group].append(x[-tokens[group] % step :: step].detach().float())
            tokens[group] += len(x)
    block.forget()
    return largest, tokens, {group: torch.cat(found) for group, found in samples.items()}
