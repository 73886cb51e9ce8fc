"""The inline assembly of `gemm_weight`, which neither the interpreter nor an absent GPU runs, read instruction by instruction.

`run` follows the PTX manual for the few instructions that the blocks hold: shl, shr, and, xor, mul, mov, fma of bf16 and fp16 pairs, lop3 with
0xea = (a & b) | c or 0xe4 = (a & c) | (b & ~c), prmt in its default mode, where a selector's digit is 0..7, with its fourth bit set the sign of that byte eight times,
and cvt to pairs of FP8, the second value below, NaN as 0x7f.
"""

import math
import random
import re
import struct

import pytest
import torch

pytest.importorskip("triton")

from karui.kernels.gemm_weight import triton as kernels
from karui.kernels.gemm_weight import words
from karui.kernels.paged_attention import triton as attention
from karui.kernels.quantize.elements import E2M1, E4M3, E5M2, encode, values
from karui.kernels.quantize.nf4 import CODEBOOK
from karui.kernels.triton_support import codecs

E2M1_VALUES = values(E2M1).tolist()
NF4_VALUES = torch.tensor(CODEBOOK).to(torch.bfloat16).tolist()


def bf16(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def fma(a, b, c):
    """a * b + c of two bf16 pairs, rounded to bf16 (exactly: what does not fit is refused)."""
    out = 0
    for shift in (0, 16):
        x, y, z = (bf16(v >> shift & 0xFFFF) for v in (a, b, c))
        bits = struct.unpack("<I", struct.pack("<f", x * y + z))[0]
        assert not bits & 0xFFFF
        out |= bits >> 16 << shift
    return out


def fp16(bits):
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def fma16(a, b, c):
    """a * b + c of two fp16 pairs, rounded once; float64 holds every such sum that the tests ask for."""
    each = [[fp16(v >> shift & 0xFFFF) for v in (a, b, c)] for shift in (0, 16)]
    low, high = (struct.unpack("<H", struct.pack("<e", x * y + z))[0] for x, y, z in each)
    return high << 16 | low


def run(assembly, *words, first=4, lane=31):
    held = {f"${first + i}": word for i, word in enumerate(words)}

    held["%lanemask_lt"] = 2**lane - 1

    def value(name):
        return held[name] if name in held else int(name, 0)

    for line in assembly.strip("{}\n").split("\n"):
        if line.startswith(".reg"):
            continue
        name, kind, arguments = re.fullmatch(r"(\w+)\.(\S+) (.*);", line).groups()
        if "{" in arguments:  # two halves
            to, low, high = re.fullmatch(r"(\w+), {(\w+), (\w+)}", arguments).groups()
            held[to] = held[high] << 16 | held[low]
            continue
        to, *given = arguments.split(", ")
        a, b, c, table = (list(map(value, given)) + [0] * 4)[:4]
        if name == "mov":
            out = a
        elif name == "shr":
            out = (a - (a >> 31 << 32) if kind == "s32" else a) >> b
        elif name == "shl":
            out = a << b
        elif name == "mul":
            out = a * b
        elif name == "and":
            out = a & b
        elif name == "xor":
            out = a ^ b
        elif name == "fma":
            out = fma(a, b, c) if kind == "rn.bf16x2" else fma16(a, b, c)
        elif name == "cvt":
            element = {"rn.satfinite.e4m3x2.f32": E4M3, "rn.satfinite.e5m2x2.f32": E5M2}[kind]
            x = torch.tensor([b, a], dtype=torch.int64).to(torch.uint32).view(torch.float32)
            low, high = encode(x, element).where(~x.isnan(), 0x7F).tolist()
            out = high << 8 | low
        elif name == "lop3":
            assert table in (0xEA, 0xE4)
            out = (a & b) | c if table == 0xEA else (a & c) | (b & ~c)
        else:
            assert name == "prmt"
            both = (b << 32 | a).to_bytes(8, "little")
            picked = [(both[c >> 4 * i & 7], c >> 4 * i & 8) for i in range(4)]
            out = int.from_bytes(bytes((byte >> 7) * 255 if sign else byte for byte, sign in picked), "little")
        held[to] = out & 0xFFFFFFFF
    return [held[f"${i}"] for i in range(first)]


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


WORDS = {
    "_INT4_CENTRED": (4, lambda c: (c - 8) / 64), "_INT2_CENTRED": (2, lambda c: (c - 2) / 64), "_TERNARY": (2, lambda c: (c - 1) / 64), "_E2M1": (4, lambda c: E2M1_VALUES[c]), "_NF4": (4, lambda c: NF4_VALUES[c]),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_every_place_of_two_words(name):
    draw, (bits, value) = random.Random(0), WORDS[name]
    for _ in range(200):
        pair = [draw.randrange(2**32) for _ in range(2)]
        for place, out in enumerate(run(getattr(words, name).value, *pair, first=32 // bits, lane=draw.randrange(32))):
            assert [bf16(out & 0xFFFF), bf16(out >> 16)] == [value(w >> bits * place & 2**bits - 1) for w in pair]


def test_every_place_of_four_words():
    draw = random.Random(0)
    for _ in range(200):
        four = [draw.randrange(2**32) for _ in range(4)]
        for place, out in enumerate(run(words._CODES2.value, *four, first=16)):
            assert list(out.to_bytes(4, "little")) == [w >> 2 * place & 3 for w in four]


@pytest.mark.parametrize("name", ["_INT8", "_E4M3"])
def test_every_place_of_two_words_of_keys(name):
    """All codes but E4M3's NaN, which the caches' scales take over."""
    value = (lambda c: c - (c >> 7 << 8)) if name == "_INT8" else torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist().__getitem__
    codes = [c for c in range(256) if name == "_INT8" or c & 127 != 127]
    draw = random.Random(0)
    for _ in range(4):
        draw.shuffle(codes)
        for i in range(0, len(codes) // 8 * 8, 8):
            pair = [int.from_bytes(bytes(codes[at : at + 4]), "little") for at in (i, i + 4)]
            for place, out in enumerate(run(getattr(attention, name).value, *pair)):
                got = [bf16(out & 0xFFFF), bf16(out >> 16)]
                assert got == [value(codes[i + place]), value(codes[i + 4 + place])]


@pytest.mark.parametrize(("name", "element"), [("_E4M3_ASM", E4M3), ("_E5M2_ASM", E5M2)])
def test_four_values_by_the_chips_own_conversion(name, element):
    draw = random.Random(0)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 448.0, -464.0, 470.0, 1e9, -1e-9, 2.0**-10, 57344.0, -61440.0]
    for _ in range(100):
        x = torch.tensor([draw.choice(special) if draw.random() < 0.3 else draw.gauss(0, 1) * 2.0 ** draw.randrange(-18, 18) for _ in range(4)])
        (out,) = run(getattr(codecs, name).value, *x.view(torch.uint32).tolist(), first=1)
        want = encode(x, element).where(~x.isnan(), 0x7F | x.signbit().byte() << 7)  # NaN as torch's cast has it
        assert list(out.to_bytes(4, "little")) == want.tolist()


@pytest.mark.parametrize("bits", [4, 2])
def test_every_place_of_words_of_a_cache(bits):
    """code / 2 * step + min in fp16: of 4 bits rounded once, of 2 bits twice."""
    draw, places = random.Random(0), 16 // bits
    assembly = attention._HALVES4.value if bits == 4 else attention._HALVES2.value
    to_bits = lambda v: struct.unpack("<H", struct.pack("<e", v))[0]  # noqa: E731
    for _ in range(300):
        word = draw.randrange(2**32)
        step, low = ([fp16(to_bits(draw.uniform(0, 1) * 2.0 ** draw.randrange(-8, 8))) for _ in range(2)] for _ in range(2))
        outs = run(assembly, word, *(to_bits(x) | to_bits(y) << 16 for x, y in (step, low)), first=places)
        for place, out in enumerate(outs):
            for i in (0, 1):
                code = word >> 16 * i + bits * place & 2**bits - 1
                want, got = code / 2 * step[i] + low[i], fp16(out >> 16 * i & 0xFFFF)
                if bits == 4:
                    assert got == fp16(to_bits(want))
                else:
                    less = low[i] - (2 if place % 2 else 8) * step[i]
                    assert abs(got - want) <= 2**-11 * (abs(want) + abs(less)) + 2**-24


def test_a_zero_point_leaves_and_a_scale_comes_exactly():
    to_bits, draw = words._bits, random.Random(0)
    for bits, name in ((4, "_INT4"), (2, "_INT2")):
        for _ in range(100):
            pair, zero = [draw.randrange(2**32) for _ in range(2)], draw.randrange(2**bits)
            for place, codes in enumerate(run(getattr(words, name).value, *pair, first=32 // bits)):
                less = getattr(words, f"_LESS{place * bits % 8}").value
                (out,) = run(less, codes, to_bits(zero / -64) * 0x10001, first=1)
                assert [64 * bf16(out & 0xFFFF), 64 * bf16(out >> 16)] == [(w >> bits * place & 2**bits - 1) - zero for w in pair]
    for code in range(16):
        for scale in (0.001953125, 0.0625, 1.75, 448.0):
            (out,) = run(words._TIMES.value, to_bits(E2M1_VALUES[code]) | to_bits(-6.0) << 16, to_bits(scale) * 0x10001, first=1)
            assert [bf16(out & 0xFFFF), bf16(out >> 16)] == [E2M1_VALUES[code] * scale, -6 * scale]


@pytest.mark.parametrize("name", ["_ASM", "_NF4_ASM", "_E2M1_ASM", *WORDS, "_CODES2", "_INT4", "_INT2", "_LESS0", "_LESS6", "_TIMES", "_INT8", "_E4M3", "_HALVES4", "_HALVES2", "_E4M3_ASM", "_E5M2_ASM"])
def test_inputs_are_read_before_an_output_is_written(name):
    """Nothing keeps a compiler from giving an output the register of an input."""
    home = next(module for module in (words, attention, kernels, codecs) if hasattr(module, name))
    lines = getattr(home, name).value.strip("{}\n").split("\n")
    read = [re.findall(r"\$(\d+)", line.split(",", 1)[-1]) for line in lines]
    written = [re.search(r"^\S+ \$(\d+),", line) for line in lines]
    outputs = {found.group(1) for found in written if found}
    first = next(i for i, found in enumerate(written) if found)
    assert not [i for i, names in enumerate(read) if set(names) - outputs and i > first]
