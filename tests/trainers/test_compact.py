"""Behavioural: what is left out of a row, a shared beginning and the last layer's silent rows change neither loss nor gradient."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from karui.trainers.compact import compact
from karui.trainers.data import IGNORE, Sample, collate
from karui.trainers.lean import LeanAttention, install_lean_ops, keeps_rows
from karui.trainers.model import ATTENTION, LossSum, register_attention

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256}


def sample(ids, first, last=None):
    mask = np.zeros(len(ids), bool)
    mask[first:last] = True
    return Sample(ids=np.array(ids, np.int32), loss_mask=mask, source_row=0)


def documents(prefix=9):
    rng = np.random.default_rng(3)
    system = rng.integers(1, 97, prefix).tolist()
    return [sample(system + rng.integers(1, 97, n).tolist(), prefix + a, b) for n, a, b in ((20, 4, -3), (7, 2, None), (33, 9, -8))]


def model(kind="llama", dtype=torch.float64):
    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES) if kind == "llama" else Qwen3Config(**SIZES, head_dim=32)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(dtype)


def loss_and_gradients(loss, batch):
    loss.zero_grad()
    value = loss.of(batch)
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}


def one_by_one(loss, samples):
    """Each document alone and whole: no sharing, no packing, every row through every layer."""
    whole = torch.zeros((), dtype=torch.float64)
    loss.zero_grad()
    for s in samples:
        batch = collate([s])
        hidden = loss.model.get_decoder()(input_ids=batch.tokens[None], use_cache=False).last_hidden_state[0]
        logits = hidden.double() @ loss.model.get_output_embeddings().weight.T.double()
        value = torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=IGNORE, reduction="sum")
        value.backward()
        whole += value.detach()
    return whole, {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_loss_and_every_gradient_are_those_of_the_documents_alone(kind, dtype, tolerance):
    # transformers computes norms in fp32 even in a float64 model, which is where float64 differs
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the native attention takes as few documents as there are
    try:
        plain = LossSum(model(kind, dtype), 7)
        expected = one_by_one(plain, documents())
        lean = LossSum(model(kind, dtype), 7)
        done = install_lean_ops(lean.model)
        assert done["attention"] == 3 and done["last_layer"] == 1 and keeps_rows(lean.model)
        found = loss_and_gradients(lean, collate(documents()))
    finally:
        torch.set_num_threads(threads)
    assert abs(float(found[0]) - float(expected[0])) <= tolerance * float(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert float((found[1][name] - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max())), name


def test_what_is_left_out():
    samples = documents()
    batch = collate(samples)
    row = compact(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
    assert row.shared and row.cu_seqlens.tolist()[1] == 9
    # a position predicts the next token: the last supervised token itself is not needed as an input
    assert len(row.tokens) == 9 + sum(len(s) - 9 for s in samples) - 4 - 1 - 9
    assert int((row.targets != IGNORE).sum()) == batch.num_supervised
    assert row.positions[: row.cu_seqlens[1]].tolist() == list(range(9))
    for begin in row.cu_seqlens.tolist()[1:-1]:
        assert row.positions[begin] == 9


def test_a_beginning_that_is_supervised_is_not_shared():
    samples = [sample(range(1, 12), 3), sample([*range(1, 9), 40, 41], 3)]
    batch = collate(samples)
    row = compact(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
    assert not row.shared or int(row.cu_seqlens[1]) <= 2
    assert int((row.targets != IGNORE).sum()) == batch.num_supervised


def test_a_filler_and_a_document_without_loss():
    filler = collate([])
    row = compact(filler.tokens, filler.positions, filler.cu_seqlens, filler.targets)
    assert row.tokens.tolist() == filler.tokens.tolist() and not row.shared
    batch = collate([sample(range(1, 20), 19), sample(range(1, 9), 4)])
    row = compact(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
    assert row.tokens.tolist() == list(range(1, 8))


def test_a_shared_beginning_still_isolates():
    """Changing one document past the beginning leaves the loss of the others as it was."""
    loss = LossSum(model(), 64)
    install_lean_ops(loss.model)
    samples = documents()
    alone = [float(loss.of(collate([s])).detach()) for s in samples]
    changed = samples[0].ids.copy()
    changed[12:] = (changed[12:] + 5) % 97
    other = sample(changed, 13, -3)
    together = float(loss.of(collate([other, *samples[1:]])).detach())
    assert together - float(loss.of(collate([other])).detach()) == pytest.approx(alone[1] + alone[2], rel=1e-12)


def test_another_definition_keeps_its_own_forward():
    """An attention that computes something else than q k v with a rotation is left alone."""
    odd = model()
    attention = odd.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: (own(*args, **kwargs)[0] * 1.01, None)
    assert install_lean_ops(odd)["attention"] == 2
    assert not isinstance(attention.forward, LeanAttention)
