"""Behavioural: every method on every grid it claims, and what each prepares is what it converts to, bit for bit, up to the engine."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from karui.cli import app
from karui.configs import QuantSpec, UnsupportedError
from karui.configs.steps import BitNetStep, EfficientQatStep, LearnedGridStep, LlmQatStep, PostTrainingStep, QatLoraStep
from karui.inference.engine import Engine
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.qat.activations import attach
from karui.qat.fake import qat_linears
from karui.qat.grids import SOLVABLE, searched
from karui.qat.methods import ALL, METHODS, STEPPED, TRAINED
from karui.trainers.quantize import quantize_to_bundle
from karui.trainers.run import make_optimizer, prepare
from tests.qat.conftest import rows, run, tiny
from tests.qat.test_run import logits
from tests.trainers.conftest import _fresh_accelerate_state, make_recipe, rows_file, tiny_folder  # noqa: F401 - fixtures

GRIDS = ("w2g16", "w3g16", "w4g16", "w8", "w2g16a", "w4a", "w4t", "w8a8", "w1.58", "w1.58g16a8", "fp8", "fp8t", "mxfp8", "mxfp4",
         "nvfp4", "nf4", "w1")  # fmt: skip
QUICK = {"autoround": {"iterations": 2}, "efficient_qat": {"e2e_batch": 4}}
CLAIMED = [(m.name, g) for m in METHODS.values() for g in GRIDS
           if QuantSpec.parse(g).format in m.grids and (m.name != "llm_int8" or g == "w8a8")]  # fmt: skip
REFUSED = [(m.name, g) for m in METHODS.values() for g in ("w1.58", "fp8", "mxfp8", "mxfp4", "nvfp4", "nf4", "w1")
           if QuantSpec.parse(g).format not in m.grids]  # fmt: skip
STEPS = (PostTrainingStep, LearnedGridStep, EfficientQatStep, BitNetStep, LlmQatStep, QatLoraStep)


def small(seed: int = 0) -> torch.nn.Module:
    return tiny(seed=seed, num_hidden_layers=1, intermediate_size=128)


def test_the_grids_of_the_table() -> None:
    assert {QuantSpec.parse(g).format for g in GRIDS} == set(ALL) and STEPPED == SOLVABLE
    assert {g for _, g in CLAIMED} == set(GRIDS)


@pytest.mark.parametrize(("method", "grid"), CLAIMED)
def test_a_method_serves_the_grids_it_claims(method: str, grid: str) -> None:
    """The model in memory computes with exactly what an export of the result holds, on that grid and no other."""
    METHODS[method].check(QuantSpec.parse(grid))
    model = small()
    result = run(model, method, grid, rows(8, 16), settings=QUICK.get(method, {}))
    other = small(seed=5)
    other.load_state_dict(result.dense(), strict=True)
    assert torch.equal(logits(model), logits(other)) and torch.isfinite(logits(model)).all()
    found = [v for v in result.weights.values() if isinstance(v, QTensor)]
    allowed = {"w8", "w8a8"} if method == "llm_int8" else {grid}  # w8: a layer with outlier columns
    assert len(found) == 7 and {str(v.spec) for v in found} <= allowed


@pytest.mark.parametrize(("method", "grid"), [(m, g) for m, g in CLAIMED if g != "w1" and METHODS[m].keeps_zeros])
def test_a_pruned_model_stays_sparse_under_the_methods_that_say_so(method: str, grid: str) -> None:
    model = small()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n}
    with torch.no_grad():
        for i, m in enumerate(linears.values()):
            m.weight[torch.rand(m.weight.shape, generator=torch.Generator().manual_seed(i)) < 0.5] = 0
    zeros = {n: m.weight == 0 for n, m in linears.items()}
    run(model, method, grid, rows(8, 16), settings=QUICK.get(method, {}))
    lost = {n: int((model.get_submodule(n).weight[z] != 0).sum()) for n, z in zeros.items()}
    assert not any(lost.values()), lost


@pytest.mark.parametrize(("method", "grid"), REFUSED)
def test_a_method_refuses_the_others_before_and_at_work(method: str, grid: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{method} serves int.* grids, not {grid}, which these do: .*rtn"):
        METHODS[method].check(QuantSpec.parse(grid))
    with pytest.raises(UnsupportedError, match=f"not {grid}"):
        run(small(), method, grid, rows(8, 16), settings=QUICK.get(method, {}))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_engine_runs_every_grid(grid: str, tiny_folder, tmp_path) -> None:  # noqa: F811
    """The gate has passed: read back by the independent decoder, logprobs as the quantized model's."""
    manifest = quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="rtn", spec=grid)
    assert manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"]
    assert {t.spec for n, t in manifest.tensors.items() if "proj" in n} == {grid}
    generated = Engine.load(tmp_path / "out", max_context=32, max_sequences=1).generate(["what"])
    assert len(generated[0].token_ids) > 0


def test_a_grid_of_a_budget_is_refused_before_anything_is_measured(tiny_folder, tmp_path) -> None:  # noqa: F811
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and nine is twelve. " * 60, encoding="utf-8")
    with pytest.raises(UnsupportedError, match="hqq serves int grids, not mxfp4, which these do: rtn, gptq"):
        quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="hqq", spec="w4g32", budget="4", grids=("w3g32", "mxfp4"),
                           calibration=text, samples=8, length=64)  # fmt: skip


