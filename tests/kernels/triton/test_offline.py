"""Behavioural: kernels compile for GPUs that are not here, hold the instruction they are meant to use, and fit in shared memory.

The compiler and the interpreter cannot be had in one process, so compilation runs in another.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from karui.configs.errors import KaruiError
from karui.kernels.triton_support import count, offline


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
    check(compiled("--all", "--cc", str(cc)))


def test_each_kernel_is_compiled_and_products_for_every_chip_that_has_their_format():
    wanted, made = {}, {}
    for case in offline.all_cases():
        name = case.kernel.fn.__module__, case.kernel.fn.__name__
        made[name] = made.get(name, set()) | set(offline.chips(case))
        assert set(offline.chips(case)) <= set(case.expects)
        wanted[name] = wanted.get(name, set()) | {80 if cc == 89 else cc for cc, pattern in case.expects.items() if "mma" in pattern}
    assert all(made.values())
    assert all({80 if cc == 89 else cc for cc in made[name]} >= chips for name, chips in wanted.items())


def test_every_kernel_that_is_launched_has_a_case():
    covered = {(case.kernel.fn.__module__, case.kernel.fn.__name__) for case in offline.all_cases()}
    launched, kernels = set(), Path(offline.__file__).parents[1]
    for path in kernels.rglob("*.py"):
        source, module = path.read_text(), ".".join(("karui.kernels", *path.relative_to(kernels).with_suffix("").parts))
        names = re.findall(r"@triton\.jit(?:\([^)]*\))?\ndef (\w+)\(", source)
        launched |= {(module, name) for name in names if re.search(rf"\b{name}\[", source)}
    assert len(launched) > 30 and not launched - covered


def test_what_a_loop_takes_in_is_counted():
    """The instructions of decode attention's main loop, and more bytes a cycle than an H200's memory gives."""
    done = subprocess.run([sys.executable, "-m", count.__name__, "--only", "decode int4", "--what"], capture_output=True, text=True,
                          env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})  # fmt: skip
    first, *rest = done.stdout.splitlines()
    assert first.endswith("20.7") and len(rest) == 6 and "HMMA" in rest[1], done.stderr[-2000:]
    assert all(float(line.split()[0]) > count.MEMORY for line in rest[::2])


def test_interpreter_and_compiler_do_not_mix(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KaruiError, match="unset TRITON_INTERPRET"):
        offline.compile_for(None, {}, {}, 90)
