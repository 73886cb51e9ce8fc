"""Unit: argmax and top-k against torch, the build cache, the choice of instruction set, torch's thread count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.inference.loading import make_runner
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.native import NativeRunner
from karui.kernels.native import argmax, available, chosen_isa, isas, library, quiet_torch, top_k
from karui.kernels.native import build as build_module
from tests.inference.conftest import tiny

needs_compiler = pytest.mark.skipif(not available(), reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("n", (1, 7, 64, 1001))
def test_argmax_and_top_k(n):
    torch.manual_seed(0)
    x = (torch.randn(5, n) * 8).round() / 8  # many ties: the lower index must win
    assert torch.equal(argmax(x).long(), torch.stack([(row == row.max()).nonzero()[0, 0] for row in x]))
    for k in (1, 5, 50):
        values, indices = top_k(x, k)
        order = torch.sort(x, descending=True, stable=True)
        assert torch.equal(values, order.values[:, :k]) and torch.equal(indices.long(), order.indices[:, :k])


def test_isa_is_forced_or_refused(monkeypatch):
    assert isas()[-1] == "generic"
    monkeypatch.setenv("KARUI_ISA", "generic")
    assert chosen_isa() == "generic"
    monkeypatch.setenv("KARUI_ISA", "mmx")
    with pytest.raises(KaruiError, match="mmx.*generic"):
        chosen_isa()


def test_no_compiler_and_a_failing_one_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path))
    monkeypatch.setattr(build_module, "compiler", lambda: None)
    with pytest.raises(KaruiError, match="no C\\+\\+ compiler"):
        build_module.build("generic")
    monkeypatch.setattr(build_module, "compiler", lambda: "false")
    with pytest.raises(KaruiError, match="could not compile"):
        build_module.build("generic")
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("why", ["no C++ compiler", "Not a directory"])
def test_without_kernels_the_torch_runner_serves(why, monkeypatch, tmp_path):
    """No compiler, or a cache that cannot be written."""
    _, config, weights = tiny("llama")
    opened = SimpleNamespace(path=tmp_path, weights=lambda: weights)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path / ("file" if why == "Not a directory" else "cache")))
    if why == "no C++ compiler":
        monkeypatch.setattr(build_module, "compiler", lambda: None)
    try:
        for found in (library.load, library._load, library.unavailable):
            found.cache_clear()
        assert type(make_runner(opened, config)) is TorchRunner
        with pytest.raises(KaruiError, match=why.replace("+", "[+]")):
            make_runner(opened, config, choice="native")
        monkeypatch.setenv("KARUI_ISA", "none")
        with pytest.raises(KaruiError, match="KARUI_ISA='none' cannot run here"):
            make_runner(opened, config)
    finally:
        for found in (library.load, library._load, library.unavailable):
            found.cache_clear()


@needs_compiler
def test_a_cache_format_that_heads_do_not_fit_and_unknown_devices(tmp_path):
    _, config, weights = tiny("llama")
    opened = SimpleNamespace(path=tmp_path, weights=lambda: weights)
    assert type(make_runner(opened, config, kv_dtype="kivi4")) is TorchRunner  # heads of 8
    assert type(make_runner(opened, config, kv_dtype="float16")) is NativeRunner
    for device in ("mps", "meta", "tpu"):
        with pytest.raises(KaruiError, match=f"device '{device}' is not known"):
            make_runner(opened, config, device=device)


@needs_compiler
def test_a_compiler_that_does_not_know_the_newest_flags_serves_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path))
    monkeypatch.setattr(build_module, "_EXTRAS", {"generic": {"fpu": "-mno-such-tiles"}})
    monkeypatch.setattr(build_module, "_cpu", lambda: frozenset({"fpu"}))
    assert build_module.build("generic", build_module.LOWBIT).is_file()


@needs_compiler
def test_a_damaged_library_is_compiled_anew_and_what_a_killed_build_left_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path))
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }')
    sources = (str(tmp_path / "one.cpp"),)
    whole = build_module.build("generic", sources)
    code = whole.read_bytes()
    left = whole.parent / "one-generic-killed.tmp"
    left.mkdir()
    for cut in (0, len(code) // 2):
        whole.write_bytes(code[:cut])
        assert build_module.build("generic", sources) == whole and whole.read_bytes() == code
    assert not left.exists()


def test_quiet_torch_restores():
    before = torch.get_num_threads()
    with quiet_torch():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
