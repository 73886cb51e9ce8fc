"""Behavioural: files of a folder that hold what they should not end in an error of ours that names them, not in a traceback."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from karui.configs.errors import CorruptError, UnsupportedError
from karui.inference.bundle import compressed_tensors, export_model, open_model
from karui.inference.engine import Engine

GROUP = ("quantization_config", "config_groups", "group_0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder):
    """In compressed-tensors, w4g16a."""
    at = tmp_path_factory.mktemp("damaged")
    export_model(tiny_folder, "w4g16a", at / "bundle")
    return compressed_tensors.write(open_model(at / "bundle"), at / "ct")


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.parametrize(("keys", "value", "said"), [
    (("head_dim",), "x", "config.json of a llama holds what cannot be read: invalid literal"),
    (("head_dim",), -1, "head_dim is -1; a whole number above 0"),
    (("vocab_size",), 0.5, "vocab_size is 0.5; a whole number"),
    (("num_hidden_layers",), "3", "holds what cannot be read"),
    (("num_hidden_layers",), 10**9, "num_hidden_layers is 1,000,000,000; 10,000 at most"),
    (("num_attention_heads",), 0, "holds what cannot be read|num_heads is 0"),
    (("rope_parameters", "rope_theta"), -1, "rope_theta is -1.0; a number above 0"),
    (("rms_norm_eps",), "0", "norm_eps is '0'; a number above 0"),
    ((*GROUP, "weights", "group_size"), 2**70, r"_proj.weight: scales or zero points of shape \[.*\]; .* takes \["),
    ((*GROUP, "weights", "group_size"), {}, "_proj: its group in config.json's quantization_config cannot be read"),
    ((*GROUP, "weights", "group_size"), None, "cannot be read: group_size goes with"),
    ((*GROUP, "input_activations"), "x", "cannot be read: 'str' object"),
    ((*GROUP, "weights", "strategy"), "tensor", "scales or zero points of shape"),
])
def test_fields_of_the_wrong_kind(copy, keys, value, said):
    config = json.loads((copy / "config.json").read_text())
    at = config
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(CorruptError, match=said):
        Engine.load(copy, runner="torch", memory="1MB")


@pytest.mark.parametrize(("text", "said"), [
    ('{"eos_token_id": [2, "x"]}', "its eos_token_id holds 'x'; token ids"), ('{"eos_token_id": {}}', "holds {}; token ids"),
    ("[]", "generation_config.json cannot be read"), ('{"eos', "generation_config.json cannot be read")])
def test_end_tokens_that_are_none(copy, text, said):
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(CorruptError, match=said):
        Engine.load(copy, runner="torch", memory="1MB")


def test_links_in_a_circle(folder, tmp_path):
    copy = shutil.copytree(folder.parent / "bundle", tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").symlink_to("other")
    (copy / "other").symlink_to("tokenizer.json")
    with pytest.raises(CorruptError, match="tokenizer.json leads out of the bundle"):
        open_model(copy)


def test_a_model_type_that_is_no_word(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": {}}))
    with pytest.raises(UnsupportedError, match="model_type {} is not supported"):
        Engine.load(copy, runner="torch")


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape", "weight_zero_point"])
def test_a_part_that_is_missing(copy, part):
    stored = load_file(copy / "model.safetensors")
    del stored[f"model.layers.0.self_attn.q_proj.{part}"]
    save_file(stored, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptError, match=f"layers.0.self_attn.q_proj.{part} is missing"):
        open_model(copy).weight("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_was_cut_short(copy, name):
    (copy / name).write_bytes((copy / name).read_bytes()[:-40])
    with pytest.raises(CorruptError, match="its tokenizer cannot be loaded .JSONDecodeError"):
        Engine.load(copy, runner="torch", memory="1MB")
