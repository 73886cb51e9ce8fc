"""Reference: merging against peft, exported values against the quantizer; behavioural: what an export refuses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from karui.adapters.files import SIDE_FILE
from karui.catalogue import resolve
from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle import export_model, open_model, read
from karui.inference.bundle.merge import load_adapter
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize

ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 5}, "alpha_pattern": {"q_proj": 7.5}},
    "few": {"target_modules": ["q_proj", "v_proj"]},
}


def make_adapter(base, folder, **options):
    """A trained-looking adapter (B is not zero) and the model peft makes of it."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | options
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(torch.rand_like(p) * 0.1) if "magnitude" in name else p.copy_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return model.merge_and_unload().eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merge_is_peft_s(tiny_folder, tmp_path, kind):
    merged = make_adapter(tiny_folder, tmp_path / "adapter", **ADAPTERS[kind]).state_dict()
    adapter, base = load_adapter(tmp_path / "adapter"), open_model(tiny_folder)
    assert len(adapter.names()) == (4 if kind == "few" else 14)
    for name in base.names:
        torch.testing.assert_close(adapter.apply(name, base.weight(name)), merged[name], rtol=1e-6, atol=1e-6)
        assert adapter.changes(name) == (not torch.equal(merged[name], base.weight(name)))


def test_replaced_head(untied_folder, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(untied_folder), config)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save.default.weight.mul_(2)
    model.save_pretrained(tmp_path / "adapter")
    export_model(untied_folder, "none", tmp_path / "b", adapter=tmp_path / "adapter", embedding_spec="none")
    assert torch.equal(read(tmp_path / "b").weight("lm_head.weight"), 2 * open_model(untied_folder).weight("lm_head.weight"))


@pytest.mark.parametrize("folder", ["tiny_folder", "untied_folder"])
def test_export(request, tmp_path, folder):
    source = request.getfixturevalue(folder)
    steps = []
    report = export_model(source, "w4g16", tmp_path / "b", progress=lambda *step: steps.append(step))
    base, bundle = open_model(source), read(tmp_path / "b", verify="full")
    assert bundle.names == base.names and bundle.tied == base.tied and bundle.config == base.config
    for name in base.names:
        w, got = base.weight(name), bundle.weight(name)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            expected = quantize(w, QuantSpec.parse("w8"))
        elif "norm" in name:
            assert torch.equal(got, w) and got.dtype == torch.float32
            continue
        else:
            expected = quantize(w, QuantSpec.parse("w4g16"))
        assert isinstance(got, QTensor) and torch.equal(got.codes, expected.codes) and torch.equal(got.scale, expected.scale)
    tied = folder == "tiny_folder"
    fates = {f.name: f for f in report.fates}
    assert fates.keys() == set(base.names) == set(report.manifest.tensors)
    why = "embedding, tied with lm_head.weight" if tied else "embedding"
    assert (fates["model.embed_tokens.weight"].spec, fates["model.embed_tokens.weight"].why) == ("w8", why)
    assert fates["model.norm.weight"].fate == "kept" and 0 < fates["model.layers.0.mlp.up_proj.weight"].error < 0.2
    assert report.manifest.tensors["model.norm.weight"].why == "norm or bias"
    assert sum(row["tensors"] for row in report.summary()) == len(base.names)
    assert report.fp32_bytes == 4 * sum(base.weight(n).numel() for n in base.names)
    assert report.bundle_bytes == sum(p.stat().st_size for p in (tmp_path / "b").iterdir())
    assert steps[-1][:2] == (len(base.names), len(base.names))
    assert report.manifest.provenance.source_model == source.name and len(report.manifest.provenance.base_sha256) == 64


def test_patterns(tiny_folder, tmp_path):
    specs = {"*.layers.0.*": "w8", "*.down_proj": "nf4", "*.self_attn.*": "none"}
    report = export_model(tiny_folder, {**specs, "*.down_proj": "w3g16"}, tmp_path / "b", embedding_spec="none")
    got = {f.name: (f.spec, f.why) for f in report.fates}
    assert got["model.layers.0.mlp.down_proj.weight"] == ("w8", "matches '*.layers.0.*'")
    assert got["model.layers.1.mlp.down_proj.weight"] == ("w3g16", "matches '*.down_proj'")
    assert got["model.layers.1.self_attn.q_proj.weight"] == ("none", "matches '*.self_attn.*', to be kept")
    assert got["model.layers.1.mlp.up_proj.weight"] == ("none", "no pattern matches it")
    assert got["model.embed_tokens.weight"][0] == "none"
    with pytest.raises(KaruiError, match=r"'\*.down_prj' matches no linear.*Did you mean 'down_proj'"):
        export_model(tiny_folder, {"*.down_prj": "w4g32"}, tmp_path / "c")


