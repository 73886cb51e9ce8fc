"""Behavioural: a damaged, foreign, newer or malicious bundle is refused with a message that names the culprit."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.manifest import Manifest, check_inside
from karui.inference.bundle import decode, is_bundle, open_model, read, read_model_folder, write
from tests.bundle.conftest import random_q


@pytest.fixture
def bundle(tmp_path, tiny_folder):
    weights = {"a.weight": random_q("w4g32"), "b.weight": random_q("w8", seed=1), "norm": torch.ones(3)}
    write(tmp_path / "bundle", weights, {"model_type": "llama"}, tokenizer_dir=tiny_folder)
    return tmp_path / "bundle"


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite_weights(folder, change):
    """Change tensors and keep the manifest's file size true, so that only the tensor checks can notice."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    edit_manifest(folder, lambda m: m["weight_files"]["model.safetensors"].update(bytes=file.stat().st_size))


def test_intact(bundle):
    opened = open_model(bundle, verify="full")
    assert is_bundle(bundle) and opened.manifest is not None and opened.config == {"model_type": "llama"}
    assert set(opened.weights()) == {"a.weight", "b.weight", "norm"} and len(opened.weights()) == 3
    assert str(opened.spec("a.weight")) == "w4g32" and str(opened.spec("norm")) == "none"
    assert (opened.tokenizer_path / "tokenizer.json").is_file() and opened.manifest.chat_template
    assert opened.nbytes() == sum(p.stat().st_size for p in bundle.iterdir())
    with pytest.raises(KaruiError, match="stores no tensor 'c.weight'"):
        opened.weight("c.weight")


def test_no_bundle(tmp_path, bundle):
    with pytest.raises(KaruiError, match="no manifest.json.*karui export"):
        read(tmp_path)
    assert not is_bundle(tmp_path) and not is_bundle(tmp_path / "nowhere")
    edit_manifest(bundle, lambda m: m.update(kind="something else"))
    assert not is_bundle(bundle)
    with pytest.raises(KaruiError, match="kind is not 'karui-bundle'"):
        open_model(bundle)


@pytest.mark.parametrize(
    ("version", "remedy"), [(2, "upgrade karui"), (99, "upgrade karui"), (0, "export"), (None, "export"), ("1", "export")]
)
def test_other_schema(bundle, version, remedy):
    edit_manifest(bundle, lambda m: m.update(schema_version=version, key_of_the_future=1))
    with pytest.raises(KaruiError, match=rf"schema version {version!r}.*reads version 1: {remedy}"):
        open_model(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"kind": "karui-bundle", "schema_version": 1}'])
def test_malformed_manifest(bundle, text):
    (bundle / "manifest.json").write_text(text)
    with pytest.raises(KaruiError, match="manifest.json"):
        open_model(bundle)


def test_unknown_key_and_unknown_grid(bundle):
    edit_manifest(bundle, lambda m: m["tensors"]["a.weight"].update(spec="w99"))
    with pytest.raises((CorruptError, KaruiError), match="w99"):
        read(bundle)
    edit_manifest(bundle, lambda m: m["tensors"]["a.weight"].update(spec="w4g32", colour="red"))
    with pytest.raises(CorruptError, match="tensors.a.weight.colour"):
        read(bundle)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_one_flipped_bit(bundle, part):
    rewrite_weights(bundle, lambda t: t["a.weight." + part].view(torch.uint8).bitwise_xor_(1))
    opened = read(bundle)  # which reads no weight
    for use in (lambda: read(bundle, verify="full"), lambda: opened.packed("a.weight"), lambda: dict(opened.weights())):
        with pytest.raises(CorruptError, match=rf"a.weight.{part} has not the sha256"):
            use()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_small_files_are_always_hashed(bundle, name):
    content = bytearray((bundle / name).read_bytes())
    content[-2] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(CorruptError, match=rf"{name} has not the sha256"):
        read(bundle)
    (bundle / name).unlink()
    with pytest.raises(CorruptError, match=rf"{name} is missing"):
        read(bundle)


