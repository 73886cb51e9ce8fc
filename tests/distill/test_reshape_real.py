"""Behavioural: what changes of SmolLM2-135M's architecture cost before any healing, on the shipped sample's text."""

import json
from pathlib import Path

import pytest
import torch

import karui.trainers.samples as samples
from karui.configs.errors import KaruiError
from karui.distill.reshape import kv_heads, latent, size_of, upcycle, window

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


def test_a_window_longer_than_the_text_costs_nothing_and_a_shorter_one_more_the_shorter_it_is(real):
    model, ids, _ = real
    whole = loss(model, ids)
    assert loss(window.convert(model, 160), ids) == pytest.approx(whole, abs=1e-5)
    losses = [loss(window.convert(model, n), ids) for n in (96, 48, 16)]
    assert whole < losses[0] < losses[1] < losses[2]