def test_static_scales_of_activations_are_in_the_manifest(tiny_folder, tmp_path) -> None:  # noqa: F811
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and nine is twelve. " * 60, encoding="utf-8")
    manifest = quantize_to_bundle(str(tiny_folder), tmp_path / "out", method="smoothquant", spec="w8a8", calibration=text, samples=8,
                                  length=64)  # fmt: skip
    scales = manifest.provenance.notes["quantization"]["activation_scales"]
    assert set(scales) == {n for n, t in manifest.tensors.items() if t.spec == "w8a8"} and all(s > 0 for s in scales.values())


def test_every_method_is_a_step_of_a_recipe_and_in_the_list() -> None:
    named = [m for step in STEPS for m in get_args(step.model_fields["method"].annotation)]
    assert sorted(named) == sorted({*METHODS, *TRAINED})
    shown = " ".join(CliRunner().invoke(app, ["quantize", "--list"], env={"COLUMNS": "300"}).output.split())
    for method in (*METHODS.values(), *TRAINED.values()):
        assert all(text in shown for text in (method.name, method.paper, method.cost))


TRAINING = {
    "lsq": {"spec": "w3g32a8"}, "lsq_plus": {"spec": "w4g32a"}, "pact": {"spec": "w4g32"}, "seq": {"spec": "w2g32"},
    "bitnet": {"spec": "w1a8"}, "bitnet_158": {"spec": "w1.58g32a8"}, "llm_qat": {"spec": "w4g32a8", "generate": 0, "kv_bits": None},
    "qat_lora": {"spec": "w4g32", "rank": 2, "alpha": 4},
    "efficient_qat": {"spec": "w2g32", "samples": 8, "length": 32},
}  # fmt: skip


@pytest.mark.parametrize("method", TRAINING)
def test_what_a_training_step_prepares_is_what_it_converts_to(method: str, make_recipe) -> None:  # noqa: F811
    """The whole model, somewhere on its way: logits of the prepared one are those of the ordinary one that holds the codes."""
    assert set(TRAINING) == {*TRAINED, "efficient_qat"}
    setup = prepare(make_recipe(prepare=[{"method": method, **TRAINING[method]}]))
    (stage,), model, generator = setup.stages, setup.model.eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.mul_(1 + 0.05 * torch.randn(p.shape, generator=generator)).add_(1e-3 * torch.randn(p.shape, generator=generator))
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 250, (2, 20), generator=generator)
    with torch.no_grad():
        prepared, values = model(ids).logits, {n: m.weight_quantizer(m.weight) for n, m in qat_linears(model).items()}
    codes = stage.convert(model)
    assert len(codes) == 14 and all(torch.equal(values[n], codes[n].dequantize()) for n in values)
    stage.finish(model)
    assert all(torch.equal(model.state_dict()[n], q.dequantize()) for n, q in codes.items())
    attach(model, dict.fromkeys(n for n, q in codes.items() if q.spec.activation_bits == 8))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, prepared)


@pytest.mark.parametrize("learn", [False, True])
def test_an_adapter_in_the_rounding_starts_on_the_grid_that_errs_least(learn: bool, make_recipe) -> None:  # noqa: F811
    step = {"method": "qat_lora", "spec": "w4g32", "rank": 2, "alpha": 4, "learn_steps": learn}
    setup = prepare(make_recipe(prepare=[step]))
    for name, module in qat_linears(setup.model).items():
        w, start = module.weight.detach(), module.weight_quantizer.codes(module.weight)
        assert torch.equal(start.dequantize(), searched(w, start.spec).dequantize()), name
        assert float((start.dequantize() - w).norm()) < float((quantize(w, start.spec).dequantize() - w).norm())
    trained = [n.rpartition(".")[2] for n, p in setup.model.named_parameters() if p.requires_grad]
    assert set(trained) == {"lora_a", "lora_b", *(["step"] if learn else [])}


@pytest.mark.parametrize(("method", "decay"), [("pact", 0.01), ("lsq_plus", 0.0)])
def test_ranges_have_a_rate_of_their_own_and_those_of_pact_decay(method: str, decay: float, make_recipe) -> None:  # noqa: F811
    step = {"method": method, "spec": "w4g32", "range_lr": 0.01, "lr_ratio": 2.0}
    recipe = make_recipe(prepare=[step], optim={"lr": 1e-4, "weight_decay": 0.01})
    setup = prepare(recipe)
    found = {id(p): g for g in make_optimizer(recipe, setup.model, setup.stages).param_groups for p in g["params"]}
    linears = qat_linears(setup.model).values()
    ranges = [found[id(p)] for m in linears for p in m.input_quantizer.parameters()]
    assert ranges and all((g["weight_decay"], g["lr_scale"]) == (decay, pytest.approx(100.0)) for g in ranges)
    steps = [found[id(p)] for m in linears for p in m.weight_quantizer.parameters()]
    assert all((g["weight_decay"], g["lr_scale"]) == (0.0, 2.0) for g in steps)
    assert len(found) == sum(p.requires_grad for p in setup.model.parameters())
