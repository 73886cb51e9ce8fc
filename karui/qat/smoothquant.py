"""SmoothQuant (Xiao et al., arXiv 2211.10438): move the difficulty of outlier channels from activations into weights.

    s_j = max|X_j|^a / max|W_j|^(1-a)      (eq. 4), folded into the norm in front: X / s comes for free, W' = W diag(s)

Maxima run over the calibration tokens and over all linears that read the tensor. Afterwards weights are rounded to nearest on
the given grid (w8a8, the paper's; any other works) and activations are quantized per token at run time when the spec says a8.
Departure: the paper folds into norms only; here v_proj and up_proj take factors too (`everywhere`, see `fold`), because the
hardest channels are down_proj's inputs, which no norm feeds; and alpha is 0.7 (docs/log.md, W8A8).
The report holds each linear's static activation scale, max|X / s| / 127, for runtimes that want one. An expert's inputs are not
smoothed: its norm also feeds the router, which has no say in the factors.
"""

from __future__ import annotations

import torch
from pydantic import Field

from karui.qat.calibration import Block, Group
from karui.qat.fold import all_groups, pairs
from karui.qat.rtn import RTNConfig, rounded
from karui.qat.search import weight_error
from karui.qat.types import LayerReport, MethodConfig


class SmoothQuantConfig(MethodConfig):
    """alpha: 0.5 (the paper's) shares the difficulty, 0.8 suits models with harder outliers; everywhere: fold into linears too,
    not only into norms; clip_search: search weight scales as RTN does (int8 weights gain next to nothing)."""

    alpha: float = Field(0.7, ge=0, le=1)
    everywhere: bool = True
    clip_search: bool = False


CONFIG = SmoothQuantConfig


def quantize_block(block: Block, config: SmoothQuantConfig) -> None:
    """Fold the block's factors, then round its linears."""
    largest, tokens = channel_maxima(block)
    targeted = {n: g for g in largest for n in g.names}
    notes: dict[str, str] = {}
    for pair in pairs(block, all_groups(block)):
        if pair.module.weight.ndim != 1 and not config.everywhere:
            continue
        if any(n not in targeted for n in pair.consumers):
            continue
        group = targeted[pair.consumers[0]]
        peak = torch.stack([block.linears[n].weight.detach().float().abs().amax(0) for n in pair.consumers]).amax(0)
        s = factors(largest[group], peak, config.alpha)
        s = pair.share(s)
        pair.fold(s, block.linears_all)
        largest[group] = largest[group] / s
        block.weights[pair.producer] = pair.module.weight.detach().cpu().clone()  # type: ignore[operator]
        notes |= dict.fromkeys(pair.consumers, f"smoothed into {pair.producer}")
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


def channel_maxima(block: Block) -> tuple[dict[Group, torch.Tensor], dict[Group, int]]:
    """max|x| per input channel of every group over all calibration tokens, and their number, the block still unquantized."""
    found: dict[Group, torch.Tensor] = {}
    tokens: dict[Group, int] = {}
    for stage in block.stages():
        for group in stage:
            found[group] = torch.zeros(block.linears[group.names[0]].in_features, device=block.device)
            tokens[group] = 0
        for group, x in block.capture(stage):
            if len(x):
                found[group] = torch.maximum(found[group], x.detach().float().abs().amax(0))
            tokens[group] += len(x)
    block.forget()
    return found, tokens
