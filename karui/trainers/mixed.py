"""A grid per linear within a budget, for `karui quantize --budget`: measured on calibration rows, stored in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec

if TYPE_CHECKING:
    import torch

    from karui.qat.mixed_precision import Plan, Tie


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

    return choose_plan(ties, specs, measure(model, ties, specs, _Loss(model, few.long()), progress), allowed)


class _Loss:
    """Cross entropy of rows [samples, length] in nats per token; blocks before a changed one are not run again.

    Held: the hidden states at every block's input, blocks x samples x length x width x 4 bytes.
    """

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        import torch

        from karui.qat.calibration import block_arguments, decoder_of

        self.model, self.rows = model, rows
        base, self.layers, self.prefix = decoder_of(model)
        self.norm: Any = base.norm
        self.kwargs, embed = block_arguments(model, rows.shape[1])
        self.before = [embed(rows)]
        with torch.inference_mode():
            for i in range(len(self.layers) - 1):
                self.before.append(self._block(i, self.before[-1]))

    def _block(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        out = self.layers[index](hidden, **self.kwargs[index])
        return out[0] if isinstance(out, tuple) else out

    def __call__(self, tie: Tie | None) -> float:
        import torch

        first = 0 if tie is None else int(tie.name.removeprefix(f"{self.prefix}.").partition(".")[0])
        with torch.inference_mode():
            hidden = self.before[first]
            for i in range(first, len(self.layers)):
                hidden = self._block(i, hidden)
            total = 0.0
            for h, row in zip(self.norm(hidden), self.rows):  # the logits of one row at a time
                total += float(torch.nn.functional.cross_entropy(self.model.lm_head(h[:-1]).float(), row[1:], reduction="sum"))
        return total / (self.rows.shape[0] * (self.rows.shape[1] - 1))
