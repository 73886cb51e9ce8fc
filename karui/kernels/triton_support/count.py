"""What a kernel's main loop can take in, by count of its machine code: a bound where no GPU can time it. One without products
is counted whole.

    python -m karui.kernels.triton_support.count [--cc 90] [--only NAME]     one line per case that says what its loop reads

A multiprocessor issues four warps' instructions a cycle, one each. A loop of I instructions that reads B bytes in a pass of W
warps therefore takes in at most 4 B / (I W) bytes a cycle. An H200's memory gives a multiprocessor `MEMORY` bytes a cycle:
kernels above it wait for memory, kernels below it for their own instructions.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from karui.configs.errors import UnsupportedError
from karui.kernels.triton_support.offline import Case, all_cases, compile_for

MEMORY = 4.8e12 / 132 / 1.755e9  # bytes a cycle and multiprocessor of an H200: 4.8 TB/s, 132 of them, 1.755 GHz


def loops(cubin: bytes) -> tuple[list[str], list[list[str]]]:
    """The instructions of a kernel's machine code, and those of each of its loops that holds no other loop.

    Raises:
        UnsupportedError: this Triton brings no `nvdisasm`.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        raise UnsupportedError(f"machine code is read by {tool}, which this Triton does not bring.")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            code.append(found[1])
    jumps = [(labels.get(target[1], len(code)), at) for at, line in enumerate(code)
             if (target := re.match(r"BRA.*`\((\.L_\w+)\)", line))]  # fmt: skip
    back = [(first, last) for first, last in jumps if first <= last]
    inner = [(a, b) for a, b in back if not any((c, d) != (a, b) and a <= c and d <= b for c, d in back)]
    return code, [code[first : last + 1] for first, last in inner]


def main_loop(case: Case, cc: int) -> list[str]:
    """The instructions of a case's first loop with a tensor core's instruction, or all of them."""
    made = compile_for(case.kernel, case.signature, case.constexprs, cc, num_warps=case.num_warps, num_stages=case.num_stages,
                       odd=case.odd, **case.options)  # fmt: skip
    code, found = loops(made.cubin)
    return next((loop for loop in found if any(re.match(r"[HIQ]G?MMA", line) for line in loop)), code)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cc", type=int, default=90)
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--what", action="store_true", help="the instructions by name, too")
    given = parser.parse_args(arguments)
    print(f"bytes a cycle; an H200's memory gives {MEMORY:.1f}")
    for case in all_cases():
        if case.reads and given.cc in case.expects and given.only in case.name:
            loop = main_loop(case, given.cc)
            rate = case.reads * 4 / (len(loop) * case.num_warps)
            print(f"{rate:6.1f}  {case.name}: {case.reads} bytes, {len(loop)} instructions, {case.num_warps} warps", flush=True)
            if given.what:
                print("       ", collections.Counter(line.split()[0] for line in loop).most_common(24))
    return 0


if __name__ == "__main__":
    sys.exit(main())
