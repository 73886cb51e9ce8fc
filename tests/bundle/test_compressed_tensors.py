"""Reference: folders in compressed-tensors are loaded by transformers and unpacked by the compressed-tensors package."""

import json

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.bundle import compressed_tensors as ct
from karui.inference.bundle import export_model, open_model
from karui.kernels.qtensor import QTensor

GRIDS = ["w4g16", "w4g16a", "w8g16", "w8", "w4", "w4a", "w2g16", "w2g16a", "w8t", "w8a8", "fp8", "w4g16:fp32"]


def dequantized_model(source, bundle):
    """The model with the values the bundle's codes stand for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source).eval()
    values = {n: w.dequantize() if isinstance(w, QTensor) else w for n, w in bundle.weights().items()}
    model.load_state_dict(values, strict=False)
    return model


@pytest.mark.parametrize("folder", ["tiny_folder", "untied_folder"])
@pytest.mark.parametrize("grid", GRIDS)
def test_transformers_computes_the_same_logits(request, tmp_path, grid, folder):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = request.getfixturevalue(folder)
    export_model(source, grid, tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    ct.write(bundle, tmp_path / "ct")
    # Without `dequantize` this transformers expects zero points unpacked, against what compressed-tensors itself writes.
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if grid in ("w4g16a", "w4a", "w2g16a") else {}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ct", **options).eval()
    ids = torch.randint(0, 265, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, expected = theirs(ids).logits, dequantized_model(source, bundle)(ids).logits
    # Where activations are quantized too, theirs rounds them at run time: the codes are compared below.
    tolerance = 0.15 if grid in ("w8a8", "fp8") else 1e-5
    assert (got - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("grid", GRIDS)
def test_their_package_unpacks_our_codes(tiny_folder, tmp_path, grid):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    export_model(tiny_folder, grid, tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    ct.write(bundle, tmp_path / "ct")
    stored = load_file(tmp_path / "ct" / "model.safetensors")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    seen = 0
    for name, w in bundle.weights().items():
        if not isinstance(w, QTensor) or name == "model.embed_tokens.weight":
            continue
        seen += 1
        offset = 0 if w.spec.symmetric else 1 << (w.spec.bits - 1)
        if config["format"] == "pack-quantized":
            codes = unpack_from_int32(stored[name + "_packed"], w.spec.bits, torch.Size(stored[name + "_shape"].tolist()))
        else:
            codes = stored[name].float()
        assert torch.equal(codes.float() + offset, w.codes.float())
        assert torch.equal(stored[name + "_scale"].reshape(w.scale.shape), w.scale.float())
        if w.zero is not None:
            zero = unpack_from_int32(stored[name + "_zero_point"], w.spec.bits, w.zero.shape, packed_dim=0)
            assert torch.equal(zero + offset, w.zero.to(torch.int16))
    assert seen == 14


@pytest.mark.parametrize("grid", GRIDS)
def test_read_back(tiny_folder, tmp_path, grid):
    export_model(tiny_folder, grid, tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    ct.write(bundle, tmp_path / "ct")
    opened = open_model(tmp_path / "ct")
    assert set(opened.names) == set(bundle.names) and opened.tied == bundle.tied
    assert "quantization_config" not in opened.config
    for name, w in bundle.weights().items():
        got = opened.weight(name)
        expected = w.dequantize() if isinstance(w, QTensor) else w
        value = got.dequantize() if isinstance(got, QTensor) else got
        assert isinstance(got, QTensor) == (isinstance(w, QTensor) and "embed" not in name)
        assert torch.equal(value, expected)
    assert opened.spec("model.layers.0.mlp.up_proj.weight").activation_bits == (8 if grid == "w8a8" else 16)


def test_mixed_grids(tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    export_model(tiny_folder, {"*.mlp.*": "w4g16", "*.self_attn.q_proj": "w8"}, tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    ct.write(bundle, tmp_path / "ct")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "ct").eval()(ids).logits
        expected = dequantized_model(tiny_folder, bundle)(ids).logits
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    opened = open_model(tmp_path / "ct")
    assert all(str(opened.spec(n)).split(":")[0] == str(bundle.spec(n)) for n in bundle.names if "embed" not in n)


@pytest.mark.parametrize("grid", ["w3g16", "w1.58", "w1", "w8ta"])
def test_grids_the_format_lacks(untied_folder, tmp_path, grid):
    export_model(untied_folder, {"*.q_proj": grid}, tmp_path / "b")
    with pytest.raises(UnsupportedError, match=r"q_proj.weight: .*compressed-tensors"):
        ct.write(open_model(tmp_path / "b"), tmp_path / "ct")
    assert not (tmp_path / "ct").exists()


def test_refusals(tiny_folder, tmp_path):
    with pytest.raises(KaruiError, match="not a compressed-tensors folder"):
        ct.read(tiny_folder)
    with pytest.raises(KaruiError, match="no quantized linear"):
        ct.write(open_model(tiny_folder), tmp_path / "ct")
    export_model(tiny_folder, "w4g16", tmp_path / "b")
    with pytest.raises(KaruiError, match="would change its scales.*float32"):
        ct.write(open_model(tmp_path / "b"), tmp_path / "ct", dtype="bfloat16")
    with pytest.raises(KaruiError, match="expected one of"):
        ct.write(open_model(tmp_path / "b"), tmp_path / "ct", dtype="int8")
    ct.write(open_model(tmp_path / "b"), tmp_path / "ct", dtype="float16")
    path = tmp_path / "ct" / "config.json"
    good = json.loads(path.read_text())
    for change, match in (
        ({"strategy": "block"}, "strategy 'block'"),
        ({"num_bits": 3}, "int of 3 bits"),
        ({"actorder": "group"}, "actorder 'group'"),
    ):
        config = json.loads(json.dumps(good))
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(change)
        path.write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=match):
            ct.read(tmp_path / "ct")
