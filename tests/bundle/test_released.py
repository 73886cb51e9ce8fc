"""Reference: folders released in MXFP4 and FP8 blocks against transformers' own decoding of them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from karui.configs.errors import CorruptError, UnsupportedError
from karui.inference.bundle.reader import open_model
from karui.inference.engine import Engine
from karui.inference.models.config import from_hf
from karui.inference.models.decoder import TorchRunner
from karui.kernels.qtensor import QTensor
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of

SMALL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2)


def save(folder, model, tensors, quantization):
    config = {**model.config.to_dict(), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def gpt_oss(folder):
    """A folder with random MXFP4 experts; the model that transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, _, weights = tiny("gpt_oss", sliding_window=9, num_local_experts=3, num_experts_per_tok=2, **SMALL)
    tensors = {n: t for n, t in weights.items() if not n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, into, out = parameter.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 126, (experts, out, into // 32), dtype=torch.uint8)
            parameter.data = convert_moe_packed_tensors(tensors[f"{name}_blocks"].clone(), tensors[f"{name}_scales"].clone(),
                                                        dtype=torch.float32)
    save(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def deepseek_fp8(folder):
    """A folder with linears in FP8 blocks of 32 x 16; the model whose weights are theirs, decoded element by element."""
    model, _, weights = tiny("deepseek_v3", num_key_value_heads=6, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=12,
                             qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
                             moe_intermediate_size=16, first_k_dense_replace=2, n_group=2, topk_group=1, **SMALL)
    tensors, decoded = {}, {}
    for name, w in weights.items():
        if not name.endswith("proj.weight") and "with_mqa" not in name:
            tensors[name] = decoded[name] = w
            continue
        scale = torch.rand(-(-w.shape[0] // 32), -(-w.shape[1] // 16)) * 0.01 + 0.001
        grid = torch.tensor([[float(scale[i // 32, j // 16]) for j in range(w.shape[1])] for i in range(w.shape[0])])
        tensors[name], tensors[f"{name}_scale_inv"] = (w / grid).clamp(-448, 448).to(torch.float8_e4m3fn), scale
        decoded[name] = tensors[name].float() * grid
    model.load_state_dict(decoded)
    save(folder, model, tensors, {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"})
    return model


@pytest.mark.parametrize("make", [gpt_oss, deepseek_fp8])
def test_the_engine_computes_what_transformers_does(make, tmp_path):
    model = make(tmp_path)
    opened = open_model(tmp_path)
    ids = torch.randint(0, 199, (30,)).tolist()
    runner = TorchRunner(from_hf(opened.config), dict(opened.weights()))
    runner.allocate(10, 4, "float32")
    got = runner.forward(batch_of((ids, 0, list(range(10))))).logits
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() < 1e-4 * max(1, want.abs().max())
    assert len(Engine.load(tmp_path, max_context=32, max_sequences=1).generate([ids[:9]])[0].token_ids) > 0


def test_mxfp4_codes_stay_codes(tmp_path):
    model = gpt_oss(tmp_path)
    opened = open_model(tmp_path)
    for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        name = f"model.layers.1.mlp.experts.2.{part}_proj.weight"
        w = opened.weight(name)
        assert isinstance(w, QTensor) and str(opened.spec(name)) == "mxfp4"
        assert torch.equal(w.dequantize(), model.model.layers[1].mlp.experts.gate_up_proj[2].T[rows])
    assert opened.packed(name).keys() == {"codes", "scale"}


def test_damage_is_named(tmp_path):
    from safetensors.torch import load_file

    gpt_oss(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj_scales"
    tensors = load_file(path)
    expert = "model.layers.0.mlp.experts.1.down_proj.weight"
    for changed, said in ((None, "down_proj_blocks has no _scales"), (tensors[name][:, :-1], "do not belong together"),
                          (torch.full_like(tensors[name], 255), "a scale is NaN")):
        save_file({n: t.contiguous() for n, t in {**tensors, name: changed}.items() if t is not None}, path)
        with pytest.raises(CorruptError, match=said):
            open_model(tmp_path).weight(expert)


def test_fp8_in_other_forms_is_refused(tmp_path):
    model = deepseek_fp8(tmp_path)
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="without weight_block_size"):
        open_model(tmp_path)
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CorruptError, match=r"q_a_proj.weight: scales of shape \[1, 4\], blocks of 16 x 16 ask for \[2, 4\]"):
        open_model(tmp_path).weight("model.layers.0.self_attn.q_a_proj.weight")
