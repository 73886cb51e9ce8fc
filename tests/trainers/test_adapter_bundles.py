"""End to end on a tiny model: every kind of adapter, trained by a run, is the model that its bundle holds."""

import json

import pytest
import torch

from karui.adapters.files import load_adapter
from karui.trainers.pipeline import export_run
from karui.trainers.run import prepare, run_recipe

KINDS = {
    "lora": {"method": "lora"},
    "some layers": {"method": "qlora", "targets": ["q_proj", "down_proj"], "base": "w4g32"},
    "dora": {"method": "lora", "dora": True, "rslora": True},
    "qdora": {"method": "qlora", "dora": True},
    "pissa": {"method": "lora", "init": "pissa"},
    "olora": {"method": "lora", "init": "olora", "dora": True},
    "qpissa": {"method": "qlora", "init": "pissa", "init_steps": 2},
    "loftq": {"method": "qlora", "init": "loftq", "base": "w4g32"},
    "loftq dora": {"method": "qlora", "init": "loftq", "dora": True},
    "eva": {"method": "lora", "init": "eva", "eva_rho": 2},
    "fp8": {"method": "qlora", "base": "fp8"},
    "nvfp4": {"method": "qlora", "base": "nvfp4"},
    "embedding": {"method": "lora", "train_also": ["embed_tokens", "norm"], "lr_ratio": 4},
}


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_reaches_its_bundle(kind, make_recipe, tmp_path):
    """`spec: none` leaves the merged weights as they are, so the bundle must score as the trained model does."""
    from karui.inference.engine import Engine

    step = {"rank": 4, "alpha": 8, **KINDS[kind]}
    recipe = make_recipe(prepare=[step], optim={"lr": 5e-3, "batch": 4, "steps": 4, "micro_tokens": 128}, data={"holdout": 0})
    run = run_recipe(recipe)
    ids = prepare(recipe).samples[0].ids.tolist()
    from transformers import AutoModelForCausalLM

    fresh = AutoModelForCausalLM.from_pretrained(recipe.model.name, attn_implementation="eager")
    spec = json.loads((run.final / "karui_adapter.json").read_text())["base_spec"]
    if spec != "none" and not (run.final / "karui_residual.safetensors").exists():
        from karui.adapters.files import fingerprint
        from karui.adapters.lora import attach
        from karui.configs.steps import LoraStep

        base = fingerprint(fresh)
        fresh = attach(fresh, LoraStep(method="qlora", base=spec, targets=("q_proj",), rank=1)).model.unload()
        trained = load_adapter(fresh, run.final, base=base)
    else:
        trained = load_adapter(fresh, run.final)
    wanted = torch.log_softmax(logits(trained, torch.tensor([ids]))[0, :-1], -1)
    wanted = wanted.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    report = export_run(run.folder, output=tmp_path / "bundle", spec="none", embedding="none")
    engine = Engine.load(report.path, runner="torch", kv_dtype="float32", max_context=len(ids) + 1, max_sequences=1)
    assert torch.allclose(engine.score([ids])[0], wanted, atol=2e-4)
    on_grid = export_run(run.folder, output=tmp_path / "bundle4", spec="w4g32")
    assert on_grid.manifest.parity["max_abs_dlogprob"] < 2e-3


@pytest.mark.parametrize("init", ["kaiming", "loftq"])
def test_the_merge_is_chosen_by_kl_and_told(init, make_recipe, tmp_path, capsys):
    """Without an export grid the trained base gives the trained model back, and the original weights do not."""
    from karui.configs.errors import KaruiError

    step = {"method": "qlora", "rank": 4, "alpha": 8, "base": "w3g32", "init": init}
    run = run_recipe(make_recipe(prepare=[step], optim={"lr": 5e-3, "batch": 4, "steps": 4, "micro_tokens": 128}))
    report = export_run(run.folder, output=tmp_path / "auto", spec="none", embedding="none")
    merge = report.manifest.provenance.notes["merge"]
    assert merge["base"] == "w3g32" and merge["kl"]["dequantized w3g32"] < 1e-6 < 1e-5 < merge["kl"]["original"]
    assert "merged into the dequantized w3g32 base (the smaller KL)" in capsys.readouterr().out.replace("\n", "")
    report = export_run(run.folder, output=tmp_path / "asked", spec="w4g32", merge="original")
    merge = report.manifest.provenance.notes["merge"]
    assert merge["base"] == "none" and min(merge["kl"].values()) > 1e-6
    with pytest.raises(KaruiError, match="auto, trained, original"):
        export_run(run.folder, output=tmp_path / "wrong", merge="both")
