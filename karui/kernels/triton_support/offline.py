"""Compile a kernel for a GPU that is not there, and look at what came out.

    python -m karui.kernels.triton_support.offline [--all] [--quick] [--cc 90] [--only NAME]     one JSON line per case

A `Case` is one specialization of a kernel and, per compute capability, a pattern that its PTX must hold. Every module with
kernels lists its cases in `offline_cases()`; `MODULES` names the modules. Triton's wheel brings ptxas, so the result is
machine code, and a kernel that asks for more shared memory than the chip has is caught here.

Without a flag every kernel with products is compiled for each chip, in its main formats, and what else there is for the chip with
the least shared memory, as far as no other case asks for more (`chips`). That is what continuous integration runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from karui.configs.errors import KaruiError
from karui.kernels.triton_support import interpreting

# Bytes of shared memory that one block may have.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# What an elementwise kernel should hold: loads of several values at once.
WIDE_LOADS = {80: r"ld.global.v[24]", 90: r"ld.global.v[24]", 100: r"ld.global.v[248]", 120: r"ld.global.v[248]"}
MODULES: tuple[str, ...] = (
    "karui.kernels.cross_entropy.triton",
    "karui.kernels.document_attention.triton",
    "karui.kernels.gemm_fp8.triton",
    "karui.kernels.gemm_grouped.triton",
    "karui.kernels.gemm_mx.triton",
    "karui.kernels.gemm_weight.triton",
    "karui.kernels.gemm_weight.words",
    "karui.kernels.linear_loss.triton",
    "karui.kernels.lora.triton",
    "karui.kernels.lora_rows.triton",
    "karui.kernels.pack.triton",
    "karui.kernels.paged_attention.kivi",
    "karui.kernels.paged_attention.triton",
    "karui.kernels.rms_norm.triton",
    "karui.kernels.rope.triton",
    "karui.kernels.sampling.triton",
    "karui.kernels.swiglu.triton",
    "karui.kernels.train_quantize.triton",
)


@dataclass(frozen=True)
class Case:
    """A kernel's specialization.

    Args:
        name: unique; the op, then what is special.
        kernel: the jitted function.
        signature: type of each run-time argument in Triton's spelling ("*bf16", "i32", "tensordesc<fp8e4nv[128,128]>").
        constexprs: value of each compile-time argument.
        expects: compute capability -> pattern (regex) that the PTX must hold; the keys are what the case is compiled for.
        odd: integer arguments that are not known to be multiples of 16 (pointers and all other integers are).
        on: "each" chip, "one" where another case has the kernel's format and instructions on each, or only when "asked" where
            another one has all of them and more shared memory; see `chips`.
        quick: the capabilities compiled in the default tests; the others are left to the slow ones.
        reads: bytes from memory that a pass of the main loop reads, for `count`; 0 leaves the case out.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    expects: Mapping[int, str]
    num_warps: int = 4
    num_stages: int = 3
    odd: tuple[str, ...] = ()
    quick: tuple[int, ...] = (90,)
    on: Literal["each", "one", "asked"] = "each"
    options: dict[str, Any] = field(default_factory=dict)
    reads: int = 0


@dataclass(frozen=True)
class Compiled:
    ptx: str
    shared_bytes: int
    cc: int
    cubin: bytes


def compile_for(kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], cc: int, *, num_warps: int = 4,
                num_stages: int = 3, odd: tuple[str, ...] = (), **options: Any) -> Compiled:  # fmt: skip
    """Compile `kernel` to machine code for compute capability `cc`.

    Raises:
        KaruiError: the interpreter is on, an argument without a type, more shared memory than the chip has, or a kernel that
            Triton gave up on.
    """
    if interpreting():
        raise KaruiError("offline compilation needs the compiler: unset TRITON_INTERPRET.")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    missing = [name for name in kernel.arg_names if name not in signature and name not in constexprs]
    if missing:
        raise KaruiError(f"{kernel.__name__}: no type or value for {', '.join(missing)}.")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (kind in ("i32", "i64") and name not in odd)
    }
    source = ASTSource(kernel, types, constexprs, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", cc, 32),
                          options={"num_warps": num_warps, "num_stages": num_stages, **options})  # fmt: skip
    shared = int(made.metadata.shared)
    if shared > SHARED_LIMIT[cc]:
        raise KaruiError(f"{kernel.__name__}: {shared} bytes of shared memory, compute capability {cc} has {SHARED_LIMIT[cc]}.")
    if re.search(r"^\s*trap;", made.asm["ptx"], re.MULTILINE):
        raise KaruiError(f"{kernel.__name__}: compiled into a trap for compute capability {cc} (too much tensor memory).")
    return Compiled(made.asm["ptx"], shared, cc, made.asm["cubin"])


def causes(error: BaseException) -> str:
    """An error of Triton's compiler and what it came from: the first one shows the place, the last one says what is wrong."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return " <- ".join(f"{type(each).__name__}: {str(each)[-300:]}" for each in chain)


def compile_case(case: Case, cc: int) -> dict[str, Any]:
    """One case's outcome: name, cc, ok, shared bytes, the pattern and whether it was found, or the error."""
    row: dict[str, Any] = {"name": case.name, "cc": cc, "expects": case.expects[cc]}
    try:
        made = compile_for(case.kernel, case.signature, case.constexprs, cc, num_warps=case.num_warps,
                           num_stages=case.num_stages, odd=case.odd, **case.options)  # fmt: skip
    except Exception as error:  # whatever the compiler throws is the result
        return {**row, "ok": False, "error": causes(error)}
    found = re.search(case.expects[cc], made.ptx)
    return {**row, "ok": found is not None, "shared_bytes": made.shared_bytes, "found": found.group(0) if found else None}


def all_cases() -> list[Case]:
    """Every case of every module of `MODULES`."""
    cases = [case for module in MODULES for case in importlib.import_module(module).offline_cases()]
    assert len({case.name for case in cases}) == len(cases), "two cases share a name"
    return cases


def chips(case: Case) -> list[int]:
    """The capabilities that a case is compiled for without `--all`: 8.9 only where there is no 8.0, whose instructions it has;
    where one is enough, that with the least shared memory."""
    found = sorted(cc for cc in case.expects if cc != 89 or 80 not in case.expects)
    return {"each": found, "one": [min(found, key=lambda cc: SHARED_LIMIT[cc])], "asked": []}[case.on]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cc", type=int, nargs="*", default=sorted(SHARED_LIMIT))
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--all", action="store_true", help="every case for every chip")
    parser.add_argument("--quick", action="store_true", help="only what the default tests compile")
    given = parser.parse_args(arguments)
    bad = 0
    for case in all_cases():
        for cc in case.expects if given.all else case.quick if given.quick else chips(case):
            if given.only in case.name and cc in case.expects and cc in given.cc:
                row = compile_case(case, cc)
                bad += not row["ok"]
                print(json.dumps(row), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