def test_missing_and_unconsumed_tensors(bundle, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    rewrite_weights(bundle, lambda t: t.pop("a.weight.scale"))
    with pytest.raises(CorruptError, match="1 tensors of the manifest are in no weight file: a.weight.scale"):
        read(bundle)
    rewrite_weights(other, lambda t: t.update(stowaway=torch.ones(1)))
    with pytest.raises(CorruptError, match="1 stored tensors are unknown to the manifest: stowaway"):
        read(other)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
@pytest.mark.parametrize("honest_size", [True, False])
def test_truncated_weights(bundle, keep, honest_size):
    file = bundle / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    if honest_size:
        edit_manifest(bundle, lambda m: m["weight_files"]["model.safetensors"].update(bytes=file.stat().st_size))
    with pytest.raises(CorruptError, match="model.safetensors.*truncated"):
        read(bundle)
    with pytest.raises(CorruptError, match="truncated|damaged"):
        decode.read_header(file)


def test_tail_after_the_weights(bundle):
    file = bundle / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"tail")
    with pytest.raises(CorruptError, match="with a tail"):
        decode.read_header(file)
    with pytest.raises(CorruptError, match="model.safetensors"):
        read(bundle)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["a.weight.scale", "norm"])
def test_scales_that_are_no_numbers(bundle, bad, name):
    rewrite_weights(bundle, lambda t: t[name].view(-1)[:1].fill_(bad))
    opened = read(bundle)
    with pytest.raises(CorruptError, match=rf"{name}: 1 of \d+ values are NaN"):
        opened.weight(name.removesuffix(".scale"))
    assert opened.weight("b.weight").spec.bits == 8, "the others can still be read"


def test_shape_that_is_not_the_manifest_s(bundle):
    edit_manifest(bundle, lambda m: m["tensors"]["a.weight"].update(shape=[6, 32]))
    edit_manifest(bundle, lambda m: m["tensors"]["norm"].update(shape=[4]))
    with pytest.raises(CorruptError, match=r"a.weight.codes: uint8 \[6, 32\], but w4g32 .* takes uint8 \[6, 16\]"):
        read(bundle).weight("a.weight")
    with pytest.raises(CorruptError, match=r"norm: stored as \[3\]"):
        read(bundle).weight("norm")


OUTSIDE = ["../x", "/etc/passwd", "a/../../x", "..", ".", "", "a//b", "a/./b", "./a", "a\\b", "C:\\x", "C:/x", "a\0b", "~/x"]
OUTSIDE += ["a/", "x\n", " ", "-rf"]


