"""Behavioural: what every post-training method owes its user, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from karui.configs import KaruiError, UnsupportedError
from karui.kernels.qtensor import QTensor
from karui.qat.calibration import HiddenStates, block_arguments, decoder_of
from karui.qat.methods import METHODS
from karui.qat.run import quantize_model
from tests.qat.conftest import rows, run, tiny

QUICK = {"autoround": {"iterations": 3}, "block_ap": {"epochs": 1}}
NAMES = list(METHODS)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(rows(3, 20, seed=9)).logits


def names_for(name: str) -> str:
    return "w8a8" if name in ("smoothquant", "llm_int8") else "w4g16"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_calibrated_model_is_the_exported_one(name: str, kind: str) -> None:
    model = tiny(kind, tie_word_embeddings=False)
    result = run(model, name, names_for(name), settings=QUICK.get(name, {}))
    other = tiny(kind, seed=5, tie_word_embeddings=False)
    missing = other.load_state_dict(result.dense(), strict=True)
    assert not missing.missing_keys
    assert torch.equal(logits(model), logits(other))
    quantized = [n for n, v in result.weights.items() if isinstance(v, QTensor)]
    assert len(quantized) == 3 * 7 and all(n.endswith("proj.weight") for n in quantized)


@pytest.mark.parametrize("name", NAMES)
def test_every_linear_and_the_embedding_have_a_fate(name: str) -> None:
    model = tiny()
    result = run(model, name, names_for(name), settings=QUICK.get(name, {}))
    named = [r.name for r in result.report]
    assert len(named) == len(set(named)) == 3 * 7 + 2
    for entry in result.report:
        assert (entry.spec == "none") != isinstance(result.weights.get(entry.name), QTensor)
        if entry.spec != "none":
            assert entry.error is not None and 0 <= entry.error < 1
            assert not METHODS[name].calibrates or entry.tokens == rows().numel()


class Killed(Exception):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_resume_after_a_kill_is_bit_identical(name: str, tmp_path: Path) -> None:
    settings = QUICK.get(name, {})
    whole = run(tiny(), name, names_for(name), settings=settings)

    def kill(done: int, blocks: int, seconds: float) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        run(tiny(), name, names_for(name), settings=settings, work=tmp_path, progress=kill)
    assert (tmp_path / "block-0000.safetensors").is_file() and not (tmp_path / "block-0001.safetensors").exists()
    seen: list[int] = []
    again = run(tiny(), name, names_for(name), settings=settings, work=tmp_path, progress=lambda d, n, s: seen.append(d))
    assert seen == [1, 2, 3]
    assert whole.weights.keys() == again.weights.keys()
    for key, value in whole.weights.items():
        other = again.weights[key]
        if isinstance(value, QTensor):
            assert isinstance(other, QTensor) and torch.equal(value.codes, other.codes) and torch.equal(value.scale, other.scale)
        else:
            assert torch.equal(value, other), key
    assert [r.dump() for r in whole.report] == [r.dump() for r in again.report]


def test_a_work_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    run(tiny(), "gptq", work=tmp_path)
    with pytest.raises(KaruiError, match="another model, data set, method or setting"):
        run(tiny(), "gptq", "w3g16", work=tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    with pytest.raises(KaruiError, match="not empty"):
        run(tiny(), "gptq", work=tmp_path / "other")


def test_a_finished_work_folder_gives_the_result_without_calibrating(tmp_path: Path) -> None:
    first = run(tiny(), "gptq", work=tmp_path)
    model = tiny()
    second = run(model, "gptq", work=tmp_path)
    other = tiny()
    other.load_state_dict(first.dense(), strict=False)
    assert torch.equal(logits(model), logits(other)) and len(second.report) == len(first.report)


def test_batch_of_rows_is_the_model_itself() -> None:
    model = tiny()
    data = rows(5, 24)
    kwargs, embed = block_arguments(model, 24)
    hidden = embed(data)
    with torch.no_grad():
        for layer, named in zip(decoder_of(model)[1], kwargs):
            out = layer(hidden, **named)
            hidden = out[0] if isinstance(out, tuple) else out
        whole = model.model(data, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.model.norm(hidden), whole)


def test_tied_embedding_stays_tied() -> None:
    model = tiny(tie_word_embeddings=True)
    result = run(model, "gptq")
    assert "lm_head.weight" not in result.weights and model.lm_head.weight is model.model.embed_tokens.weight
    fates = {r.name: r for r in result.report}
    assert fates["lm_head.weight"].note == "tied to the embedding"


def test_overrides_and_skip() -> None:
    result = run(tiny(), "gptq", overrides={"down_proj": "w8", "*.2.mlp.up_proj": "w2g16"}, skip=["*.0.self_attn.*"])
    specs = {n: str(v.spec) for n, v in result.weights.items() if isinstance(v, QTensor)}
    assert specs["model.layers.1.mlp.down_proj.weight"] == "w8" and specs["model.layers.2.mlp.up_proj.weight"] == "w2g16"
    assert "model.layers.0.self_attn.q_proj.weight" not in specs and specs["model.layers.2.mlp.gate_proj.weight"] == "w4g16"


@pytest.mark.parametrize("bad", ["mlp.up_prj", "*.self_atn.q_proj"])
def test_a_pattern_without_a_match_names_the_nearest(bad: str) -> None:
    with pytest.raises(KaruiError, match="matches no linear.*Did you mean"):
        run(tiny(), "rtn", targets=[bad])


def test_bad_calibration_sets() -> None:
    for data, text in (
        (torch.zeros(0, 32, dtype=torch.long), "calibration rows"),
        (torch.zeros(4, 32), "calibration rows"),
        (rows(1, 32), "too small"),
        (rows() + 500, "token id"),
    ):
        with pytest.raises(KaruiError, match=text):
            run(tiny(), "gptq", data=data)
    model = tiny()
    from karui.qat.run import quantize_loaded

    with pytest.raises(KaruiError, match="needs calibration rows"):
        quantize_loaded(model, model.config.to_dict(), "gptq", "w4g16", None)


def test_group_size_that_does_not_divide_is_refused_before_work() -> None:
    with pytest.raises(KaruiError, match="down_proj: group size 64 does not divide its input width 96"):
        run(tiny(), "gptq", "w4g64")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_name_the_layer(name: str, bad: float) -> None:
    """In activations where a method sees some, else in the weight."""
    model = tiny()
    if METHODS[name].calibrates:
        model.model.layers[1].post_attention_layernorm.weight.data[3] = bad
    else:
        model.model.layers[1].mlp.up_proj.weight.data[5, 0] = bad
    with pytest.raises(KaruiError, match=r"model\.layers\.1\.(post_attention_layernorm|mlp\.(up|gate)_proj)"):
        run(model, name, names_for(name), settings=QUICK.get(name, {}))


def test_already_quantized_is_refused(tmp_path: Path) -> None:
    model = tiny()
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "gptq"}}
    from karui.qat.run import quantize_loaded

    with pytest.raises(UnsupportedError, match="already quantized \\(gptq\\)"):
        quantize_loaded(model, config, "rtn", "w4g16")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="bundle"):
        quantize_model(tmp_path, "rtn", "w4g16")


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(KaruiError, match="Did you mean 'gptq'"):
        run(tiny(), "gptk")


def test_a_model_folder_end_to_end(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    result = quantize_model(tmp_path, "gptq", "w4g16", rows())
    direct = run(model, "gptq")
    for key, value in direct.weights.items():
        if isinstance(value, QTensor):
            assert torch.equal(value.codes, result.weights[key].codes)  # type: ignore[union-attr]


def test_mapped_hidden_states_survive(tmp_path: Path) -> None:
    stream = HiddenStates((2, 3, 4), tmp_path / "h.bin")
    stream.data.copy_(torch.arange(24.0).view(2, 3, 4))
    del stream
    assert torch.equal(HiddenStates((2, 3, 4), tmp_path / "h.bin").data, torch.arange(24.0).view(2, 3, 4))
