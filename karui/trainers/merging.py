"""Into which base an adapter is merged: the grid it was trained over, dequantized, or the original weights.

An adapter learnt over a 4-bit base has learnt to make up for that base's rounding; put onto the original weights it corrects
errors that are not there, and put onto the dequantized ones the sum is rounded a second time by the export (transformers 31293,
peft 2321). Which of the two costs less depends on grid, adapter and method, so both are merged, rounded to the export's grid,
and compared with what was trained, base and adapter run apart:

    KL(trained || merged and rounded), nats per token over held-out tokens; the smaller one is taken, and both are told

Being close to what was trained is not all: after a short training the original weights with the adapter can be the better model.
A calibrated method follows the merged model closely, whichever it is, so for it the better one is taken, by held-out loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from karui.catalogue.logits import capped, logit_softcap, scaled
from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.trainers.calibrated import kl_per_token, logprobs_of, put_on_grid, unmerged_model
from karui.trainers.parity import merged_model

Merge = Literal["auto", "trained", "original"]
NONE = QuantSpec.parse("none")


@dataclass(frozen=True, kw_only=True)
class MergeChoice:
    """The base that was chosen, as a grid (`none`: the original weights), and what was measured of each candidate, in nats per
    token: its KL to base and adapter apart, or its held-out loss."""

    base: QuantSpec
    why: str
    measured: dict[str, float]
    tokens: int
    of: Literal["kl", "loss"] = "kl"

    def line(self) -> str:
        found = ", ".join(f"{name} {value:.4f}" for name, value in self.measured.items())
        onto = "the original weights" if self.base.format == "none" else f"the dequantized {self.base} base"
        what = "KL to base and adapter apart" if self.of == "kl" else "held-out loss"
        return f"merged into {onto} ({self.why})" + (
            f": {what}, nats per token over {self.tokens} tokens: {found}" if found else ""
        )

    def facts(self) -> dict[str, Any]:
        return {"base": str(self.base), "why": self.why, self.of: self.measured, "tokens": self.tokens}


def choose_merge(
    source: Path, adapter: Path, base: QuantSpec, spec: QuantSpec, sequences: list[list[int]], asked: Merge = "auto"
) -> MergeChoice:
    """Measure both merges and choose.

    Args:
        source: folder of the original model.
        base: the grid the adapter was trained over.
        spec: the grid of the export; `none`: the merged weights stay as they are.
        sequences: token ids to measure on, held out from training.
        asked: `trained` or `original`: taken whatever the figures say, which are given all the same.

    Raises:
        KaruiError: `asked` is none of these.
    """
    if asked not in get_args(Merge):
        raise KaruiError(f"merge {asked!r} is not known; use one of {', '.join(get_args(Merge))}.")
    trained = logprobs_of(unmerged_model(source, adapter, base), sequences)

    def divergence(model: Any) -> float:
        put_on_grid(model, spec)
        return kl_per_token(trained, logprobs_of(model, sequences))

    best, kl = _measure(source, adapter, base, divergence)
    if asked == "auto":
        chosen, why = best, "the smaller KL"
    else:
        chosen, why = (base if asked == "trained" else NONE), f"as asked: {asked}"
    return MergeChoice(base=chosen, why=why, measured=kl, tokens=sum(map(len, sequences)))


def choose_by_loss(source: Path, adapter: Path, base: QuantSpec, samples: list[Any]) -> MergeChoice:
    """The merge with the smaller loss on the supervised tokens of `samples` (held out from training), before any rounding.

    Without samples the base that was trained is taken.
    """
    if not samples:
        return MergeChoice(base=base, why="no held-out samples to judge by", measured={}, tokens=0, of="loss")
    tokens = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    chosen, losses = _measure(source, adapter, base, lambda model: _loss_sum(model, samples) / max(1, tokens))
    return MergeChoice(base=chosen, why="the smaller held-out loss", measured=losses, tokens=tokens, of="loss")


def _measure(
    source: Path, adapter: Path, base: QuantSpec, figure: Callable[[Any], float]
) -> tuple[QuantSpec, dict[str, float]]:
    """The base whose merged model has the smaller figure, and both figures by the base's name."""
    found: dict[QuantSpec, float] = {}
    for candidate in (base, NONE):
        found[candidate] = figure(merged_model(source, None, adapter=adapter, base_spec=candidate, batches=True))
    names = {candidate: "original" if candidate == NONE else f"dequantized {candidate}" for candidate in found}
    return min(found, key=lambda b: found[b]), {names[b]: value for b, value in found.items()}


def _loss_sum(model: Any, samples: list[Any]) -> float:
    """Loss of the supervised tokens of samples (`ids`, `loss_mask`), summed."""
    import torch

    total = 0.0
    for sample in samples:
        ids, mask = torch.tensor(sample.ids.tolist()), torch.tensor(sample.loss_mask.tolist()).bool()[1:]
        with torch.inference_mode():
            hidden = model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0, :-1][mask]
            logits = capped(model.get_output_embeddings()(scaled(hidden, model.config)).float(), logit_softcap(model.config))
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:][mask], reduction="sum"))
    return total
