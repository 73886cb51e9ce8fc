"""A grid per linear within a budget, for `karui quantize --budget`: measured on calibration rows, stored in the manifest.

What is measured of each tie group and grid is KL(model || model with that group rounded), in nats per token: what the loss
rises by on text of the model's own distribution. The rise on the rows' own next tokens is that plus chance, which is often the
larger part.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec

if TYPE_CHECKING:
    import torch

    from karui.qat.mixed_precision import Plan, Tie

log = logging.getLogger(__name__)


def plan_for(
    folder: Path, rows: torch.Tensor, grids: Sequence[str], budget: str, *, skip: Sequence[str] = (), most_tokens: int = 512,
    work: Path | None = None, device: str = "cpu", progress: Callable[[int, int], None] | None = None,
) -> Plan:  # fmt: skip
    """Measure every tie group on every grid and solve the knapsack.

    Args:
        rows: calibration token ids [samples, length]; the first of them, up to `most_tokens` tokens, are measured on.
        grids: spellings to choose from, at least two.
        budget: bits per weight (`2.6`) or bytes of the quantized linears (`40MB`).
        device: where the whole model is measured.
        work: folder in which what was measured is kept after every tie group, so that a killed run goes on from there.

    Raises:
        KaruiError: fewer than two grids, a budget that is none or below the smallest grid, a group size that does not divide, a
            work folder of another model, rows or grids.
    """
    import torch
    from torch import nn

    from karui.qat.calibration import check_rows, decoder_of
    from karui.qat.experts import unfuse
    from karui.qat.mixed_precision import budget_of, choose_plan, measure, tie_groups
    from karui.qat.run import choose, load, refuse_quantized, source_of

    if len(set(grids)) < 2:
        raise KaruiError(f"mixed precision chooses among grids: give at least two, e.g. w2g64,w3g64; got {', '.join(grids)}.")
    specs = [QuantSpec.parse(g) for g in grids]
    model: Any = load(folder, torch.float32).eval().requires_grad_(False).to(device)
    refuse_quantized(model, model.config.to_dict())
    unfuse(model)
    check_rows(rows, model.get_input_embeddings().num_embeddings, 0)
    _, layers, prefix = decoder_of(model)
    names = [list(choose(layers, prefix, s, ("all-linear",), skip, {})) for s in specs][0]
    linears: dict[str, nn.Linear] = {n: model.get_submodule(n.removesuffix(".weight")) for n in names}
    ties = tie_groups(linears)
    weights = sum(m.weight.numel() for m in linears.values())
    allowed = budget_of(budget, weights)
    choose_plan(ties, specs, {(t.name, str(s)): 0.0 for t in ties for s in specs}, allowed)  # refuse before the work
    if allowed >= (widest := sum(max(t.bits(s) for s in specs) for t in ties)):
        log.warning("budget %s: the widest of these grids take %.3f bits per weight (%.2f MB) everywhere, so nothing has to be "
                    "narrowed; each linear gets the grid that costs it least. Offer wider grids to use the budget.", budget,
                    widest / weights, widest / 8e6)
    few = rows[: max(1, most_tokens // rows.shape[1]), :most_tokens].long().to(device)
    kept = None if work is None else _Kept(work, [str(folder), source_of(folder), few.tolist()])
    increases = measure(model, ties, specs, _Divergence(model, few), progress, kept)
    return choose_plan(ties, specs, increases, allowed)


class _Kept(dict[tuple[str, str], float]):
    """What was measured so far, (tie, grid) -> increase, kept in `sensitivity.json` of a work folder."""

    def __init__(self, work: Path, about: list[Any]) -> None:
        self.file, self.about = work / "sensitivity.json", json.loads(json.dumps(about))
        if not self.file.is_file():
            super().__init__()
            return
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            about, rows = found["about"], found["increases"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CorruptError(f"{self.file} is not readable; delete it to measure anew.") from error
        if about != self.about:
            raise KaruiError(f"{self.file} was measured on another model, rows or grids; delete it or name another folder.")
        super().__init__({(tie, spec): value for tie, spec, value in rows})

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_name(".sensitivity.json.tmp")
        rows = [[*key, value] for key, value in self.items()]
        temporary.write_text(json.dumps({"about": self.about, "increases": rows}), encoding="utf-8")
        temporary.replace(self.file)


class _Divergence:
    """KL(model as it was || model as it stands) over rows [samples, length], in nats per token; blocks before a changed one are
    not run again.

    Held: the hidden states at every block's input, blocks x samples x length x width x 4 bytes, and the distribution of the
    model as it was, samples x length x vocabulary x 4 bytes.
    """

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        import torch

        from karui.qat.calibration import block_arguments, decoder_of

        self.model = model
        base, self.layers, self.prefix = decoder_of(model)
        self.norm: Any = base.norm
        self.kwargs, embed = block_arguments(model, rows.shape[1])
        self.before = [embed(rows)]
        with torch.inference_mode():
            for i in range(len(self.layers)):
                self.before.append(self._block(i, self.before[-1]))
            self.wanted = [self._logprobs(h) for h in self.before.pop()]

    def _block(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        out = self.layers[index](hidden, **self.kwargs[index])
        return out[0] if isinstance(out, tuple) else out

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """[length, vocabulary] of one row's hidden states in front of the final norm."""
        return self.model.lm_head(self.norm(hidden)).float().log_softmax(-1)

    def __call__(self, tie: Tie) -> float:
        import torch

        first = int(tie.name.removeprefix(f"{self.prefix}.").partition(".")[0])
        with torch.inference_mode():
            hidden = self.before[first]
            for i in range(first, len(self.layers)):
                hidden = self._block(i, hidden)
            each = [(w.exp() * (w - self._logprobs(h))).sum(-1).double().mean() for w, h in zip(self.wanted, hidden)]
        return float(sum(each) / len(each))
