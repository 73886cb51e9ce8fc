"""Fixtures: a tiny random model folder with a tokenizer, and helpers to make tensors on every grid."""

import json

import pytest
import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.quantize import quantize
from tests.catalogue.conftest import tiny_model

SPECS = [
    "w2g16", "w3g32", "w4g32", "w5", "w6t", "w7g32a", "w8", "w8g32", "w4g32a", "w3a", "w2ta", "w4g32:bf16", "w4g32:fp32", "w8a8",
    "w1.58", "w1.58g32", "w1", "w1g32", "nf4", "nf4dq", "fp8", "fp8t", "mxfp8",
    "mxfp4", "nvfp4",
]  # fmt: skip


def random_q(spec, rows=6, width=64, seed=0):
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return quantize(w, QuantSpec.parse(spec))


def make_folder(path, kind="llama", tied=True, **overrides):
    """A Hugging Face folder: weights, config, and a tokenizer of 256 bytes."""
    from tests.catalogue.conftest import SPECIAL, TEMPLATE, byte_alphabet

    model = tiny_model(kind, tied, **overrides)
    model.save_pretrained(path)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = SPECIAL + byte_alphabet() + ["th", "the", "Ġthe", "in", "ĠĠ", "12"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "Ġ"), ("1", "2")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("untied") / "tiny-untied", tied=False)
