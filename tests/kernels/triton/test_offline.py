"""Behavioural: kernels compile for GPUs that are not here, hold the instruction they are meant to use, and fit in shared memory.

The compiler and the interpreter cannot be had in one process, so compilation runs in another.
"""

import json
import os
import subprocess
import sys

import pytest

from karui.configs.errors import KaruiError
from karui.kernels.triton_support import offline


def compiled(*arguments: str) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", offline.__name__, *arguments], capture_output=True, text=True, env=env)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr[-2000:]
    return rows


def check(rows: list[dict]) -> None:
    bad = [r for r in rows if not r["ok"]]
    assert not bad, "\n".join(f"{r['name']} for {r['cc']}: {r.get('error') or 'no ' + r['expects']}" for r in bad)


def test_every_case_of_the_quick_set():
    check(compiled("--quick"))


@pytest.mark.slow
@pytest.mark.parametrize("cc", sorted(offline.SHARED_LIMIT))
def test_every_case(cc):
    check(compiled("--cc", str(cc)))


def test_interpreter_and_compiler_do_not_mix(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KaruiError, match="unset TRITON_INTERPRET"):
        offline.compile_for(None, {}, {}, 90)
