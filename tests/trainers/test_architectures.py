"""End to end: latent and sparse attention, windows, soft caps, other norms, rotations and fused linears through quantizing, packed training,
export and the parity gate, on tiny random models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from karui.configs.errors import UnsupportedError
from karui.configs.recipe import ModelSection, Recipe
from karui.inference.bundle import open_model
from karui.inference.engine import Engine
from karui.trainers.data import IGNORE
from karui.trainers.kv_levels import make_levels
from karui.trainers.model import LossSum, install_lean_ops, load_model
from karui.trainers.pipeline import run_pipeline
from karui.trainers.quantize import quantize_to_bundle
from tests.trainers.conftest import _fresh_accelerate_state, rows_file, tiny_folder  # noqa: F401

LATENT = dict(num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4,
              num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1, q_lora_rank=64)
GROUPS = dict(LATENT, n_group=2, topk_group=1)
SCALES = dict(logits_scaling=3.0, residual_multiplier=0.7, attention_multiplier=0.2, embedding_multiplier=2.0)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
NEWER = ("granite", "granitemoe", "granitemoeshared", "smollm3", "seed_oss", "olmoe", "glm4", "glm4_moe", "ernie4_5", "ernie4_5_moe",
         "hunyuan_v1_dense", "exaone4", "minimax_m2", "cohere", "cohere2", "glm", "glm4_moe_lite", "dots1", "exaone_moe", "solar_open",
         "cwm")
KINDS = {
    "deepseek_v2": dict(LATENT, q_lora_rank=None), "deepseek_v3": GROUPS,
    # many index heads: with few, scores are exactly zero so often that the least chosen key is one of several
    "deepseek_v32": dict(GROUPS, index_n_heads=24, index_head_dim=16, index_topk=12),
    "gemma2": dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
    "gemma3_text": dict(head_dim=16, sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=16, num_hidden_layers=3),
    "mixtral": dict(num_local_experts=4), "phi3": dict(sliding_window=16), "olmo3": dict(sliding_window=16),
    "granite": SCALES, "granitemoe": dict(SCALES, **EXPERTS), "granitemoeshared": dict(SCALES, **EXPERTS, shared_intermediate_size=32),
    "smollm3": dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=16),
    "seed_oss": dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0), "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "glm4": dict(head_dim=16), "glm4_moe": dict(LATENT, head_dim=16, use_qk_norm=True), "ernie4_5": dict(head_dim=16),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=64), "hunyuan_v1_dense": dict(head_dim=16),
    "exaone4": dict(sliding_window=16, sliding_window_pattern=2), "minimax_m2": dict(EXPERTS, head_dim=16, rotary_dim=8),
    "glm": dict(head_dim=16), "glm4_moe_lite": LATENT, "dots1": dict(ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    "exaone_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, sliding_window=16, sliding_window_pattern=2),
    "solar_open": dict(ROUTED, head_dim=16), "cwm": dict(head_dim=16, sliding_window=16),
    "cohere": dict(logit_scale=0.25), "cohere2": dict(logit_scale=0.25, sliding_window=16, sliding_window_pattern=2),
    "gpt_oss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
                    rope_parameters=dict(rope_type="default", rope_theta=1e4)),
}


@pytest.fixture
def folder_of(tiny_folder, tmp_path):  # noqa: F811
    """folder_of(kind): a model folder with the tokenizer of `tiny_folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
        torch.manual_seed(7)
        config = AutoConfig.for_model(kind, **{**dict(
            vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2), **KINDS[kind]})
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.ndim >= 2 or name.endswith("e_score_correction_bias"):
                    tensor.normal_(std=0.08)
                elif name.endswith("sinks"):
                    tensor.normal_()
        model.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "mixtral"])
def test_quantizing_passes_the_gate_and_the_engine_runs_it(kind, folder_of, tmp_path):
    manifest = quantize_to_bundle(str(folder_of(kind)), tmp_path / "out", method="rtn", spec="w4g16")
    assert manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"] == 2e-3
    specs = {name: t.spec for name, t in manifest.tensors.items()}
    linears = {n for n in specs if n.endswith("_proj.weight") or "wq_b" in n}
    kept = {n for n in linears if n.endswith("weights_proj.weight")}
    assert {specs[n] for n in linears - kept} == {"w4g16"} and {specs[n] for n in kept} <= {"none"}
    assert all(specs[n] == "none" for n in specs if ".mlp.gate." in n or ".mlp.router." in n or n.endswith("bias"))
    assert len(Engine.load(tmp_path / "out", max_context=32, max_sequences=1).generate(["what"])[0].token_ids) > 0


def short(name: str, folder: Path, rows: Path, tmp_path: Path) -> Recipe:
    """Three steps of a shipped recipe."""
    return Recipe.load(name, [
        f"model.name={folder}", f"data.train={rows}", "data.eval=null", "data.holdout=4", "data.prompt=prompt",
        "data.completion=completion", "data.max_length=64", "optim.epochs=null", "optim.steps=3", "optim.batch=4",
        "optim.micro_tokens=256", f"run.output={tmp_path / 'run'}", "run.threads=1", "track.to=none", "eval.questions=[]",
        "eval.speed=false"])


def released(folder: Path) -> Path:
    """The folder of a gpt-oss with its experts in random MXFP4, as OpenAI's are."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, into, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 123, (experts, out, into // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_released_gpt_oss_is_tuned_and_keeps_its_codes(folder_of, rows_file, tmp_path, own_cache):  # noqa: F811
    folder = released(folder_of("gpt_oss"))
    result = run_pipeline(short("lora", folder, rows_file, tmp_path))
    source, bundle = open_model(folder), open_model(result.bundles[0])
    assert result.run.metrics["eval_loss"] < result.run.metrics["eval_loss_before"]
    experts = [n for n in source.names if ".experts." in n and n.endswith("weight")]
    assert len(experts) == 2 * 4 * 3 and set(source.names) == set(bundle.names)
    for name in experts:
        ours, theirs = bundle.weight(name), source.weight(name)
        assert str(bundle.spec(name)) == "mxfp4" and torch.equal(ours.codes, theirs.codes) and torch.equal(
            ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
    assert str(bundle.spec("model.layers.0.self_attn.q_proj.weight")) == "w4g32"


@pytest.mark.parametrize(("name", "kind"), [("qlora", "deepseek_v3"), ("qlora", "deepseek_v32"), ("sft-full", "gemma3_text"), ("qlora", "gemma2"), ("lora", "gpt_oss"),
                                            ("qlora", "exaone4"), ("lora", "ernie4_5_moe")])
def test_a_shipped_recipe_trains_and_exports_it(name, kind, folder_of, rows_file, tmp_path, own_cache):  # noqa: F811
    result = run_pipeline(short(name, folder_of(kind), rows_file, tmp_path))
    metrics = result.run.metrics
    assert metrics["eval_loss"] < metrics["eval_loss_before"] and (result.bundles[0] / "manifest.json").is_file()


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma2", "gemma3_text", "phi3", "olmo3", "gpt_oss", *NEWER])
def test_packed_documents_are_computed_as_transformers_computes_each(kind, folder_of):
    """Longer than the window, values narrower than keys, sinks, caps, scales: the loss and its gradient are those of transformers'
    logits, document by document."""
    from transformers import AutoModelForCausalLM

    folder = folder_of(kind)
    packed = LossSum(load_model(ModelSection(name=str(folder), dtype="float32")), 64)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    lengths = (9, 40, 23)
    documents = [torch.randint(3, 259, (n,)) for n in lengths]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    targets = torch.cat([torch.cat([d[1:], torch.tensor([IGNORE])]) for d in documents])
    positions = torch.cat([torch.arange(n) for n in lengths])
    got = packed(torch.cat(documents), positions, cu, targets)
    logits = torch.cat([plain(d[None], use_cache=False).logits[0].float() for d in documents])
    want = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    assert abs(got - want) < 2e-5 * want
    got.backward()
    want.backward()
    ours, theirs = dict(packed.model.named_parameters()), dict(plain.named_parameters())
    for name, parameter in theirs.items():
        if parameter.grad is not None:
            assert (ours[name].grad - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name


@pytest.mark.parametrize("kind", ["smollm3", "glm4_moe", "ernie4_5", "exaone4", "hunyuan_v1_dense", "cohere2"])
def test_lean_operations_stay_away_from_what_they_do_not_compute(kind, folder_of):
    """Rotations of some layers, of parts of heads, interleaved or in front of a norm: a run's loss is that of the model as it is."""
    model = load_model(ModelSection(name=str(folder_of(kind)), dtype="float32"))
    tokens, cu = torch.randint(3, 259, (60,)), torch.tensor([0, 20, 60])
    row = (tokens, torch.cat([torch.arange(20), torch.arange(40)]), cu, tokens.roll(-1))
    with torch.no_grad():
        want = LossSum(model, 64)(*row)
        swapped = install_lean_ops(model)
        assert swapped["attention"] < 2 and abs(LossSum(model, 64)(*row) - want) < 1e-5 * want


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "ernie4_5_moe", "granitemoe", "minimax_m2"])
def test_rollouts_have_the_weights_in_training(kind, folder_of):
    """Experts that are one parameter, what routers add to scores: the engine's logprobs are the model's; on a grid routers stay."""
    from karui.configs.quantspec import QuantSpec
    from karui.inference.models.config import from_hf
    from karui.inference.models.weights import check_weights
    from karui.kernels.qtensor import QTensor
    from karui.trainers.objectives.engine_sampler import EngineSampler, dense_weights

    model = load_model(ModelSection(name=str(folder_of(kind)), dtype="float32"))
    sampler = EngineSampler(model, spec=QuantSpec.parse("none"), end=[2], max_context=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        ids = torch.randint(3, 259, (30,))
        want = LossSum(model, 64).model(ids[None], use_cache=False).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    sampler.push(model, 1)
    assert (sampler.engine.score([ids.tolist()])[0] - want).abs().max() < 1e-4
    coded = check_weights(from_hf(model.config.to_dict()), dense_weights(model, QuantSpec.parse("w4g16")))
    matrices = {n: w for n, w in coded.items() if len(w.shape) == 2 and ".layers." in n}
    assert all(isinstance(w, QTensor) != n.endswith("mlp.gate.weight") for n, w in matrices.items())


def test_levels_of_a_kvquant_cache(folder_of, tmp_path):
    """Made over routers and experts under their own names; refused where keys do not all turn as k_proj makes them."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i + 3} is {i * (i + 3)}. " for i in range(60)))
    for kind in ("granitemoe", "minimax_m2"):
        folder = folder_of(kind)
        make_levels(str(folder), kv_dtype="kvquant4", calibration=text, samples=8, length=64)
        coded, plain = (Engine.load(folder, kv_dtype=kv, max_context=128, memory="8MB") for kv in ("kvquant4", "float32"))
        ids = [[5 + i % 60 for i in range(100)]]
        error = (coded.score(ids)[0] - plain.score(ids)[0]).abs()
        assert 0 < error.mean() < 0.1
    with pytest.raises(UnsupportedError, match="keys rotate interleaved; levels are of keys"):
        make_levels(str(folder_of("ernie4_5")), kv_dtype="kvquant4", calibration=text)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3_text", "phi3", "glm4", "ernie4_5", "hunyuan_v1_dense", "cohere2"])
def test_a_request_with_an_adapter_is_answered_as_by_peft(kind, folder_of, tmp_path):
    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep
    from karui.inference.requests import Request, SamplingParams

    folder = folder_of(kind)
    made = attach(load_model(ModelSection(name=str(folder), dtype="float32")), LoraStep(method="lora", rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    made.model.save_pretrained(tmp_path / "adapter")
    engine = Engine.load(folder, max_context=64, max_sequences=2)
    engine.load_adapter("one", tmp_path / "adapter")
    prompt, params = torch.randint(3, 259, (20,)).tolist(), SamplingParams(max_tokens=12, ignore_eos=True)
    got, base = (o.token_ids for o in engine.generate([Request(prompt=prompt, params=params, adapter="one"),
                                                       Request(prompt=prompt, params=params)]))
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(made.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert got == ids[20:] != base


def test_adapters_stay_off_names_that_peft_takes_for_experts(folder_of, caplog):
    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep

    model = load_model(ModelSection(name=str(folder_of("deepseek_v3"))))
    with pytest.raises(UnsupportedError, match="'model.layers.0.mlp.gate_proj'.*target the attention only"):
        attach(model, LoraStep(method="lora", rank=4, targets=("q_a_proj", "gate_proj")))
    made = attach(model, LoraStep(method="lora", rank=4))
    assert {n.split(".")[3] for n in made.targets} == {"self_attn"}
    trained = {n.split(".lora_")[0].rpartition(".")[2] for n, p in made.model.named_parameters() if p.requires_grad}
    assert trained == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert "leaves 6 feed-forward linears out, first model.layers.0.mlp.gate_proj" in caplog.text
    attach(load_model(ModelSection(name=str(folder_of("mixtral")))), LoraStep(method="qlora", base="w8", rank=4))
    assert "base w8: 4 tensors of fused experts stay in float32" in caplog.text