def test_qlora_base_is_the_one_that_was_trained_on(tiny_folder, tmp_path):
    """The adapter corrects for the rounding of its 4-bit base, so the merge starts from that base."""
    make_adapter(tiny_folder, tmp_path / "adapter", target_modules=["q_proj"])
    name, other = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    options = {"adapter": tmp_path / "adapter", "embedding_spec": "none"}
    (tmp_path / "adapter" / SIDE_FILE).write_text(json.dumps({"base_spec": "w4g16"}))
    export_model(tiny_folder, "none", tmp_path / "b", **options)
    export_model(tiny_folder, "none", tmp_path / "plain", base_spec="none", **options)
    assert torch.equal(read(tmp_path / "plain").weight(other), open_model(tiny_folder).weight(other))
    base, got = open_model(tiny_folder), read(tmp_path / "b")
    delta = load_adapter(tmp_path / "adapter").apply(name, torch.zeros(32, 32))
    expected = quantize(base.weight(name), QuantSpec.parse("w4g16")).dequantize() + delta
    torch.testing.assert_close(got.weight(name), expected, rtol=1e-6, atol=1e-7)
    assert got.manifest.provenance.adapter == "adapter"
    assert torch.equal(got.weight(other), quantize(base.weight(other), QuantSpec.parse("w4g16")).dequantize())
    assert torch.equal(got.weight("model.embed_tokens.weight"), base.weight("model.embed_tokens.weight"))


def test_group_size_that_does_not_divide(tiny_folder, tmp_path):
    with pytest.raises(KaruiError, match=r"model\.layers\.0\.\S+weight: group size 64 does not divide its input width \d+.*16"):
        export_model(tiny_folder, "w4g64", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_nan_weights(tiny_folder, tmp_path, name):
    bad = tmp_path / "bad"
    shutil.copytree(tiny_folder, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(KaruiError, match=rf"{name}: 1 of \d+ values are NaN"):
        export_model(bad, "w4g16", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_already_quantized(tiny_folder, tmp_path):
    export_model(tiny_folder, "w8", tmp_path / "b")
    with pytest.raises(KaruiError, match="is a bundle, so it is quantized already"):
        export_model(tmp_path / "b", "w4g32", tmp_path / "c")
    shutil.copytree(tiny_folder, tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(KaruiError, match="quantized already \\(awq\\)"):
        export_model(tmp_path / "d", "w4g32", tmp_path / "c")


def test_adapters_that_do_not_fit(tiny_folder, tmp_path):
    with pytest.raises(KaruiError, match="is no adapter folder: adapter_config.json is missing"):
        load_adapter(tiny_folder)
    folder = tmp_path / "adapter"
    make_adapter(tiny_folder, folder)
    tensors, config = load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())

    def put(changed_tensors=None, **changed_config):
        save_file(tensors if changed_tensors is None else changed_tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config | changed_config))

    first = next(iter(tensors))
    for change, match in (
        ({"peft_type": "IA3"}, "type 'IA3' cannot be merged"),
        ({"bias": "all"}, "train biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ):
        put(**change)
        with pytest.raises(UnsupportedError, match=match):
            load_adapter(folder)
    put(r=9)
    with pytest.raises(CorruptError, match="has rank 4, adapter_config.json says 9"):
        export_model(tiny_folder, "w8", tmp_path / "b", adapter=folder)
    put({n: t for n, t in tensors.items() if n != first})
    with pytest.raises(CorruptError, match="an adapter needs lora_A and lora_B"):
        load_adapter(folder)
    put({n.replace("layers.1", "layers.7"): t for n, t in tensors.items()})
    with pytest.raises(KaruiError, match="changes 7 weights the model does not have.*layers.7"):
        export_model(tiny_folder, "w8", tmp_path / "b", adapter=folder)
    put({n: torch.cat([t, t], 1) if n.endswith("lora_A.weight") else t for n, t in tensors.items()})
    with pytest.raises(KaruiError, match="trained on another model"):
        export_model(tiny_folder, "w8", tmp_path / "b", adapter=folder)
    put({n: t * float("nan") if n == first else t for n, t in tensors.items()})
    with pytest.raises(KaruiError, match="holds NaN.*diverged"):
        load_adapter(folder)
    put({**tensors, "base_model.model.lm_head.weight": torch.zeros(265, 32)})
    with pytest.raises(KaruiError, match="lm_head.weight, which is tied"):
        export_model(tiny_folder, "w8", tmp_path / "b", adapter=folder)
    put({**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 265)})
    with pytest.raises(UnsupportedError, match="of an embedding"):
        load_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptError, match="cannot be read"):
        load_adapter(folder)
    assert not (tmp_path / "b").exists()


def real_model():
    try:
        return resolve("smollm2-135m")
    except KaruiError as error:
        pytest.skip(f"the model is not to be had here: {error}")


def test_real_model_size(tmp_path):
    """w4g32 with an int8 embedding is far under a quarter of fp32, and the file holds the weights that went in."""
    source = real_model()
    report = export_model(source, "w4g32", tmp_path / "b")
    assert report.fp32_bytes == 538_060_032 and report.ratio < 0.18
    bundle, base = open_model(tmp_path / "b", verify="full"), open_model(source)
    for fate in report.fates[::25]:
        stored, w = bundle.weight(fate.name), base.weight(fate.name)
        q = stored.dequantize() if isinstance(stored, QTensor) else stored
        assert float((w - q).norm() / w.norm()) == pytest.approx(fate.error, abs=1e-6) and fate.error < 0.11


@pytest.mark.slow
def test_real_model_still_answers(tmp_path):
    """At int8: rounding to 4 bits without any training costs a model this small its answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = real_model()
    export_model(source, "w8", tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    values = {n: w.dequantize() if isinstance(w, QTensor) else w for n, w in bundle.weights().items()}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    tokenizer = AutoTokenizer.from_pretrained(bundle.tokenizer_path)
    chat = [{"role": "user", "content": "What is the capital of Japan?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert "Tokyo" in tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
