"""End to end on a tiny model: every post-training method -> bundle -> parity gate -> engine, and what is refused before the work."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from karui.cli import app
from karui.configs import KaruiError, UnsupportedError
from karui.inference.engine import Engine
from karui.qat.methods import METHODS, TRAINED
from karui.trainers.kv_levels import make_levels
from karui.trainers.quantize import quantize_to_bundle
from tests.qat.test_experts import moe

QUICK = {"autoround": {"iterations": 3}, "block_ap": {"epochs": 1}}
SPECS = {"smoothquant": "w8a8", "llm_int8": "w8a8"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The {i}th sheep is {i * i} days old, and {i % 7} of its lambs are black.\n" for i in range(60)))
    return path


@pytest.mark.parametrize("method", METHODS)
def test_every_method_becomes_a_bundle_the_engine_runs(tiny_folder, text, tmp_path, method):
    manifest = quantize_to_bundle(
        str(tiny_folder), tmp_path / "out", method=method, spec=SPECS.get(method, "w4g32"), calibration=text, samples=8, length=64,
        settings=QUICK.get(method),
    )  # fmt: skip
    assert manifest.parity["max_abs_dlogprob"] < manifest.parity["bound"] == (0.1 if method in SPECS else 2e-3)
    found = {n: t.spec for n, t in manifest.tensors.items() if "proj" in n}
    allowed = {"w8", "w8a8"} if method == "llm_int8" else {SPECS.get(method, "w4g32")}  # w8: a layer with outlier columns
    assert set(found.values()) <= allowed and len(found) == 14
    assert manifest.provenance.notes["quantization"]["method"] == method
    engine = Engine.load(tmp_path / "out", max_context=64, max_sequences=1)
    assert torch.isfinite(engine.score([[5, 70, 90, 31]])[0]).all()


@pytest.mark.parametrize("kind", ("mixtral", "qwen2_moe"))
@pytest.mark.parametrize("method", ("rtn", "gptq"))
def test_a_mixture_of_experts_becomes_a_bundle_the_engine_runs(kind, method, tiny_folder, text, tmp_path):
    """Expert by expert; an expert that saw too little is named in the manifest."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = moe(kind, vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    manifest = quantize_to_bundle(
        str(tmp_path / "moe"), tmp_path / "out", method=method, spec="w4g16", calibration=text, samples=8, length=64,
        settings={} if method == "rtn" else {"min_tokens": 160},
    )  # fmt: skip
    assert manifest.parity["max_abs_dlogprob"] < 2e-3
    experts = {n: t for n, t in manifest.tensors.items() if ".experts." in n}
    assert len(experts) == 2 * 6 * 3 and all(t.spec == "w4g16" for t in experts.values())
    assert any(t.fate == "fell_back" for t in experts.values()) == (method == "gptq")
    ids = [5, 70, 90, 31, 8, 8, 100]
    engine = Engine.load(tmp_path / "moe", kv_dtype="float32", max_context=64, max_sequences=1)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(engine.score([ids])[0], want, rtol=1e-3, atol=1e-3)


def test_gptq_loses_less_than_rounding_and_says_so(tiny_folder, text, tmp_path):
    """The engine's own scores of the calibration text, against the unquantized model's."""
    ids = [t for t in range(40, 100)]
    whole = Engine.load(tiny_folder, runner="torch", kv_dtype="float32", max_context=64, max_sequences=1).score([ids])[0]
    lost = {}
    for method in ("rtn", "gptq"):
        quantize_to_bundle(str(tiny_folder), tmp_path / method, method=method, spec="w2g32", calibration=text, samples=12, length=64)
        engine = Engine.load(tmp_path / method, runner="torch", kv_dtype="float32", max_context=64, max_sequences=1)
        lost[method] = float((engine.score([ids])[0] - whole).abs().mean())
    assert lost["gptq"] < lost["rtn"]


