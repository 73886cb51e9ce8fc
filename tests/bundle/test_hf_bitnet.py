"""Reference: BitNet folders against transformers' own packing and layers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.inference.bundle import export_model, hf_bitnet, open_model
from karui.kernels.qtensor import QTensor


@pytest.fixture
def plain_functions():
    """transformers compiles these functions; run them as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_packing_is_transformers(plain_functions):
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    codes = torch.randint(-1, 2, (12, 5), dtype=torch.int8)
    packed = hf_bitnet.pack_rows(codes)
    assert torch.equal(packed, pack_weights(codes.clone())) and packed.shape == (3, 5)
    assert torch.equal(unpack_weights(packed, torch.float32), codes.float())
    assert torch.equal(hf_bitnet.unpack_rows(packed), codes)


def test_transformers_computes_the_same_logits(tiny_folder, tmp_path, plain_functions):
    from transformers import AutoModelForCausalLM

    export_model(tiny_folder, "w1.58", tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    hf_bitnet.write(bundle, tmp_path / "bitnet")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "bitnet").eval()
    expected = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    values = {n: w.dequantize() if isinstance(w, QTensor) else w for n, w in bundle.weights().items()}
    expected.load_state_dict(values, strict=False)
    for name, module in expected.named_modules():  # their layers round activations per token; so does the reference here
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, x: (round_activations(x[0]),))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        got, wanted = theirs(ids).logits, expected(ids).logits
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def round_activations(x):
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def test_read_back_and_both_scale_conventions(tiny_folder, tmp_path):
    export_model(tiny_folder, "w1.58", tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    hf_bitnet.write(bundle, tmp_path / "bitnet")
    opened = open_model(tmp_path / "bitnet")
    assert set(opened.names) == set(bundle.names) and opened.tied == bundle.tied and "quantization_config" not in opened.config
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(opened.weight(name).dequantize(), bundle.weight(name).dequantize())
    assert opened.packed(name)["codes"].equal(bundle.packed(name)["codes"]) and str(opened.spec(name)) == "w1.58:fp32"

    config = json.loads((tmp_path / "bitnet" / "config.json").read_text())
    del config["quantization_config"]["linear_class"]  # BitLinear is the default, and divides
    (tmp_path / "bitnet" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "bitnet" / "model.safetensors")
    tensors[name + "_scale"] = 1 / tensors[name + "_scale"]
    save_file(tensors, tmp_path / "bitnet" / "model.safetensors")
    torch.testing.assert_close(open_model(tmp_path / "bitnet").weight(name).dequantize(), bundle.weight(name).dequantize())
    tensors[name][0, 0] = 0xFF
    save_file(tensors, tmp_path / "bitnet" / "model.safetensors")
    with pytest.raises(CorruptError, match="up_proj.weight: a 2-bit slot holds 3"):
        open_model(tmp_path / "bitnet").weight(name)


def test_refusals(tiny_folder, tmp_path):
    with pytest.raises(KaruiError, match="no ternary linear"):
        hf_bitnet.write(open_model(tiny_folder), tmp_path / "x")
    with pytest.raises(KaruiError, match="not a BitNet folder"):
        hf_bitnet.read(tiny_folder)
    for index, grid in enumerate(("w4g16", "w1.58g16", "w1")):
        export_model(tiny_folder, grid, tmp_path / str(index))
        with pytest.raises(UnsupportedError, match=rf"layers.0.\S+: {grid} is not what BitNet layers hold"):
            hf_bitnet.write(open_model(tmp_path / str(index)), tmp_path / "x")
    assert not (tmp_path / "x").exists()
