"""Behavioural: a draft says which model it was made for, and is refused beside another of the same shape."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from karui.configs.errors import CorruptError, KaruiError
from karui.inference.bundle import export_model, open_model
from karui.inference.engine import Engine
from karui.inference.loading import load_tokenizer
from karui.inference.requests import SamplingParams
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config
from karui.inference.speculative.factory import FILES, check_draft, draft_target, save_eagle3, save_medusa
from karui.inference.speculative.medusa import MedusaHeads
from karui.inference.speculative.target import TargetIdentity
from tests.evaluate.tiny import tokenizer
from tests.speculative.conftest import tiny_config, tiny_weights

VOCAB = 258
METHODS = ["medusa", "eagle3"]


def folder(path: Path, seed: int) -> Path:
    """A model folder of the tiny shape, with a tokenizer."""
    from transformers import LlamaConfig

    path.mkdir()
    c = tiny_config(VOCAB)
    LlamaConfig(vocab_size=VOCAB, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
                num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.max_context,
                tie_word_embeddings=True, architectures=["LlamaForCausalLM"]).save_pretrained(path)
    save_file(tiny_weights(c, seed), path / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(path)
    return path


def add_drafts(path: Path, target: TargetIdentity | None) -> None:
    torch.manual_seed(1)
    save_medusa(MedusaHeads(2, tiny_config(VOCAB).hidden_size, VOCAB), path, target=target)
    save_eagle3(Eagle3(Eagle3Config.of(tiny_config(VOCAB))), path, target)


def identity(path: Path) -> TargetIdentity:
    return TargetIdentity.of(open_model(path), load_tokenizer(path))


@pytest.fixture(scope="module", params=["folder", "bundle"])
def models(request, tmp_path_factory) -> tuple[Path, Path]:
    """Two models of one shape, as folders or as bundles; the first holds drafts made for it, the second the same files."""
    root = tmp_path_factory.mktemp("models")
    first, second = (folder(root / f"model{seed}", seed) for seed in (0, 5))
    if request.param == "bundle":
        first, second = (export_model(path, "w4g16", path.with_name(f"{path.name}-w4")).path for path in (first, second))
    add_drafts(first, identity(first))
    for name in FILES.values():
        shutil.copyfile(first / name, second / name)
    return first, second


def load(path: Path, speculation: str | SpeculationConfig | None) -> Engine:
    return Engine.load(path, runner="torch", max_context=64, speculation=speculation)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_serves_its_own_model_and_is_refused_beside_another(method, models, caplog):
    ours, other = models
    with caplog.at_level(logging.WARNING):
        load(ours, f"{method}:2")
    assert "does not say" not in caplog.text
    with pytest.raises(KaruiError, match=rf"{method}.safetensors was made for another model: the weights .*any-target"):
        load(other, f"{method}:2")


@pytest.mark.parametrize("method", METHODS)
def test_who_knows_better_may_use_it_and_the_text_is_the_models(method, models):
    _, other = models
    asked = [[3, 4, 5, 6]], SamplingParams(max_tokens=12, ignore_eos=True)
    config = SpeculationConfig(method=method, k=2, any_target=True, adaptive=False)
    drafted = load(other, config)
    assert drafted.generate(*asked)[0].token_ids == load(other, None).generate(*asked)[0].token_ids
    assert drafted.stats.num_drafted_tokens > 0
    load(other, f"{method}:2,any-target")


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_from_before_the_mark_loads_with_a_warning(method, models, tmp_path, caplog):
    ours = tmp_path / "older"
    shutil.copytree(models[0], ours)
    add_drafts(ours, None)
    assert draft_target(ours, method) is None
    with caplog.at_level(logging.WARNING):
        load(ours, f"{method}:2")
    assert f"{method}.safetensors does not say which model it was made for" in caplog.text


def test_another_vocabulary_is_another_model(models):
    ours, _ = models
    renamed = tokenizer()
    check_draft(ours, "eagle3", open_model(ours), renamed)
    check_draft(ours, "eagle3", open_model(ours), None)  # token ids only: nothing to compare
    renamed.add_tokens(["<more>"])
    with pytest.raises(KaruiError, match="the vocabulary of"):
        check_draft(ours, "eagle3", open_model(ours), renamed)


def test_a_mark_that_cannot_be_read_is_damage(models, tmp_path):
    path = models[0] / FILES["medusa"]
    save_file(load_file(path), tmp_path / path.name, metadata={"target": json.dumps({"heights": "0"})})
    with pytest.raises(CorruptError, match="which model it was made for cannot be read"):
        draft_target(tmp_path, "medusa")


def test_the_identity_is_that_of_values_and_grids_not_of_files(tmp_path):
    source = folder(tmp_path / "model", 0)
    found = {}
    for name, spec, options in (("once", "w4g16", {}), ("again", "w4g16", {"provenance": {"notes": {"on": "another day"}}}),
                                ("coarse", "w2g16", {})):
        found[name] = identity(export_model(source, spec, tmp_path / name, **options).path)
    assert found["once"] == found["again"] and found["once"].difference(found["coarse"]) == "weights"
    weights = load_file(source / "model.safetensors")
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:]), 1):
        save_file({n: weights[n] for n in part}, source / f"part{number}.safetensors")
    index = {n: f"part{1 if n in names[:5] else 2}.safetensors" for n in names}
    whole = identity(source)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert identity(source) == whole
    weights["model.norm.weight"][0] += 1e-3
    save_file({n: weights[n] for n in names[5:]}, source / "part2.safetensors")
    assert identity(source) != whole
