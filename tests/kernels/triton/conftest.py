"""The kernels' tests. Without a GPU they run in Triton's interpreter, which must be chosen before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from karui.kernels.triton_support import has_triton, interpreting

collect_ignore_glob = [] if has_triton() else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def rng(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once():
    """Within a kernel the interpreter looks through all of Triton's language at every call of a function, to replace what it has
    replaced before: a third of these tests' time."""
    if not has_triton() or not interpreting():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, run, known = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_new(fn):
        seen = {lang.__name__ for lang in (tl, tl.core) if lang in fn.__globals__.values()}
        if seen <= known:
            return interpreter._LangPatchScope()
        known.update(seen)
        return patch(fn)

    def run_grid(self, *args, **kwargs):
        known.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            known.clear()

    with pytest.MonkeyPatch.context() as m:
        m.setattr(interpreter, "_patch_lang", patch_new)
        m.setattr(interpreter.GridExecutor, "__call__", run_grid)
        yield