class TestBadInput:
    def test_a_model_the_engine_cannot_run_is_refused_before_the_work(self, tmp_path):
        from transformers import Starcoder2Config, Starcoder2ForCausalLM

        config = Starcoder2Config(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                  num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
        Starcoder2ForCausalLM(config).save_pretrained(tmp_path / "coder")
        with pytest.raises(UnsupportedError, match="model_type 'starcoder2' is not supported by karui's engine"):
            quantize_to_bundle(str(tmp_path / "coder"), tmp_path / "out", method="rtn", spec="w4g32")

    def test_too_little_text(self, tiny_folder, tmp_path):
        short = tmp_path / "short.txt"
        short.write_text("too short")
        with pytest.raises(KaruiError, match="holds 9 tokens; 64 samples of 512 need 32768"):
            quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="gptq", spec="w4g32", calibration=short)

    def test_no_text_where_one_is_needed(self, tiny_folder, tmp_path):
        with pytest.raises(KaruiError, match="awq needs calibration text: give --calibration"):
            quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="awq", spec="w4g32")

    def test_a_taken_target_is_refused_before_the_work(self, tiny_folder, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("mine")
        with pytest.raises(KaruiError, match="out"):
            quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="rtn", spec="w4g32")
        assert (tmp_path / "out" / "file").read_text() == "mine"

    def test_a_bundle_is_no_source(self, tiny_folder, tmp_path):
        quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="rtn", spec="w4g32")
        with pytest.raises(UnsupportedError, match="already quantized"):
            quantize_to_bundle(str(tmp_path / "out"), tmp_path / "again", method="rtn", spec="w4g32")


def test_the_command_and_its_list(tiny_folder, text, tmp_path):
    shown = CliRunner().invoke(app, ["quantize", "--list"])
    assert shown.exit_code == 0
    for method in (*METHODS.values(), *TRAINED.values()):
        assert method.name in shown.output
    done = CliRunner().invoke(app, ["quantize", str(tiny_folder), "-o", str(tmp_path / "out"), "--method", "gptq", "--spec", "w3g32",
                                    "--calibration", str(text), "--samples", "8", "--length", "64", "--set", "damp=0.02",
                                    "--skip", "*.0.mlp.*"])  # fmt: skip
    assert done.exit_code == 0, done.output
    manifest = json.loads((Path(tmp_path) / "out" / "manifest.json").read_text())
    assert manifest["provenance"]["notes"]["quantization"]["settings"]["damp"] == 0.02
    assert manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]["spec"] == "none"
    assert manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]["why"] == "outside the targets"


TRAINED_SPECS = {"bitnet": "w1a8", "bitnet_158": "w1.58a8", "seq": "w2g32", "llm_qat": "w4g32a8"}


@pytest.mark.parametrize("method", TRAINED)
def test_a_method_that_trains_becomes_a_bundle_too(tiny_folder, text, tmp_path, method):
    spec = TRAINED_SPECS.get(method, "w4g32")
    manifest = quantize_to_bundle(
        str(tiny_folder), tmp_path / "out", method=method, spec=spec, calibration=text, samples=8, length=64, work=tmp_path / "work",
        settings={"steps": 2, "batch": 4},
    )  # fmt: skip
    assert manifest.parity["max_abs_dlogprob"] < manifest.parity["bound"]
    assert {t.spec for n, t in manifest.tensors.items() if "proj" in n} == {"w3g32" if method == "seq" else spec}
    kept = json.loads((tmp_path / "work" / "run" / "recipe.json").read_text())
    assert kept["prepare"][0]["method"] == method and kept["objective"]["kind"] == "distil"
    assert torch.isfinite(Engine.load(tmp_path / "out", max_context=64, max_sequences=1).score([[5, 70, 90, 31]])[0]).all()


def test_a_training_method_goes_on_in_its_work_folder(tiny_folder, text, tmp_path, monkeypatch):
    """Interrupted after two of four steps: started again it ends as one that was not."""
    from karui.trainers import run as running

    how = dict(method="lsq", spec="w4g32", calibration=text, samples=16, length=64, settings={"steps": 4, "batch": 4})
    whole = quantize_to_bundle(str(tiny_folder), tmp_path / "whole", **how)
    train, cut = running.run_recipe, []

    def interrupted(recipe, **named):
        cut.append(recipe.optim.steps)
        changed = recipe.model_copy(update={"run": recipe.run.model_copy(update={"checkpoint_every": 2})})
        result = train(changed, **named)
        shutil.rmtree(result.folder / "checkpoint-000004")
        shutil.rmtree(result.final)
        return dataclasses.replace(result, final=None)

    monkeypatch.setattr(running, "run_recipe", interrupted)
    with pytest.raises(KaruiError, match="start the same command again with --work"):
        quantize_to_bundle(str(tiny_folder), tmp_path / "again", work=tmp_path / "work", **how)
    monkeypatch.setattr(running, "run_recipe", train)
    again = quantize_to_bundle(str(tiny_folder), tmp_path / "again", work=tmp_path / "work", **how)
    assert cut == [4] and {n: t.parts for n, t in whole.tensors.items()} == {n: t.parts for n, t in again.tensors.items()}


