"""A grid per linear within a budget, for `karui quantize --budget`: measured on calibration rows, stored in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec

if TYPE_CHECKING:
    import torch

    from karui.qat.mixed_precision import Plan


def plan_for(
    folder: Path, rows: torch.Tensor, grids: Sequence[str], budget: str, *, skip: Sequence[str] = (), most_tokens: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:  # fmt: skip
    """Measure every tie group on every grid and solve the knapsack.

    Args:
        rows: calibration token ids [samples, length]; the first of them, up to `most_tokens` tokens, score the loss.
        grids: spellings to choose from, at least two.
        budget: bits per weight (`2.6`) or bytes of the quantized linears (`40MB`).

    Raises:
        KaruiError: fewer than two grids, a budget that is none or below the smallest grid, a group size that does not divide.
    """
    import torch
    from torch import nn

    from karui.qat.calibration import decoder_of
    from karui.qat.mixed_precision import budget_of, choose_plan, measure, tie_groups
    from karui.qat.run import choose, load, refuse_quantized

    if len(set(grids)) < 2:
        raise KaruiError(f"mixed precision chooses among grids: give at least two, e.g. w2g64,w3g64; got {', '.join(grids)}.")
    specs = [QuantSpec.parse(g) for g in grids]
    model: Any = load(folder, torch.float32).eval().requires_grad_(False)
    refuse_quantized(model, model.config.to_dict())
    _, layers, prefix = decoder_of(model)
    names = [list(choose(layers, prefix, s, ("all-linear",), skip, {})) for s in specs][0]
    linears: dict[str, nn.Linear] = {n: model.get_submodule(n.removesuffix(".weight")) for n in names}
    ties = tie_groups(linears)
    weights = sum(m.weight.numel() for m in linears.values())
    allowed = budget_of(budget, weights)
    choose_plan(ties, specs, {(t.name, str(s)): 0.0 for t in ties for s in specs}, allowed)  # refuse before the work
    few = rows[: max(1, most_tokens // rows.shape[1])]

    def loss() -> float:
        total = 0.0
        with torch.inference_mode():
            for row in few:
                hidden = model.get_decoder()(row[None], use_cache=False).last_hidden_state[0, :-1]
                total += float(nn.functional.cross_entropy(model.lm_head(hidden).float(), row[1:].long(), reduction="sum"))
        return total / (few.shape[0] * (few.shape[1] - 1))

    return choose_plan(ties, specs, measure(model, ties, specs, loss, progress), allowed)