@pytest.mark.parametrize("table", ["files", "weight_files"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_that_leave_the_folder(bundle, table, name):
    def move(m):
        entries = m[table]
        entries[name] = entries.pop(next(iter(entries)))

    edit_manifest(bundle, move)
    with pytest.raises(CorruptError, match="not a plain path inside the bundle"):
        read(bundle)


PIECES = ["..", ".", "a", "b.c", "", "~", "C:", "\\", "é"]


@given(st.text(max_size=20) | st.lists(st.sampled_from(PIECES), max_size=6).map("/".join))
@example("a/..")
@settings(max_examples=300)
def test_no_accepted_path_leaves_the_folder(name):
    try:
        check_inside(name)
    except ValueError:
        return
    inside = os.path.normpath(os.path.join("/bundle", name))
    assert inside.startswith("/bundle/") and inside == "/bundle/" + name and "\\" not in name


@pytest.mark.parametrize("where", ["file", "folder"])
def test_symlinks_out_of_the_folder(bundle, tmp_path, where):
    if where == "file":
        shutil.move(bundle / "tokenizer.json", tmp_path / "elsewhere.json")
        (bundle / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    else:
        (tmp_path / "out").mkdir()
        shutil.move(bundle / "tokenizer.json", tmp_path / "out" / "tokenizer.json")
        (bundle / "sub").symlink_to(tmp_path / "out")
        edit_manifest(bundle, lambda m: m["files"].update({"sub/tokenizer.json": m["files"].pop("tokenizer.json")}))
    with pytest.raises(CorruptError, match="tokenizer.json leads out of the bundle"):
        read(bundle)


def test_a_bundle_behind_a_symlink_is_fine(bundle, tmp_path):
    (tmp_path / "link").symlink_to(bundle)
    assert len(read(tmp_path / "link").weights()) == 3


def test_tied_groups_must_make_sense(bundle):
    for group in (["a.weight"], ["nowhere", "x"], ["a.weight", "b.weight"]):
        edit_manifest(bundle, lambda m, group=group: m.update(tied=[group]))
        with pytest.raises(CorruptError, match="tied group"):
            read(bundle)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_manifests_never_crash(bundle, data):
    """Any value put anywhere is either read or refused with a KaruiError, never another exception."""
    path = bundle / "manifest.json"
    good = path.read_text()
    content = json.loads(good)
    spot = content
    while True:
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        if not isinstance(spot[key], dict | list) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    spot[key] = data.draw(scalar | st.lists(scalar, max_size=2) | st.dictionaries(st.text(max_size=5), scalar, max_size=2))
    path.write_text(json.dumps(content))
    try:
        dict(read(bundle, verify="full").weights())
    except KaruiError:
        pass
    finally:
        path.write_text(good)


def test_manifest_round_trip(bundle):
    manifest = Manifest.read(bundle)
    assert Manifest.model_validate_json(manifest.dumps()) == manifest
    assert (bundle / "manifest.json").read_text() == manifest.dumps()


# --- plain folders ---------------------------------------------------------------------------------------------------


def test_plain_folder(tiny_folder, untied_folder):
    opened = open_model(tiny_folder)
    assert opened.manifest is None and opened.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "lm_head.weight" not in opened.weights() and opened.weights().get("lm_head.weight") is None
    assert opened.weight("model.norm.weight").shape == (32,)
    untied = open_model(untied_folder)
    assert untied.tied == () and "lm_head.weight" in untied.weights()


def test_plain_folders_that_cannot_be_read(tiny_folder, untied_folder, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(tiny_folder, bad)
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match="quantized already \\(gptq\\)"):
        read_model_folder(bad)
    (bad / "config.json").write_text(json.dumps(config))
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptError, match="model.safetensors: truncated"):
        open_model(bad)
    weights.unlink()
    (bad / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(KaruiError, match="no model.safetensors.*pickled"):
        open_model(bad)
    shutil.copytree(untied_folder, tmp_path / "untied")
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    (tmp_path / "untied" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CorruptError, match="lm_head.weight differs from model.embed_tokens.weight"):
        open_model(tmp_path / "untied")


def test_sharded_plain_folder(untied_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied_folder)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    got, expected = dict(open_model(tmp_path).weights()), model.state_dict()
    assert got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(CorruptError, match="model-00002.*missing"):
        open_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(CorruptError, match="outside the folder"):
        open_model(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_gemma_3_with_a_vision_tower_the_text_model_is_read(prefix, tmp_path):
    """Names as on the hub and as transformers 5 has them in memory; logits of text are transformers'."""
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig

    from karui.inference.models.config import from_hf
    from karui.inference.models.decoder import TorchRunner
    from tests.inference.test_decoder import batch_of

    text = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                head_dim=8, max_position_embeddings=128, sliding_window=7, sliding_window_pattern=2, query_pre_attn_scalar=9,
                pad_token_id=0)  # fmt: skip
    config = Gemma3Config(text_config=text, image_token_index=299, boi_token_index=298, eoi_token_index=297, mm_tokens_per_image=4,
                          vision_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                             image_size=28, patch_size=14))  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    if prefix.startswith("model."):
        save_file({n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}, tmp_path / "model.safetensors")
    opened = open_model(tmp_path)
    assert opened.config["model_type"] == "gemma3_text" and not any("vision" in n or "projector" in n for n in opened.names)
    runner, ids = TorchRunner(from_hf(opened.config), dict(opened.weights())), torch.randint(3, 290, (30,))
    runner.allocate(10, 4, "float32")
    with torch.no_grad():
        want = model(input_ids=ids[None], token_type_ids=torch.zeros(1, 30, dtype=torch.long)).logits[0]
    assert (runner.forward(batch_of((ids.tolist(), 0, list(range(10))))).logits - want).abs().max() < 1e-4
    # what files leave out is what transformers puts in
    content = json.loads((tmp_path / "config.json").read_text())
    content["text_config"] = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    wanted = Gemma3TextConfig(rope_scaling={"rope_type": "linear", "factor": 8.0}).to_dict()
    assert from_hf(open_model(tmp_path).config) == from_hf(wanted)
