"""The inline assembly of `gemm_weight`, which neither the interpreter nor an absent GPU runs, read instruction by instruction.

`run` follows the PTX manual for the few instructions that the blocks hold: shr, and, mov, lop3 with 0xea = (a & b) | c, and prmt in its
default mode, where a selector's digit is 0..7 (with its fourth bit set the sign would be repeated: refused here).
"""

import random
import re

import pytest
import torch

pytest.importorskip("triton")

from karui.kernels.gemm_weight import triton as kernels
from karui.kernels.quantize.elements import E2M1, values
from karui.kernels.quantize.nf4 import CODEBOOK


def run(assembly, word):
    held = {"$4": word}

    def value(name):
        return held[name] if name in held else int(name, 0)

    for line in assembly.strip("{}\n").split("\n"):
        if line.startswith(".reg"):
            continue
        name, to, *given = re.fullmatch(r"(\w+)\.\w+ (.*);", line).group(1), *re.fullmatch(r"\S+ (.*);", line).group(1).split(", ")
        a, b, c, table = (list(map(value, given)) + [0] * 4)[:4]
        if name == "mov":
            out = a
        elif name == "shr":
            out = a >> b
        elif name == "and":
            out = a & b
        elif name == "lop3":
            assert table == 0xEA
            out = (a & b) | c
        else:
            assert name == "prmt" and not c & 0x8888
            both = (b << 32 | a).to_bytes(8, "little")
            out = int.from_bytes(bytes(both[c >> 4 * i & 7] for i in range(4)), "little")
        held[to] = out & 0xFFFFFFFF
    return [held[f"${i}"] for i in range(4)]


@pytest.mark.parametrize(("name", "entries"), [("_NF4_ASM", CODEBOOK), ("_E2M1_ASM", values(E2M1).tolist()), ("_ASM", [128.0 + i for i in range(16)])])
def test_every_code_at_every_place(name, entries):
    table = torch.tensor(entries).to(torch.bfloat16).view(torch.int16).tolist()
    draw = random.Random(0)
    for _ in range(400):
        codes = [draw.randrange(256) for _ in range(4)]
        outs = run(getattr(kernels, name).value, sum(c << 8 * i for i, c in enumerate(codes)))
        for shift, pair in ((0, outs[:2]), (4, outs[2:])):
            got = [pair[i // 2] >> 16 * (i % 2) & 0xFFFF for i in range(4)]
            assert got == [table[c >> shift & 15] & 0xFFFF for c in codes]