def test_a_method_that_trains_needs_text_and_has_one_grid(tiny_folder, text, tmp_path):
    with pytest.raises(KaruiError, match="lsq trains on the grid --spec: give --calibration FILE, and no --budget"):
        quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="lsq", spec="w4g32")
    with pytest.raises(KaruiError, match="karui quantize --method lsq.*prepare.*learning_rate"):
        quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="lsq", spec="w4g32", calibration=text, samples=8, length=64,
                           settings={"learning_rate": 1})  # fmt: skip


def test_a_budget_spends_bits_where_they_count(tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and nine is twelve. " * 60, encoding="utf-8")
    calibration = dict(calibration=text, samples=8, length=64)
    manifest = quantize_to_bundle(str(tiny_folder), tmp_path / "mixed", method="gptq", spec="w4g32", budget="3.4",
                                  grids=("w2g32", "w3g32", "w4g32"), **calibration)
    plan = manifest.provenance.notes["quantization"]["mixed_precision"]
    assert plan["bits_per_weight"] <= 3.4 and len({g["spec"] for g in plan["groups"]}) > 1
    stored = {n: r.spec for n, r in manifest.tensors.items()}
    for i in range(2):
        q, k = (stored[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qk")
        assert q == k == next(g["spec"] for g in plan["groups"] if g["name"] == f"model.layers.{i}.self_attn.q+k+v")
    with pytest.raises(KaruiError, match="at least two"):
        quantize_to_bundle(str(tiny_folder), tmp_path / "a", method="gptq", spec="w4g32", budget="3", grids=("w2g32",), **calibration)
    with pytest.raises(KaruiError, match="give --calibration"):
        quantize_to_bundle(str(tiny_folder), tmp_path / "b", method="rtn", spec="w4g32", budget="3")


def test_efficient_qat_runs_like_any_method(tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and nine is twelve. " * 60, encoding="utf-8")
    manifest = quantize_to_bundle(str(tiny_folder), tmp_path / "bundle", method="efficient_qat", spec="w2g32", calibration=text,
                                  samples=8, length=64)
    facts = manifest.provenance.notes["quantization"]
    assert facts["e2e_loss"] <= facts["e2e_loss_before"] and manifest.parity["max_abs_dlogprob"] <= 2e-3


def test_levels_of_a_kvquant_cache_go_beside_a_bundle(tiny_folder, text, tmp_path):
    quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="rtn", spec="w4g32")
    given = ["kv-levels", str(tmp_path / "out"), "--calibration", str(text), "--samples", "8", "--length", "64"]
    done = CliRunner().invoke(app, [*given, "--format", "kvquant4"])
    assert done.exit_code == 0 and (tmp_path / "out" / "kvquant4.safetensors").is_file(), done.output
    rough, plain = (Engine.load(tmp_path / "out", runner="torch", kv_dtype=kind, max_context=128, memory="8MB")
                    for kind in ("kvquant4", "float32"))  # fmt: skip
    ids = [[5 + i % 60 for i in range(100)]]
    error = (rough.score(ids)[0] - plain.score(ids)[0]).abs()
    assert 0 < error.mean() < 0.1
    with pytest.raises(KaruiError, match=r"--format 'kivi4' needs no levels; those that do: kvquant4"):
        make_levels(str(tmp_path / "out"), kv_dtype="kivi4", calibration=text)
    with pytest.raises(KaruiError, match="tokens; 900 samples of 64 need"):
        make_levels(str(tmp_path / "out"), kv_dtype="kvquant3", calibration=text, samples=900, length=64)
