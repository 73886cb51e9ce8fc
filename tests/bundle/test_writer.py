"""Behavioural: a bundle is there whole or not at all."""

import errno
import json

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.inference.bundle import decode, open_model, read, staging, write, writer
from karui.kernels.qtensor import QTensor
from tests.bundle.conftest import random_q

CONFIG = {"model_type": "llama", "hidden_size": 64}


def weights():
    return {"a.weight": random_q("w4g32"), "norm": torch.ones(3)}


def test_what_the_manifest_says(tmp_path, tiny_folder):
    manifest = write(
        tmp_path / "b", weights(), CONFIG, tokenizer_dir=tiny_folder, recipe={"model": "m"}, tied=[("a.weight", "b.weight")],
        provenance={"source_model": "tiny"}, fates={"a.weight": ("quantized", "asked for")}, plan={"k": 1}, heads={"medusa": {}},
    )  # fmt: skip
    opened = read(tmp_path / "b")
    assert opened.manifest == manifest and opened.config == CONFIG and opened.tied == (("a.weight", "b.weight"),)
    assert manifest.tensors["a.weight"].model_dump() | {"parts": None} == {
        "spec": "w4g32", "shape": (6, 64), "dtype": "float32", "parts": None, "fate": "quantized", "why": "asked for",
    }  # fmt: skip
    assert set(manifest.files) == {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert "<|im_start|>" in manifest.chat_template
    assert manifest.provenance.karui and manifest.provenance.torch == torch.__version__ and manifest.provenance.created
    assert json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"] == {"quant_method": "karui"}
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_shards(tmp_path):
    many = {f"w{i}": random_q("w4g32", seed=i) for i in range(5)}
    manifest = write(tmp_path / "b", many, CONFIG, max_shard_bytes=500)
    assert list(manifest.weight_files) == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    opened = read(tmp_path / "b", verify="full")
    assert all(torch.equal(opened.weight(n).codes, many[n].codes) for n in many)


@pytest.mark.parametrize("how", ["oserror", "as safetensors words it"])
def test_full_disk(tmp_path, monkeypatch, how):
    def full(*args, **kwargs):
        if how == "oserror":
            raise OSError(errno.ENOSPC, "No space left on device")
        from safetensors import SafetensorError

        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(KaruiError, match=r"no space left in .*needs about .* MB .*are free.*nothing was left behind"):
        write(tmp_path / "b", weights(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    usage = staging.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr("safetensors.torch.save_file", None)
    with pytest.raises(KaruiError, match=r"\(1,000 bytes\) are free"):
        write(tmp_path / "b", weights(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_other_write_errors(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(KaruiError, match="cannot be written.*Permission denied"):
        write(tmp_path / "b", weights(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gives_back_something_else(tmp_path, monkeypatch):
    original = writer._save_safetensors

    def lying(path, names, parts):
        original(path, names, parts)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(writer, "_save_safetensors", lying)
    with pytest.raises(CorruptError, match="read back"):
        write(tmp_path / "b", weights(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_parity_gate(tmp_path):
    seen = []

    def parity(path):
        seen.append(path)
        assert len(open_model(path).weights()) == 2, "the gate gets a complete bundle"
        assert not (tmp_path / "b").exists(), "which is not in place yet"
        return {"max_abs_dlogit": 1e-6, "bound": 1e-4}

    manifest = write(tmp_path / "b", weights(), CONFIG, parity=parity)
    assert manifest.parity == {"max_abs_dlogit": 1e-6, "bound": 1e-4} == read(tmp_path / "b").manifest.parity and len(seen) == 1

    def refuse(path):
        raise KaruiError("logits differ by 3")

    with pytest.raises(KaruiError, match="differ by 3"):
        write(tmp_path / "c", weights(), CONFIG, parity=refuse)
    with pytest.raises(KaruiError, match="does not reproduce the prepared model"):
        write(tmp_path / "c", weights(), CONFIG, parity=lambda path: {"passed": False})
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", weights(), CONFIG, parity=lambda path: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_target_that_exists(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", weights(), CONFIG)  # an empty folder is fine
    with pytest.raises(KaruiError, match="exists already"):
        write(tmp_path / "b", weights(), CONFIG)
    write(tmp_path / "b", {"only": torch.ones(2)}, CONFIG, overwrite=True)
    assert list(read(tmp_path / "b").weights()) == ["only"] and [p.name for p in tmp_path.iterdir()] == ["b"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(KaruiError, match="not a bundle, so it is not overwritten"):
        write(tmp_path / "mine", weights(), CONFIG, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(KaruiError, match="exists already"):
        write(tmp_path / "file", weights(), CONFIG)


def test_a_failed_overwrite_keeps_the_old_bundle(tmp_path):
    write(tmp_path / "b", weights(), CONFIG)
    with pytest.raises(KaruiError):
        write(tmp_path / "b", {"only": torch.ones(2)}, CONFIG, overwrite=True, parity=lambda path: {"passed": False})
    assert len(read(tmp_path / "b", verify="full").weights()) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_not_written(tmp_path, bad):
    q = random_q("w4g32")
    scale = q.scale.clone()
    scale[2, 1] = bad
    broken = QTensor(q.codes, scale, None, q.spec, q.shape)
    with pytest.raises(KaruiError, match=r"layer.7.weight.scale: 1 of 12 values are NaN"):
        write(tmp_path / "b", {"layer.7.weight": broken}, CONFIG)
    with pytest.raises(KaruiError, match="norm: 3 of 3 values"):
        write(tmp_path / "b", {"norm": torch.full((3,), bad)}, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_decoder_shares_no_code_with_the_writer():
    """The read-back would prove nothing if both sides called the same packer or the same grid."""
    import ast
    import inspect

    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(inspect.getsource(decode)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("karui.")
        for alias in node.names
    }
    assert all(name.startswith("karui.configs.") or name == "karui.kernels.qtensor.QTensor" for name in imported), imported
