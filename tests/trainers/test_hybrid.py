"""End to end: hybrids through quantizing, the gate and the engine; their training takes one document a row and says why."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from karui.configs.errors import UnsupportedError
from karui.configs.manifest import Manifest
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.qat.run import quantize_loaded, quantize_model, read_config
from karui.trainers.data import collate
from karui.trainers.model import LossSum, load_model
from karui.trainers.pipeline import run_pipeline
from karui.trainers.quantize import quantize_to_bundle
from karui.trainers.run import prepare, run_recipe
from tests.trainers.conftest import _fresh_accelerate_state, make_recipe, rows_file, tiny_folder  # noqa: F401 - fixtures

SIZES: dict[str, Any] = dict(vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                             num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
                             eos_token_id=2)
MIDDLE = ["linear_attention", "full_attention", "linear_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True, block_auto_adjust_ff_dim=False),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"], num_experts=4, num_experts_per_tok=2, num_dense_layers=1,
                     moe_intermediate_size=32),
    "qwen3_next": dict(layer_types=MIDDLE, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
                       linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                       shared_expert_intermediate_size=32, mlp_only_layers=[1]),
    "qwen3_5_text": dict(layer_types=MIDDLE, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
                         linear_num_value_heads=4),
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16),
    "granitemoehybrid": dict(layer_types=MIDDLE, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, num_local_experts=4,
                             num_experts_per_tok=2, shared_intermediate_size=64, intermediate_size=32, embedding_multiplier=3.0,
                             logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.2),
}  # fmt: skip
LEFT = {
    "lfm2": {"conv.conv.weight"},
    "qwen3_next": {"linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.in_proj_ba.weight",
                   "linear_attn.norm.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight"},
    "qwen3_5_text": {"linear_attn.conv1d.weight", "linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"},
    "bamba": {"mamba.conv1d.weight", "mamba.conv1d.bias", "mamba.A_log", "mamba.D", "mamba.dt_bias", "mamba.norm.weight"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for kind, changes in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(std=0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.normal_()
        found[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(found[kind])
        for file in tiny_folder.glob("tokenizer*"):
            shutil.copy(file, found[kind])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_hybrid_passes_the_gate_and_runs(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The files are read back, the engine's logprobs are transformers' with the same codes, and it serves them."""
    manifest = quantize_to_bundle(str(folders[kind]), tmp_path / "out", method="rtn", spec="w4g32")
    assert manifest.parity is not None and manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"]
    specs = {name.partition("layers.0.")[2]: t.spec for name, t in manifest.tensors.items() if "layers.0." in name}
    assert {name for name, spec in specs.items() if spec == "none" and "layernorm" not in name and "_norm" not in name} >= LEFT.get(
        kind, set())
    assert all(spec == "w4g32" for name, spec in specs.items() if name.endswith(("in_proj.weight", "out_proj.weight",
                                                                                 "in_proj_qkvz.weight")))
    engine = Engine.load(tmp_path / "out", max_context=64, max_sequences=2, block_size=4)
    assert isinstance(engine.runner, TorchRunner)  # by itself: the others say what they lack
    outputs = [engine.generate(["what is seven"])[0] for _ in range(2)]
    assert outputs[0].token_ids == outputs[1].token_ids != [] and outputs[1].num_cached_tokens == 12
    with pytest.raises(UnsupportedError, match="recurrent layers"):
        Engine.load(tmp_path / "out", runner="native")


def test_what_is_left_alone_is_reported(folders: dict[str, Path]) -> None:
    report = {r.name: r for r in quantize_model(folders["qwen3_next"], "rtn", "w4g32").report}
    left = report["model.layers.0.linear_attn.in_proj_ba.weight"]
    assert left.spec == "none" and "decay and strength of a recurrent state" in left.note
    assert report["model.layers.0.linear_attn.in_proj_qkvz.weight"].spec == "w4g32"


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "bamba"])
@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_calibrated_methods_follow_the_blocks(kind: str, method: str, folders: dict[str, Path]) -> None:
    """Folds are exact, for norms of (1 + weight) too: on eight bits the model's logits stay what they were."""
    rows = torch.randint(3, 259, (16, 32), generator=torch.Generator().manual_seed(0))
    model = load_model_plainly(folders[kind])
    with torch.no_grad():
        want = model(rows[:2]).logits
        quantize_loaded(model, read_config(folders[kind]), method, "w8", rows)  # it computes with the result now
        got = model(rows[:2]).logits
    assert 0 < (got - want).norm() < 0.08 * want.norm()


