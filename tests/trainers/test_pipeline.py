"""End to end on a tiny model: recipe -> training -> export -> parity gate -> engine -> comparison, and the gate's refusals."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from karui.cli import app
from karui.configs import KaruiError, Recipe
from karui.configs.errors import UnsupportedError
from karui.trainers.calibrated import Calibration
from karui.trainers.compare import compare
from karui.trainers.pipeline import export_run, run_pipeline
from karui.trainers.talk import answer

QLORA = [{"method": "qlora", "base": "nf4dq", "rank": 4, "alpha": 8}]


@pytest.fixture(scope="module")
def whole_run(tiny_folder, rows_file, tmp_path_factory):
    """A QLoRA run with an int4 export, made once."""
    folder = tmp_path_factory.mktemp("pipeline")
    recipe = Recipe.build({
        "name": "tiny", "model": str(tiny_folder), "data": {"train": str(rows_file), "holdout": 4, "max_length": 128},
        "prepare": QLORA, "optim": {"lr": 5e-3, "batch": 4, "steps": 12, "micro_tokens": 128},
        "run": {"output": str(folder / "run"), "threads": 1}, "track": {"to": "none"}, "export": [{"spec": "w4g32"}],
        "eval": {"speed": False}})  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KARUI_CACHE", str(folder / "cache"))
        return recipe, run_pipeline(recipe)


@pytest.fixture
def finished(whole_run, tmp_path):
    """A copy of that run which a test may spoil: (recipe, result, run folder, bundle)."""
    recipe, result = whole_run
    folder = tmp_path / "finished"
    shutil.copytree(result.run.folder, folder)
    return recipe, result, folder, folder / result.bundles[0].name


def test_the_whole_path(finished, capsys):
    recipe, result, _, bundle = finished
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["recipe"] == json.loads(json.dumps(recipe.dump()))
    assert manifest["parity"]["max_abs_dlogprob"] < 2e-3 and manifest["parity"]["tokens"] > 50
    specs = {name: t["spec"] for name, t in manifest["tensors"].items()}
    assert specs["model.layers.0.mlp.up_proj.weight"] == "w4g32" and specs["model.embed_tokens.weight"] == "w8"
    assert manifest["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]] and "lm_head.weight" not in specs
    base, light = result.reports
    assert light.held_out.loss < base.held_out.loss - 0.2
    assert light.disk_bytes < base.disk_bytes


def test_the_gate_sees_a_wrong_merge(finished, monkeypatch):
    """An engine that runs something else than what was trained must not pass, and nothing may be left behind."""
    from karui.inference.bundle.merge import Adapter

    _, _, folder, _ = finished
    honest = Adapter.apply

    def off_by_a_sign(self, name, weight):  # base and adapter run apart go through peft, not through here
        return 2 * weight - honest(self, name, weight)

    monkeypatch.setattr(Adapter, "apply", off_by_a_sign)
    target = folder / "wrong"
    with pytest.raises(KaruiError, match="parity: the merged model's logprobs differ .* the bundle was not written"):
        export_run(folder, output=target)
    assert not target.exists() and not [p for p in target.parent.iterdir() if "wrong" in p.name]


def test_the_gate_sees_an_engine_that_runs_something_else(finished, monkeypatch):
    from karui.trainers import parity

    honest = parity.engine_logprobs
    monkeypatch.setattr(parity, "engine_logprobs", lambda *a, **k: [x + 0.1 for x in honest(*a, **k)])
    with pytest.raises(KaruiError, match="parity: the engine's logprobs differ .* the bundle was not written"):
        export_run(finished[2], output=finished[2] / "wrong")


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "autoround"])
def test_an_export_is_calibrated_on_the_run_s_own_samples(finished, method):
    folder = finished[2]
    how = Calibration(method=method, samples=8, length=64)
    report = export_run(folder, output=folder / "calibrated", spec="w3g32", how=how)
    plain = export_run(folder, output=folder / "plain", spec="w3g32")
    found, nearest = (r.manifest.provenance.notes["quantization"] for r in (report, plain))
    assert found["method"] == method and nearest["method"] == "rtn" and nearest["calibration_tokens"] == 0
    assert found["calibration_tokens"] == (0 if method == "hqq" else 512)
    assert found["merge_difference"] < 1e-3 and found["kl_to_merged"] > 0
    if method in ("gptq", "autoround"):
        assert found["kl_to_merged"] < nearest["kl_to_merged"]
    if method != "hqq":  # the better of both merges, by held-out loss
        merge = report.manifest.provenance.notes["merge"]
        losses = merge["loss"]
        assert set(losses) == {"dequantized nf4dq", "original"} and merge["why"] == "the smaller held-out loss"
        assert (merge["base"] == "none") == (losses["original"] < losses["dequantized nf4dq"])
    specs = {n: t.spec for n, t in report.manifest.tensors.items() if t.spec != "none"}
    assert set(specs.values()) == {"w3g32", "w8"} and len(specs) == 2 * 7 + 1
    assert answer(str(report.path), "what is 3 plus 9", {"max_tokens": 4})


def test_int8_activations_pass_the_gate_on_a_bound_of_their_own(finished):
    folder = finished[2]
    report = export_run(folder, output=folder / "a8", spec="w8a8", how=Calibration(method="smoothquant", samples=8, length=64))
    assert report.manifest.parity["max_abs_dlogprob"] < report.manifest.parity["bound"] == 0.1
    norm = "model.layers.0.input_layernorm.weight"
    assert report.manifest.tensors[norm].why == "changed by calibration"


def test_calibration_rows_are_the_samples_the_trainer_saw(finished):
    from karui.catalogue import load_tokenizer
    from karui.trainers.calibrated import rows_of
    from karui.trainers.data import load_samples

    recipe = finished[0]
    samples = load_samples(recipe.data, load_tokenizer(recipe.model.name), "train")
    rows = rows_of(samples, Calibration(samples=3, length=40))
    assert rows.shape == (3, 40) and rows.flatten().tolist() == [t for s in samples for t in s.ids.tolist()][:120]
    every = sum(len(s.ids) for s in samples)
    assert rows_of(samples, Calibration(samples=10**6, length=50)).shape == (every // 50, 50)
    with pytest.raises(KaruiError, match=f"hold {every} tokens, fewer than one calibration row"):
        rows_of(samples, Calibration(samples=1, length=every + 1))


def test_a_wrong_method_is_refused_before_training(make_recipe, tmp_path):
    with pytest.raises(KaruiError, match="unknown quantization method 'gptk'.*Did you mean 'gptq'"):
        run_pipeline(make_recipe(export=[{"spec": "w4g32", "method": "gptk"}]))
    assert not (tmp_path / "run").exists()


def test_what_would_fail_after_training_is_refused_before_it(make_recipe, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(KaruiError, match="taken exists already"):
        run_pipeline(make_recipe(export=[{"output": str(tmp_path / "taken")}]))
    with pytest.raises(KaruiError, match="eval.perplexity 'no.txt': no such file"):
        run_pipeline(make_recipe(export=[{"spec": "w4g32"}], eval={"perplexity": "no.txt"}))
    assert not (tmp_path / "run").exists()


def test_exports_that_were_stopped_go_on(make_recipe, capsys):
    recipe = make_recipe(export=[{"spec": "w4g32"}, {"spec": "w8"}], optim={"steps": 1}, eval={"speed": False, "held_out": False})
    first, second = run_pipeline(recipe).bundles
    before = (first / "manifest.json").stat().st_mtime_ns
    shutil.rmtree(second)
    assert run_pipeline(recipe, resume=True).bundles == (first, second) and (second / "manifest.json").is_file()
    assert (first / "manifest.json").stat().st_mtime_ns == before and "kept" in capsys.readouterr().out


def test_full_training_exports_its_own_weights(make_recipe):
    recipe = make_recipe(prepare=[], optim={"lr": 1e-3, "steps": 3}, eval={"speed": False, "held_out": False})
    result = run_pipeline(recipe)
    report = export_run(result.run.folder, output=result.run.folder / "bundle", spec="none", embedding="none")
    trained = load_file(result.run.final / "model.safetensors")
    stored = load_file(report.path / "model.safetensors")
    assert torch.equal(stored["model.layers.1.mlp.down_proj.weight"], trained["model.layers.1.mlp.down_proj.weight"])


def test_command_line_runs_the_same_recipe(make_recipe, tmp_path, finished):
    recipe, _, run, bundle = finished
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe.dump()))
    done = CliRunner().invoke(app, ["train", str(path), "--set", f"run.output={tmp_path / 'again'}"])
    assert done.exit_code == 0, done.output
    ours, theirs = (
        load_file(folder / "final" / "adapter_model.safetensors") for folder in (tmp_path / "again", run)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    generated = CliRunner().invoke(app, ["generate", str(bundle), "what is 3 plus 9", "--max-tokens", "5"])
    assert generated.exit_code == 0, generated.output


def test_dry_run_trains_nothing(make_recipe, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(make_recipe(prepare=QLORA).dump()))
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "trained" in done.output and not (tmp_path / "run").exists()


def test_answer_streams_what_the_engine_generates(tiny_folder, capsys):
    text = answer(str(tiny_folder), "hello", {"max_tokens": 6}, runner="torch")
    assert capsys.readouterr().out == text + "\n"
    assert answer(str(tiny_folder), "hello", {"max_tokens": 6}, runner="torch") == text


def test_an_adapter_answers_beside_the_model(finished, tiny_folder, monkeypatch, capsys):
    """In the terminal, and served under a name of its own, as the engine and peft say it."""
    from starlette.testclient import TestClient

    from karui.inference.server import run as server
    from karui.inference.server.app import create_app

    final = finished[2] / "final"
    plain, adapted = (answer(str(tiny_folder), "what is 3 plus 9", {"max_tokens": 12}, runner="torch", adapter=adapter)
                      for adapter in (None, final))  # fmt: skip
    assert adapted != plain
    asked = {}
    monkeypatch.setattr(server, "serve", lambda engine, name, **options: asked.update(engine=engine, name=name, **options))
    command = ["serve", str(tiny_folder), "--runner", "torch", "--name", "base", "--adapter", f"maths={final}"]
    done = CliRunner().invoke(app, command, env={"KARUI_API_KEY": "secret"})
    assert done.exit_code == 0 and asked["name"] == "base" and asked["api_key"] == "secret", done.output
    with TestClient(create_app(asked["engine"], "base")) as client:
        said = {name: client.post("/v1/chat/completions", json={
            "model": name, "messages": [{"role": "user", "content": "what is 3 plus 9"}], "max_tokens": 12, "temperature": 0,
        }).json()["choices"][0]["message"]["content"] for name in ("base", "maths")}  # fmt: skip
    assert said == {"base": plain, "maths": adapted}
    with pytest.raises(KaruiError, match="'base' names both the model and an adapter"):
        server.serve_model(tiny_folder, name="base", adapters={"base": final})
    with pytest.raises(UnsupportedError, match="several ranks serves no adapters"):
        server.serve_model(tiny_folder, parallel="tensor", adapters={"maths": final})
    assert "expected KEY=VALUE, e.g. maths=" in CliRunner().invoke(app, ["serve", str(tiny_folder), "--adapter", "maths"]).output


def test_compare_scores_a_model_like_transformers_does(tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 5)
    (report,) = compare([str(tiny_folder)], text=text, speed=False, runner="torch")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tiny_folder)(text.read_text(), add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)(ids, labels=ids).loss.item()
    assert report.perplexity.mean_nll == pytest.approx(loss, abs=1e-5)


class TestBadInput:
    def test_not_a_run(self, tmp_path):
        with pytest.raises(KaruiError, match="is not a run: recipe.json is missing"):
            export_run(tmp_path, output=tmp_path / "out")

    def test_unfinished_run(self, finished, tmp_path):
        folder = finished[2]
        (folder / "final").rename(folder / "aside")
        with pytest.raises(KaruiError, match="the run did not finish. Go on with"):
            export_run(folder, output=tmp_path / "out")

    def test_group_size_that_does_not_divide(self, finished, tmp_path):
        with pytest.raises(KaruiError, match="group size 48 does not divide its input width 64; sizes that do: 16, 32, 64"):
            export_run(finished[2], output=tmp_path / "out", spec="w4g48")

    def test_taken_target(self, finished, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("keep me")
        with pytest.raises(KaruiError, match="out"):
            export_run(finished[2], output=tmp_path / "out")
        assert (tmp_path / "out" / "mine.txt").read_text() == "keep me"

    def test_damaged_bundle(self, finished):
        bundle = finished[3]
        path = bundle / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        from karui.inference.bundle import read

        with pytest.raises(KaruiError, match="sha256"):
            read(bundle, verify="full").verify_hashes()

    def test_errors_reach_the_command_line_without_a_traceback(self, tmp_path):
        import subprocess
        import sys

        done = subprocess.run([sys.executable, "-m", "karui.cli", "train", "nothing-there"], capture_output=True, text=True)
        assert done.returncode == 2 and "no such file" in done.stderr and "Traceback" not in done.stderr


def test_a_short_context_takes_the_windows_that_fit(tiny_folder, tmp_path, capsys):
    """`karui eval` asked for 1024 tokens of models that hold fewer; compared models get windows of one size."""
    short = tmp_path / "short"
    shutil.copytree(tiny_folder, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    text = tmp_path / "text.txt"
    text.write_text("the river rose in the night. " * 40)
    reports = compare([str(tiny_folder), str(short)], text=text, windows=2)
    assert [r.perplexity.tokens for r in reports] == [126, 126] and reports[0].perplexity == reports[1].perplexity
    assert [(r.speed.prefill_tokens, r.speed.new_tokens) for r in reports] == [(448, 64), (48, 16)]
    said = " ".join(capsys.readouterr().out.split())
    assert f"windows of 64 tokens instead of 1024: the context of {short} holds no more" in said
