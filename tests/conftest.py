"""Shared by all tests: one thread where several workers share the cores, no network, no tracker that asks for a login."""

import gc
import os
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more would wait for one another, and they wait by spinning

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which other libraries do too

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from karui.kernels.native import build  # noqa: E402

# This machine's own instruction set is compiled as users have it; the others are tried for what they compute, not for their speed.
for name in build.isas()[1:]:
    needed, flags = build._ISAS[name]
    build._ISAS[name] = (needed, (*flags, "-O2"))

# Elsewhere property tests look for new examples; CI repeats the same ones, so that a red run means a changed project. How long an
# example takes says how busy the machine is.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_searched():
    """Imported libraries are some million objects, which each `gc.collect` (every run ends with one) would go through again."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _two_threads():
    """Torch's thread count is process-wide; a test that changes it must not slow the others."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, except for the compiled kernels: compiling them takes longer than any test."""
    kernels = Path(os.environ.get("KARUI_CACHE") or Path.home() / ".cache" / "karui") / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "native").symlink_to(kernels)
    monkeypatch.setenv("KARUI_CACHE", str(folder))
    return folder


@pytest.fixture
def first_of_equals(monkeypatch):
    """transformers' choice among equal scores, of which many are 0, is any; here the first ones, as ours."""

    def topk(self, k, dim=-1, largest=True, sorted=True):
        found = self.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk(tuple(x.narrow(dim, 0, k) for x in found))

    monkeypatch.setattr(torch.Tensor, "topk", topk)
