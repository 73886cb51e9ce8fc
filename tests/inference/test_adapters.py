"""Reference: adapters served side by side against peft's own models, and the prefix cache kept apart."""

from __future__ import annotations

import json

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from tests.inference.conftest import tiny
from tests.inference.test_engine import greedy

VARIANTS = {
    "plain": dict(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "rs": dict(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]),
    "dora": dict(r=3, lora_alpha=12, use_dora=True, target_modules=["q_proj", "up_proj", "down_proj"]),
    "ranks": dict(r=2, lora_alpha=8, rank_pattern={"v_proj": 5}, alpha_pattern={"layers.1.self_attn.v_proj": 30},
                  target_modules=["q_proj", "v_proj"]),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Folders written by peft, and the peft models that wrote them."""
    from peft import LoraConfig, get_peft_model

    folders, models = {}, {}
    for i, (name, options) in enumerate(VARIANTS.items()):
        model, _, _ = tiny("llama")
        torch.manual_seed(100 + i)
        adapted = get_peft_model(model, LoraConfig(**options)).eval()
        with torch.no_grad():
            for key, p in adapted.named_parameters():
                if "lora_A" in key or "lora_B" in key:
                    p.copy_(torch.randn_like(p) * 0.4)
                elif "magnitude" in key:
                    p.mul_(1 + 0.3 * torch.rand_like(p))
        folders[name] = tmp_path_factory.mktemp(name)
        adapted.save_pretrained(folders[name])
        models[name] = adapted
    models[None] = tiny("llama")[0]
    return folders, models


def make(which: str) -> Engine:
    _, config, weights = tiny("llama")
    options = dict(memory="8MB", block_size=4, kv_dtype="float32")
    if which == "torch":
        return Engine(TorchRunner(config, weights), **options)
    native = pytest.importorskip("karui.inference.models.native")
    return Engine(native.NativeRunner(config, weights), dense_weight=lambda m: weights[f"{m}.weight"], **options)


@pytest.mark.parametrize("which", ["torch", "native"])
def test_a_mixed_batch_equals_peft(served, which):
    folders, models = served
    engine = make(which)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    ids = torch.randint(3, 199, (21,)).tolist()
    requests = [Request(prompt=ids, params=SamplingParams(max_tokens=10), adapter=name) for name in models]
    for _ in range(2):  # the second time over a warm cache
        outputs = engine.generate(requests)
        for name, output in zip(models, outputs, strict=True):
            assert output.token_ids == greedy(models[name], ids, 10), name
    assert all(o.num_cached_tokens == 20 for o in outputs)
    assert len({tuple(o.token_ids) for o in outputs}) > 2
    for name, model in models.items():
        got = engine.score([ids], adapter=name)[0]
        with torch.no_grad():
            want = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (got - want).abs().max() < 1e-3
    engine.check_integrity()


def test_replacing_and_removing(served):
    folders, models = served
    engine = make("torch")
    ids = torch.randint(3, 199, (21,)).tolist()
    engine.load_adapter("x", folders["plain"])
    engine.generate([Request(prompt=ids, adapter="x", params=SamplingParams(max_tokens=3))])
    engine.load_adapter("x", folders["rs"])
    out = engine.generate([Request(prompt=ids, adapter="x", params=SamplingParams(max_tokens=8))])[0]
    assert out.num_cached_tokens == 0 and out.token_ids == greedy(models["rs"], ids, 8)
    engine.add(Request(prompt=ids, adapter="x", id="r"))
    with pytest.raises(KaruiError, match="in use"):
        engine.unload_adapter("x")
    engine.abort("r")
    engine.step()
    engine.unload_adapter("x")
    with pytest.raises(KaruiError, match="'x' is not loaded; loaded: none"):
        engine.add(Request(prompt=ids, adapter="x"))


def test_what_cannot_be_served_is_refused(served, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folders, _ = served
    engine = make("torch")
    with pytest.raises(KaruiError, match="adapter_config.json not found"):
        engine.load_adapter("x", tmp_path)

    def changed(config=None, tensors=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(folders["plain"], folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
        if tensors:
            save_file(tensors(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
        return folder

    for folder, error, told in (
        (changed(dict(peft_type="IA3")), UnsupportedError, "IA3"), (changed(dict(bias="all")), UnsupportedError, "bias"),
        (changed(dict(modules_to_save=["lm_head"])), UnsupportedError, "modules_to_save"),
        (changed(tensors=lambda t: {k: v * float("nan") for k, v in t.items()}), CorruptError, "NaN"),
        (changed(tensors=lambda t: {k: v for k, v in t.items() if "lora_B" not in k}), CorruptError, "shapes"),
        (changed(tensors=lambda t: {k.replace("layers.1", "layers.9"): v for k, v in t.items()}), CorruptError, "another model"),
    ):
        with pytest.raises(error, match=told):
            engine.load_adapter("x", folder)
    assert engine.adapters == ()
