"""The bound of the parity gate where activations are rounded: what the prepared model itself moves by."""

import json

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.trainers import parity


@pytest.fixture
def gate(monkeypatch, tiny_folder):
    """A gate over a bundle whose engine differs by 0.3, and the calls of the prepared model."""
    shaken = []

    def model_logprobs(model, ids, shake=0.0):
        shaken.append(shake)
        return [-1.0 - (moved["by"] if shake else 0.0)] * (len(ids) - 1)

    moved = {"by": 0.0}
    monkeypatch.setattr(parity, "model_logprobs", model_logprobs)
    monkeypatch.setattr(parity, "engine_logprobs", lambda bundle, ids, runner: [-1.3] * (len(ids) - 1))
    monkeypatch.setattr(parity.Manifest, "read", lambda path: None)

    def run(by, bound):
        moved["by"] = by
        return parity.make_gate(tiny_folder, lambda manifest: None, bound)(tiny_folder)

    return run, shaken


def test_a_model_that_rounding_moves_as_much_is_not_refused(gate):
    run, shaken = gate
    figures = run(0.1, parity.INT8_BOUND)
    assert figures["bound"] == pytest.approx(0.4) and figures["max_abs_dlogprob"] == pytest.approx(0.3)
    assert shaken == [0.0, parity.SHAKE]


def test_a_steady_model_and_one_without_rounded_activations_are_refused(gate):
    run, shaken = gate
    with pytest.raises(KaruiError, match=r"up to 0\.3 over .* bound 0\.2;"):
        run(0.05, parity.INT8_BOUND)
    shaken.clear()
    with pytest.raises(KaruiError, match=r"bound 0\.002"):
        run(1.0, parity.BOUND)
    assert shaken == [0.0]


def test_shaken_embeddings_move_logprobs_a_little(tiny_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    ids = list(range(5, 25))
    plain, again, shaken = (torch.tensor(parity.model_logprobs(model, ids, s)) for s in (0.0, 0.0, 1e-3))
    assert torch.equal(plain, again) and 0 < float((plain - shaken).abs().max()) < 0.1


def test_the_probe_reaches_past_a_window_where_there_is_one(tmp_path):
    from karui.trainers.parity import past_window

    ids = list(range(90))
    for config, wanted in (({}, 90), ({"sliding_window": None}, 90), ({"sliding_window": 8}, 90), ({"sliding_window": 128}, 256),
                           ({"sliding_window": 600}, 1024),
                           ({"sliding_window": 4096}, 90), ({"sliding_window": 128, "use_sliding_window": False}, 90),
                           ({"sliding_window": 128, "max_position_embeddings": 200}, 199)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = past_window(ids, tmp_path)
        assert len(found) == wanted and found == [i % 90 for i in range(wanted)]
