"""Behavioural: what changes of SmolLM2-135M's architecture cost before any healing, on the shipped sample's text."""

import json
from pathlib import Path

import pytest
import torch

import karui.trainers.samples as samples
from karui.configs.errors import KaruiError
from karui.distill.reshape import kv_heads, latent, size_of, sparse, upcycle, window
from karui.trainers.lean import install_lean_ops
from karui.trainers.sparse import indexers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real():
    """(model, token ids [2, 160], calibration rows)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from karui.catalogue import resolve

    try:
        folder = resolve("smollm2-135m")
    except (KaruiError, OSError) as error:
        pytest.skip(f"smollm2-135m is not on this machine: {error}")

    def text(name, tokens):
        lines = (Path(samples.__path__[0]) / name).read_text(encoding="utf-8").splitlines()
        rows = "\n\n".join(f"{r['question']}\n{r['answer']}" for r in map(json.loads, lines[:40]))
        return torch.tensor(AutoTokenizer.from_pretrained(folder)(rows)["input_ids"][:tokens])

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, text("gsm8k-sample-test.jsonl", 320).view(2, 160), list(text("gsm8k-sample.jsonl", 1024).view(4, 256))


@torch.no_grad()
def loss(model, ids):
    return float(model(ids, labels=ids).loss)


def test_the_mean_of_heads_is_a_better_start_than_the_first_and_latents_than_both(real):
    model, ids, rows = real
    mean, first = kv_heads.convert(model, 1), kv_heads.convert(model, 1, "first")
    narrow, half = latent.convert(model, 64, None, rows), latent.convert(model, 128, None, rows)
    assert size_of(narrow.config).kv == size_of(mean.config).kv == size_of(model.config).kv // 3
    assert size_of(half.config).kv == size_of(model.config).kv // 2
    whole = loss(model, ids)
    assert whole < loss(half, ids) < loss(narrow, ids) < loss(mean, ids) - 1 < loss(first, ids) - 2
    assert loss(half, ids) < whole + 0.5


def test_a_mixture_starts_at_the_dense_loss_and_a_part_of_it_does_not(real):
    model, ids, _ = real
    whole = loss(model, ids)
    assert loss(upcycle.convert(model, 4, 2), ids) == pytest.approx(whole, abs=1e-5)
    assert loss(upcycle.convert(model, 4, 2, 2), ids) == pytest.approx(whole, abs=1e-5)
    assert loss(upcycle.convert(model, 4, 3, 4), ids) > whole + 0.5


def test_few_keys_of_a_trained_indexer_are_nearly_all_keys_and_of_a_drawn_one_are_not(real):
    """24 of 160; a warm-up of eight steps, then transformers' own attention."""
    from karui.configs.objectives import IndexerSection
    from karui.trainers.data import Sample, collate
    from karui.trainers.model import ATTENTION, register_attention
    from karui.trainers.objectives.indexed import IndexedSft

    model, ids, rows = real
    half = latent.convert(model, 128, None, rows)
    dense, local = loss(half, ids), loss(window.convert(model, 24, None), ids) - loss(model, ids)
    copied, drawn = (sparse.convert(half, 24, 4, 96, start=start, rows=rows) for start in ("attention", "random"))
    began, untrained = loss(copied, ids) - dense, loss(drawn, ids) - dense
    register_attention()
    copied.set_attn_implementation(ATTENTION)
    install_lean_ops(copied)
    objective = IndexedSft(copied, 256)
    objective.index_with(IndexerSection(warm_up=1.0))
    optimizer = torch.optim.AdamW([p for m in indexers(copied) for p in m.parameters()], lr=5e-4)
    divergence = []
    for step in range(8):
        objective.train()
        objective.before_step(step, 8)
        ids_ = rows[step % 4].numpy().astype("int32")
        batch = collate([Sample(ids=ids_, loss_mask=ids_ >= 0, source_row=0)])
        (objective(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets) / batch.num_supervised).backward()
        optimizer.step()
        optimizer.zero_grad()
        divergence.append(objective.metrics()["loss_indexer"])
    copied.eval()
    with torch.no_grad():
        found = [torch.nn.functional.cross_entropy(copied(row[None], use_cache=False).logits[0, :-1], row[1:]) for row in ids]
    trained = float(torch.stack(found).mean()) - dense
    assert divergence[-1] < 0.8 * divergence[0]
    assert trained < 0.5 * began < 0.25 * min(untrained, local)


def test_a_window_longer_than_the_text_costs_nothing_and_a_shorter_one_more_the_shorter_it_is(real):
    model, ids, _ = real
    whole = loss(model, ids)
    assert loss(window.convert(model, 160), ids) == pytest.approx(whole, abs=1e-5)
    losses = [loss(window.convert(model, n), ids) for n in (96, 48, 16)]
    assert whole < losses[0] < losses[1] < losses[2]
