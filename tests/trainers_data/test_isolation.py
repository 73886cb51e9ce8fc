"""Behavioural: the isolation proof accepts models that isolate and catches each way of leaking."""

import numpy as np
import pytest
import torch

from karui.configs.errors import KaruiError
from karui.trainers.data import Sample, collate, isolation_probe, prove_isolation

VOCAB, DIM = 50, 8


def batch(*lengths, token=None):
    rng = np.random.default_rng(0)
    return collate([Sample(ids=np.full(n, token, np.int32) if token is not None else rng.integers(0, VOCAB, n).astype(np.int32),
                           loss_mask=np.ones(n, bool), source_row=0) for n in lengths])


def model(allowed):
    """One attention layer; `allowed(query_doc, key_doc, query, key)` says who sees whom."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, DIM, generator=generator)

    def forward(b):
        n = b.num_tokens
        doc = torch.repeat_interleave(torch.arange(len(b.cu_seqlens) - 1), b.cu_seqlens.diff().long())
        at = torch.arange(n)
        mask = torch.tensor([[allowed(doc[q], doc[k], at[q], at[k]) for k in range(n)] for q in range(n)])
        x = table[b.tokens]
        return (x @ x.T).masked_fill(~mask, -torch.inf).softmax(-1) @ x

    return forward


def test_isolated_model_passes_bit_equal():
    assert prove_isolation(model(lambda dq, dk, q, k: dq == dk and k <= q), batch(4, 5, 3), tolerance=0) == 0


@pytest.mark.parametrize("name,allowed", {
    "causal over the row": lambda dq, dk, q, k: k <= q,
    "looks ahead over borders": lambda dq, dk, q, k: dq == dk or k == q + 1,
    "first token only": lambda dq, dk, q, k: (dq == dk and k <= q) or k == 0,
}.items())
def test_leaks_are_caught(name, allowed):
    with pytest.raises(KaruiError, match="packing is not isolated: changing document"):
        prove_isolation(model(allowed), batch(4, 5, 3))


def test_ids_stay_in_the_vocabulary_whatever_the_batch():
    for token in (0, 1, VOCAB - 1):
        prove_isolation(model(lambda dq, dk, q, k: dq == dk), batch(2, 2, token=token))


def test_no_proof_without_dependence_or_documents():
    with pytest.raises(KaruiError, match="changes nothing in its own outputs"):
        prove_isolation(lambda b: torch.ones(b.num_tokens, 3), batch(3, 3))
    with pytest.raises(KaruiError, match="at least two documents"):
        prove_isolation(model(lambda *_: True), batch(3))
    with pytest.raises(KaruiError, match="not finite"):
        prove_isolation(lambda b: b.tokens[:, None].float() * torch.nan, batch(3, 3))


def test_probe_is_small_and_always_has_documents():
    one = Sample(ids=np.arange(100, dtype=np.int32), loss_mask=np.ones(100, bool), source_row=0)
    probe = isolation_probe([one])
    assert probe.cu_seqlens.tolist() == [0, 24, 48, 72]
    with pytest.raises(KaruiError):
        isolation_probe([])
