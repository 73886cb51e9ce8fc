"""Behavioural: a prompt that one engine has run is decoded by another as if by the first, and what does not belong is refused."""

import dataclasses

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.inference.engine import Engine
from karui.inference.handoff import Prefix
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from tests.inference.conftest import tiny
from tests.inference.test_exact import runner_of

PROMPT = torch.randint(3, 199, (38,), generator=torch.Generator().manual_seed(5)).tolist()


def engine_of(which="torch", kv_dtype="float32", **options):
    return Engine(runner_of(which, "llama", 0), kv_dtype=kv_dtype, block_size=4, **{"memory": "1MiB", "max_sequences": 4, **options})


def answer(engine, prompt=PROMPT, count=12, **options):
    output = engine.generate([Request(prompt=prompt, params=SamplingParams(max_tokens=count, ignore_eos=True), **options)])[0]
    return output.token_ids


def handed(engine, path, prompt=PROMPT, **options):
    answer(engine, prompt, 1, **options)
    engine.export_prefix(prompt, **options).save(path)
    return Prefix.load(path)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("which", ["torch", "native"])
def test_what_is_handed_over_is_decoded_as_by_a_lone_engine(which, kv_dtype, tmp_path):
    prefix = handed(engine_of(which, kv_dtype), tmp_path / "p.safetensors")
    assert len(prefix.tokens) == 36 and prefix.data.shape == (2, 3, 36, 2, 8)
    decoder = engine_of(which, kv_dtype)
    assert decoder.import_prefix(prefix) == 36 and decoder.import_prefix(prefix) == 36  # twice is once
    assert answer(decoder) == answer(engine_of(which, kv_dtype))
    assert decoder.stats.num_cached_prompt_tokens == 36
    again = decoder.export_prefix(PROMPT)
    assert torch.equal(again.data, prefix.data) and (prefix.scale is None or torch.equal(again.scale, prefix.scale))
    decoder.check_integrity()


def test_runners_read_each_other_s_keys(tmp_path):
    """The same numbers in another layout: a prefix goes through the native cache and back unchanged, and logits stay close."""
    prefix = handed(engine_of("torch", "int8"), tmp_path / "p.safetensors")
    native = engine_of("native", "int8")
    native.import_prefix(prefix)
    back = native.export_prefix(PROMPT)
    assert torch.equal(back.data, prefix.data) and torch.equal(back.scale, prefix.scale)
    assert answer(native, count=1) == answer(engine_of("torch", "int8"), count=1)


def test_a_full_cache_takes_what_it_has_room_for(tmp_path):
    prefix = handed(engine_of(), tmp_path / "p.safetensors")
    decoder = engine_of(memory=4 * 4 * engine_of().runner.kv_bytes_per_token("float32"), max_context=16, max_sequences=1)
    assert decoder.pool.num_blocks == 4 and decoder.import_prefix(prefix) == 16
    assert answer(decoder, PROMPT[:15], 1) == answer(engine_of(), PROMPT[:15], 1)
    decoder.check_integrity()


def test_running_requests_keep_their_blocks(tmp_path):
    prefix, decoder = handed(engine_of(), tmp_path / "p.safetensors"), engine_of()
    other = [5, 6, 7, 8, 9]
    decoder.add(Request(prompt=other, params=SamplingParams(max_tokens=20, ignore_eos=True), id="a"))
    for _ in range(3):
        decoder.step()
    decoder.import_prefix(prefix)
    decoder.check_integrity()
    said = []
    while decoder.has_work:
        said += [t for delta in decoder.step() for t in delta.token_ids]
    assert answer(decoder, other, 20) == answer(engine_of(), other, 20) and said == answer(engine_of(), other, 20)[-len(said):]


def test_salts_keep_prefixes_apart(tmp_path):
    prefix, decoder = handed(engine_of(), tmp_path / "p.safetensors", cache_salt="mine"), engine_of()
    decoder.import_prefix(prefix)
    answer(decoder)
    assert decoder.stats.num_cached_prompt_tokens == 0
    answer(decoder, cache_salt="mine")
    assert decoder.stats.num_cached_prompt_tokens == 36


def test_refusals(tmp_path):
    engine = engine_of()
    with pytest.raises(KaruiError, match="no block of this prompt of 38 tokens"):
        engine.export_prefix(PROMPT)
    prefix = handed(engine, tmp_path / "p.safetensors")
    with pytest.raises(KaruiError, match="is in float32, the engine's cache in float16; load the engine with kv_dtype='float32'"):
        engine_of(kv_dtype="float16").import_prefix(prefix)
    _, config, weights = tiny("llama", num_hidden_layers=2)
    with pytest.raises(KaruiError, match="another model"):
        Engine(TorchRunner(config, weights)).import_prefix(prefix)
    with pytest.raises(KaruiError, match="other weights"):
        engine_of(model="b").import_prefix(dataclasses.replace(prefix, model="a"))
    updated = engine_of()
    updated.update_weights({})
    with pytest.raises(KaruiError, match="other weights"):
        updated.import_prefix(prefix)
    with pytest.raises(KaruiError, match="token 199 is outside the vocabulary"):
        engine_of().import_prefix(dataclasses.replace(prefix, tokens=(199, *prefix.tokens[1:])))


@pytest.mark.parametrize("damage", ["cut", "no mark", "tokens", "dtype", "scale"])
def test_a_damaged_file_is_refused(damage, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "p.safetensors"
    prefix = handed(engine_of(), path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "no mark":
        save_file({"data": prefix.data}, path)
    else:
        changed = {"tokens": {"tokens": prefix.tokens[:-1]}, "dtype": {"kv_dtype": "float16"},
                   "scale": {"scale": torch.ones(2, 3, 36, 2)}}[damage]
        dataclasses.replace(prefix, **changed).save(path)
    with pytest.raises(CorruptError, match=r"p\.safetensors is not a prefix"):
        Prefix.load(path)
