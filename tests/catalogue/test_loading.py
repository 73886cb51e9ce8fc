"""Behavioural: a model folder that is not whole is refused, where transformers would draw what is missing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from karui.catalogue import load_causal_lm, load_model_config
from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from tests.catalogue.conftest import tiny_model

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(tmp_path, request):
    tiny_model(tied=request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_whole_folder_loads(folder):
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(load_causal_lm(folder, dtype=torch.float32).state_dict()[NAME], stored[NAME])


@pytest.mark.parametrize("change, message", [
    (lambda w: w.pop(NAME), f"missing or misshapen: {NAME}"),
    (lambda w: w.update({NAME: w[NAME][:, :40].contiguous()}), rf"{NAME} \(32, 40\), expected \(32, 48\)"),
    (lambda w: [w.pop(k) for k in list(w) if "layers.0" in k], "and 6 more")])  # fmt: skip
def test_missing_and_misshapen_weights(folder, change, message):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptError, match=message):
        load_causal_lm(folder)


def test_configs(tmp_path):
    with pytest.raises(KaruiError, match="no config.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(KaruiError, match="cannot read config.json"):
        load_model_config(tmp_path)
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UnsupportedError, match="already quantized"):
        load_model_config(tmp_path)
