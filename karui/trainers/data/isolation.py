"""Proof, on the model at hand, that documents packed into one row do not see one another.

Attention that ignores `cu_seqlens` trains on a different problem without any error (trl 3067, LLaMA-Factory PR 4224), so
the loop calls `prove_isolation` once before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from karui.configs.errors import KaruiError
from karui.trainers.data.packing import collate
from karui.trainers.data.types import PackedBatch, Sample


def isolation_probe(samples: Sequence[Sample], num_documents: int = 3, max_length: int = 24) -> PackedBatch:
    """A small packed batch for `prove_isolation`: the heads of the first samples, repeated when there are too few."""
    if not len(samples):
        raise KaruiError("isolation_probe: no samples.")
    heads = []
    for d in range(num_documents):
        sample = samples[d % len(samples)]
        n = min(len(sample), max_length)
        heads.append(Sample(ids=np.array(sample.ids[:n]), loss_mask=np.array(sample.loss_mask[:n]), source_row=sample.source_row))
    return collate(heads)


@torch.no_grad()
def prove_isolation(forward: Callable[[PackedBatch], torch.Tensor], batch: PackedBatch, tolerance: float = 1e-6) -> float:
    """Replace the tokens of one document; the others' outputs must stay.

    The first document is changed (later ones must not look back into it) and then the last (nor earlier ones ahead).

    Args:
        forward: maps a batch to outputs [T, ...] (hidden states or logits); dropout must be off.
        batch: at least two documents.
        tolerance: largest allowed change, relative to the largest output; 0 asks for bit equality.

    Returns:
        The largest change seen in a document that was not touched, relative to the largest output.

    Raises:
        KaruiError: a document leaks into another, or the outputs do not depend on the tokens at all (no proof then).
    """
    cu = batch.cu_seqlens.tolist()
    num_documents = len(cu) - 1
    if num_documents < 2:
        raise KaruiError(f"prove_isolation: needs a batch of at least two documents, this one has {num_documents}.")
    before = forward(batch).float()
    scale = max(float(before.abs().max()), 1e-30)
    # Ids are taken from the batch itself, so they are in the vocabulary; + 1 or - 1 when it holds but one id.
    other = int(batch.tokens.max()) if int(batch.tokens.max()) != int(batch.tokens.min()) else abs(int(batch.tokens[0]) - 1)
    worst = 0.0
    for touched in (0, num_documents - 1):
        inside = slice(cu[touched], cu[touched + 1])
        tokens = batch.tokens.clone()
        tokens[inside] = torch.where(tokens[inside] == other, int(batch.tokens.min()) if other else 1, other)
        change = (forward(replace(batch, tokens=tokens)).float() - before).abs().flatten(1).amax(1) / scale
        if not bool(torch.isfinite(change).all()):
            raise KaruiError("prove_isolation: the model's outputs are not finite; check the weights for NaN.")
        if float(change[inside].max()) == 0:
            raise KaruiError("prove_isolation: changing a document's tokens changes nothing in its own outputs; "
                             "the forward function does not use batch.tokens.")
        change[inside] = 0
        leak = float(change.max())
        worst = max(worst, leak)
        if leak > tolerance:
            where = int(np.searchsorted(cu, int(change.argmax()), side="right")) - 1
            raise KaruiError(f"packing is not isolated: changing document {touched} of a row changes the outputs of document "
                             f"{where} by {leak:.2e} of the largest output (allowed: {tolerance:.0e}). This model's attention "
                             "ignores document borders; set data.packing: false.")
    return worst