def load_model_plainly(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "bamba"])
def test_a_packed_row_is_refused_and_single_documents_train(kind: str, folders: dict[str, Path],
                                                            make_recipe: Any) -> None:  # noqa: F811
    targets = {"lfm2": ["in_proj", "out_proj", "w2"], "qwen3_next": ["in_proj_qkvz", "out_proj"], "bamba": ["in_proj", "out_proj"]}
    sections = dict(model={"name": str(folders[kind])}, prepare=[{"method": "lora", "rank": 4, "alpha": 8, "targets": targets[kind]}],
                    optim={"steps": 3})
    with pytest.raises(UnsupportedError, match=f"a {kind} has recurrent layers, whose state would go from one document"):
        run_recipe(make_recipe(**sections))
    result = run_recipe(make_recipe(**sections, data={"packing": False}))
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"]


@pytest.mark.parametrize(("kind", "prepare"), [
    ("lfm2", {"method": "lora", "rank": 4, "alpha": 8, "targets": ["in_proj", "out_proj", "w2"]}), ("qwen3_next", None),
    ("bamba", {"method": "lsq", "spec": "w4g32"})])  # fmt: skip
def test_a_recipe_trains_exports_and_compares(kind: str, prepare: Any, folders: dict[str, Path], make_recipe: Any) -> None:  # noqa: F811
    """An adapter that is merged, a full training, and trained grids, through the gate under the names that transformers has."""
    recipe = make_recipe(model={"name": str(folders[kind])}, prepare=[prepare] if prepare else [], data={"packing": False},
                         optim={"steps": 2}, export=[{"spec": "w4g32"}])
    (bundle,) = run_pipeline(recipe).bundles
    specs = {name: t.spec for name, t in Manifest.read(bundle).tensors.items() if "layers.0." in name}
    assert {name.partition("layers.0.")[2] for name, spec in specs.items() if spec == "none"} >= LEFT[kind]
    assert any("feed_forward" in name for name in specs) or kind == "qwen3_next"
    assert Engine.load(bundle, max_context=64).generate(["what"])[0].token_ids


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "bamba"])
def test_the_loss_is_the_models_own(kind: str, folders: dict[str, Path], make_recipe: Any) -> None:  # noqa: F811
    recipe = make_recipe(model={"name": str(folders[kind])}, data={"packing": False}, prepare=[])
    setup = prepare(recipe)
    loss = LossSum(load_model(recipe.model), 64)
    plain = load_model_plainly(folders[kind])
    for i in range(3):
        batch = collate([setup.samples[i]])
        with torch.no_grad():
            logits = plain(batch.tokens[None]).logits[0]
            want = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
            assert abs(float(loss.of(batch)) - float(want)) < 1e-4 * float(want)
    with pytest.raises(UnsupportedError, match="set data.packing: false"):
        loss.of(collate([setup.samples[0], setup.samples[1]]))


def test_what_a_recurrent_state_cannot_take_part_in(folders: dict[str, Path], make_recipe: Any) -> None:  # noqa: F811
    """Said before training, instead of training something else."""
    model = {"name": str(folders["lfm2"])}
    for method in ("prompt", "prefix"):
        with pytest.raises(UnsupportedError, match=f"prepare: {method} puts rows before a document's keys; a lfm2 has"):
            prepare(make_recipe(model=model, prepare=[{"method": method, "tokens": 4}]))
    for kind in ("draft-medusa", "draft-eagle3"):
        with pytest.raises(UnsupportedError, match="a draft for a model with recurrent layers is not trained"):
            run_recipe(make_recipe(model=model, prepare=[], objective={"kind": kind}))


@pytest.mark.parametrize("kind", ["lfm2_moe", "qwen3_next", "bamba"])
def test_rollouts_come_from_the_engine(kind: str, folders: dict[str, Path], make_recipe: Any) -> None:  # noqa: F811
    """The engine takes the trainer's weights, states' included: what it drew has the trainer's own probabilities."""
    objective = {"kind": "on-policy", "teacher": {"name": str(folders[kind])}, "max_new_tokens": 8, "max_drift": 1e-4}
    result = run_recipe(make_recipe(model={"name": str(folders[kind])}, prepare=[], data={"packing": False}, objective=objective,
                                    optim={"steps": 2}))
    assert result.metrics["steps"] == 2


def test_no_draft_is_trained_for_scaled_logits(folders: dict[str, Path], make_recipe: Any) -> None:  # noqa: F811
    with pytest.raises(UnsupportedError, match="a draft for a model"):
        run_recipe(make_recipe(model={"name": str(folders["granitemoehybrid"])}, prepare=[], objective={"kind": "draft-medusa"}))
