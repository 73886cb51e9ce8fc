"""Codes of a matrix along rows and columns in one reading (two where a scale spans a row or the whole tensor).

A program holds a tile of x, codes it along its rows,
turns it in shared memory and codes it along its columns. Amaxes are taken on
the bit patterns of the magnitudes, as integers: a NaN then wins, and atomics give the same bits in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.quantize.nvfp4 import SIGNS
from karui.kernels.train_quantize import Coded, Noise, tile_of
from karui.kernels.triton_support import capability
from karui.kernels.triton_support.codecs import (
    decode_e4m3,
    e8m0_value,
    encode_e2m1,
    encode_e2m1_noisy,
    encode_e4m3,
    float8_bytes,
    noise_tile,
)
from karui.kernels.triton_support.offline import WIDE_LOADS, Case

_FORMATS = {"e4m3": 0, "e5m2": 1, "mxfp8": 2, "mxfp4": 3, "nvfp4": 4}
_COMPATS = {"te": 0, "ao": 1, "deepgemm": 2}
_SPANS = {"tensor": 0, "row": 1, "1x128": 2, "128x128": 3}


@triton.jit
def _bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(x_ptr, m0, k0, stride_m, stride_k, M, K, TM: tl.constexpr, TK: tl.constexpr):
    m = m0 + tl.arange(0, TM)
    k = k0 + tl.arange(0, TK)
    at = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    return tl.load(x_ptr + at, (m[:, None] < M) & (k[None, :] < K), 0.0)


@triton.jit
def _turned(x, sign_ptr, TM: tl.constexpr, TK: tl.constexpr):
    """x^T [TK, TM] after the random Hadamard transform in pieces of 16 along TM; fp32.

    Signs, then four butterflies of (a + b, a - b): each works on the last bit of the index and moves it to the front, so that
    after four the bits stand as before. Additions only, in an order that no compiler changes.
    """
    signs = tl.load(sign_ptr + tl.arange(0, TM) % 16)
    y = tl.trans(x).to(tl.float32) * signs[None, :]
    y = y.reshape([TK * TM // 16, 16])
    for _ in tl.static_range(4):
        a, b = tl.split(y.reshape([TK * TM // 16, 8, 2]))
        y = tl.join(a + b, a - b).permute(0, 2, 1).reshape([TK * TM // 16, 16])
    return y.reshape([TK, TM])


@triton.jit
def _amax(x_ptr, sign_ptr, tensor_ptr, turned_ptr, row_ptr, col_ptr, M, K, stride_m, stride_k, TENSOR: tl.constexpr,
          TURNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr):  # fmt: skip
    m0, k0 = tl.program_id(0) * TM, tl.program_id(1) * TK
    x = _load(x_ptr, m0, k0, stride_m, stride_k, M, K, TM, TK)
    bits = _bits(x)
    if TENSOR:
        tl.atomic_max(tensor_ptr, tl.max(tl.max(bits, 1), 0))
    if TURNED:
        tl.atomic_max(turned_ptr, tl.max(tl.max(_bits(_turned(x, sign_ptr, TM, TK)), 1), 0))
    if ROWS:
        m = m0 + tl.arange(0, TM)
        tl.atomic_max(row_ptr + m, tl.max(bits, 1), m < M)
    if COLS:
        k = k0 + tl.arange(0, TK)
        tl.atomic_max(col_ptr + k, tl.max(bits, 0), k < K)


@triton.jit
def _float8_scales(amax, MAX: tl.constexpr, COMPAT: tl.constexpr, POW2: tl.constexpr):
    """(encode scale, decode scale) of fp32 amaxes, as `quantize.scaled_float8.tile_scales`."""
    if COMPAT == 0:
        scale = tl.minimum(tl.div_rn(MAX, amax), 3.4028234663852886e38)
        scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
        if POW2:  # whose inverse takes no division; that of 2^127 is subnormal
            power = scale.to(tl.int32, bitcast=True) & 0x7F800000
            inverse = tl.where(power == 0x7F000000, 0x400000, 0x7F000000 - power)
            return power.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
        return scale, tl.div_rn(1.0, scale)
    elif COMPAT == 1:
        wide = amax.to(tl.float64)
        # not tl.maximum: a NaN must stay
        wide = tl.where(wide < 1e-12, 1e-12, wide)
        scale = (MAX / wide).to(tl.float32)
        if POW2:
            scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        return scale, tl.div_rn(1.0, scale)
    else:
        floor = tl.where(amax < 1e-4, 1e-4, amax)
        decode = tl.div_rn(floor, MAX)
        if POW2:
            bits = decode.to(tl.int32, bitcast=True)
            field = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
            decode = (tl.minimum(tl.maximum(field, 1), 254) << 23).to(tl.float32, bitcast=True)
        return tl.div_rn(1.0, decode), decode


@triton.jit
def _mx_exponent(amax, MAX: tl.constexpr, COMPAT: tl.constexpr):
    """E8M0 bytes of fp32 block maxima, rceil."""
    if COMPAT == 2:
        floor = tl.where(amax < 1e-4, 1e-4, amax)
        ratio = tl.div_rn(floor, MAX)
    else:
        ratio = amax * (1.0 / MAX)
    bits = ratio.to(tl.int32, bitcast=True)
    byte = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    if COMPAT == 2:
        return tl.minimum(tl.maximum(byte, 1), 254)
    return tl.where(amax != amax, 255, tl.minimum(byte, 254))


@triton.jit
def _spread(scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    return tl.broadcast_to(scale[:, :, None], [ROWS, BLOCKS, BLOCK]).reshape([ROWS, BLOCKS * BLOCK])


@triton.jit
def _block_amax(x, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr):
    """fp32 [ROWS, COLS / BLOCK]: largest magnitude of each 1 x BLOCK piece, or of its square tile (repeated along rows)."""
    bits = tl.max(_bits(x).reshape([ROWS, COLS // BLOCK, BLOCK]), 2)
    if SQUARE:
        tiles = tl.max(bits.reshape([ROWS // BLOCK, BLOCK, COLS // BLOCK]), 1)
        wide = tl.broadcast_to(tiles[:, None, :], [ROWS // BLOCK, BLOCK, COLS // BLOCK])
        bits = wide.reshape([ROWS, COLS // BLOCK])
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_codes(codes, ptr, row0, col0, R, C, width, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr):
    """int32 codes to a dense matrix of R rows and `width` bytes each; PAIRS: two codes a byte, zero codes beyond column C."""
    r = row0 + tl.arange(0, ROWS)
    if PAIRS:
        # a NaN in a block reaches its padding
        codes = tl.where(col0 + tl.arange(0, COLS)[None, :] < C, codes, 0)
        low, high = tl.split(codes.reshape([ROWS, COLS // 2, 2]))
        c = col0 // 2 + tl.arange(0, COLS // 2)
        codes = low | (high << 4)
    else:
        c = col0 + tl.arange(0, COLS)
    at = r.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(ptr + at, codes.to(tl.uint8), (r[:, None] < R) & (c[None, :] < width))


@triton.jit
def _store_scales(scale, ptr, row0, block0, R, num_blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
                  SQUARE: tl.constexpr):  # fmt: skip
    r = row0 + tl.arange(0, ROWS)
    b = block0 + tl.arange(0, BLOCKS)
    keep = (r[:, None] < R) & (b[None, :] < num_blocks)
    if SQUARE:
        keep = keep & (r[:, None] % BLOCK == 0)
        r = r // BLOCK
    tl.store(ptr + r[:, None] * num_blocks + b[None, :], scale, keep)


@triton.jit
def _code(x, R, C, row0, col0, codes_ptr, scale_ptr, given_ptr, seed, step_ptr, layer, tensor, ROWS: tl.constexpr,
          COLS: tl.constexpr, FORMAT: tl.constexpr, SPAN: tl.constexpr, COMPAT: tl.constexpr, POW2: tl.constexpr,
          HARD: tl.constexpr, NOISY: tl.constexpr):  # fmt: skip
    """Code one tile x [ROWS, COLS] fp32 of a matrix [R, C] along its rows and store codes and scales.

    given_ptr: fp8 per tensor or row, the encode scales; nvfp4, the bits of the amax.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == 4 else 32 if FORMAT >= 2 else 128
    SQUARE: tl.constexpr = SPAN == 3
    PAIRS: tl.constexpr = FORMAT >= 3
    MAX: tl.constexpr = 57344.0 if FORMAT == 1 else 6.0 if FORMAT == 3 else 448.0
    BLOCKS: tl.constexpr = COLS // BLOCK
    width = C
    if PAIRS:
        width = (C + BLOCK - 1) // BLOCK * BLOCK // 2
    if FORMAT <= 1 and SPAN <= 1:
        if SPAN == 0:
            scaled = x * tl.load(given_ptr)
        else:
            r = row0 + tl.arange(0, ROWS)
            scaled = x * tl.load(given_ptr + r, r < R, 1.0)[:, None]
    else:
        amax = _block_amax(x, ROWS, COLS, BLOCK, SQUARE)
        num_blocks = (C + BLOCK - 1) // BLOCK
        if FORMAT <= 1:
            encode, decode = _float8_scales(amax, MAX, COMPAT, POW2)
            scaled = x * _spread(encode, ROWS, BLOCKS, BLOCK)
            _store_scales(decode, scale_ptr, row0, col0 // BLOCK, R, num_blocks, ROWS, BLOCKS, BLOCK, SQUARE)
        elif FORMAT <= 3:
            byte = _mx_exponent(amax, MAX, COMPAT)
            inverse = tl.where(byte == 255, float("nan"), e8m0_value(254 - byte))
            scaled = x * _spread(inverse, ROWS, BLOCKS, BLOCK)
            _store_scales(byte.to(tl.uint8), scale_ptr, row0, col0 // BLOCK, R, num_blocks, ROWS, BLOCKS, BLOCK, SQUARE)
        else:
            whole = tl.load(given_ptr).to(tl.float32, bitcast=True)
            enc = tl.minimum(tl.div_rn(2688.0, whole), 3.4028234663852886e38)
            enc = tl.where((whole > 0) & (whole < float("inf")), enc, 1.0)
            target = amax * tl.div_rn(enc, 6.0)
            code = encode_e4m3(target)
            multiplier = tl.div_rn(1.0, tl.div_rn(decode_e4m3(code), enc))
            # minimum as a choice, so that a NaN stays
            multiplier = tl.where(multiplier > 3.4028234663852886e38, 3.4028234663852886e38, multiplier)
            multiplier = tl.where(amax == 0, 3.4028234663852886e38, multiplier)
            scaled = x * _spread(multiplier, ROWS, BLOCKS, BLOCK)
            _store_scales(code.to(tl.uint8), scale_ptr, row0, col0 // BLOCK, R, num_blocks, ROWS, BLOCKS, BLOCK, SQUARE)
    if FORMAT <= 2:
        codes = float8_bytes(scaled, FORMAT == 1, HARD)
    elif NOISY:
        noise = noise_tile(seed, tl.load(step_ptr).to(tl.int32), layer, tensor, row0, col0, C, ROWS, COLS)
        codes = encode_e2m1_noisy(scaled, noise)
    else:
        codes = encode_e2m1(scaled)
    _store_codes(codes, codes_ptr, row0, col0, R, C, width, ROWS, COLS, PAIRS)


# the keys of the noise differ from layer to layer: specialized by value, each kind would be compiled several times
@triton.jit(do_not_specialize=["seed", "layer", "row_tensor", "col_seed", "col_layer", "col_tensor"],
            do_not_specialize_on_alignment=["seen_ptr"])  # fmt: skip
def _both(x_ptr, sign_ptr, row_codes_ptr, row_scale_ptr, row_given_ptr, col_codes_ptr, col_scale_ptr, col_given_ptr, seen_ptr,
          M, K, stride_m, stride_k, seed, step_ptr, layer, row_tensor, col_seed, col_step_ptr, col_layer, col_tensor,
          FORMAT: tl.constexpr, SPAN: tl.constexpr, COMPAT: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr,
          COLS: tl.constexpr, HADAMARD: tl.constexpr, ROW_NOISE: tl.constexpr, COL_NOISE: tl.constexpr, SEEN: tl.constexpr,
          HARD: tl.constexpr, TM: tl.constexpr, TK: tl.constexpr):  # fmt: skip
    m0, k0 = tl.program_id(0) * TM, tl.program_id(1) * TK
    x = _load(x_ptr, m0, k0, stride_m, stride_k, M, K, TM, TK)
    if SEEN:
        tl.atomic_max(seen_ptr, tl.minimum(tl.max(tl.max(_bits(x), 1), 0), 0x7F800000))
    if ROWS:
        _code(x.to(tl.float32), M, K, m0, k0, row_codes_ptr, row_scale_ptr, row_given_ptr, seed, step_ptr, layer, row_tensor,
              TM, TK, FORMAT, SPAN, COMPAT, POW2, HARD, ROW_NOISE)  # fmt: skip
    if COLS:
        if HADAMARD:
            turned = _turned(x, sign_ptr, TM, TK)
            # the transform fills the padding of the last 16
            M = (M + 15) // 16 * 16
        else:
            turned = tl.trans(x).to(tl.float32)
        _code(turned, K, M, k0, m0, col_codes_ptr, col_scale_ptr, col_given_ptr, col_seed, col_step_ptr, col_layer,
              col_tensor, TK, TM, FORMAT, SPAN, COMPAT, POW2, HARD, COL_NOISE)  # fmt: skip


def quantize_both(x: torch.Tensor, kind: str, rows: bool, cols: bool, compat: str, power_of_two: bool | None,
                  scale: torch.Tensor | None, hadamard: bool, row_noise: Noise | None, col_noise: Noise | None,
                  seen: torch.Tensor | None = None) -> tuple[Coded | None, Coded | None]:  # fmt: skip
    """As `karui.kernels.train_quantize.quantize_both`."""
    M, K = x.shape
    form = kind.split("-")[0]
    span = _SPANS[{"nvfp4-16x16": "128x128"}.get(kind) or (kind.split("-")[1] if form[0] == "e" else "1x128")]
    pow2 = power_of_two if power_of_two is not None else compat == "te" and "128" in kind
    # tiles of 128 carry scales of 128; the others fit more programs on a small matrix
    TM, TK = (128, 128) if form[0] == "e" and span >= 2 else (64, 64)
    grid = (triton.cdiv(M, TM), triton.cdiv(K, TK))
    signs = _signs(x.device) if hadamard else x
    row_given = col_given = x
    if form == "nvfp4" or (form[0] == "e" and span <= 1 and scale is None):
        found = torch.zeros(2 + M + K, dtype=torch.int32, device=x.device)
        parts = found[0:1], found[1:2], found[2 : 2 + M], found[2 + M :]
        by_row = form[0] == "e" and span == 1
        _amax[grid](x, signs, *parts, M, K, x.stride(0), x.stride(1), TENSOR=not by_row, TURNED=hadamard, ROWS=by_row and rows,
                    COLS=by_row and cols, TM=TM, TK=TK)  # fmt: skip
        row_given, col_given = (parts[2], parts[3]) if by_row else (parts[0], parts[1] if hadamard else parts[0])
    one = _empty(x, (M, K), kind) if rows else None
    other = _empty(x, (K, triton.cdiv(M, 16) * 16 if hadamard else M), kind) if cols else None
    if form[0] == "e" and span <= 1:
        row_given, col_given = _given_scales(row_given, col_given, scale, kind, compat, pow2, one, other)
    elif form == "nvfp4":
        for coded, amax in ((one, row_given), (other, col_given)):
            if coded is not None:
                _global_scale(amax, coded)
    outs = [t for coded, given in ((one, row_given), (other, col_given))
            for t in ((_bytes(coded.codes), _bytes(coded.scale), given) if coded is not None else (x, x, x))]  # fmt: skip
    row_key, col_key = _key(row_noise, x), _key(col_noise, x)
    _both[grid](x, signs, *outs, x if seen is None else seen.view(torch.int32), M, K, *x.stride(), *row_key, *col_key,
                FORMAT=_FORMATS[form], SPAN=span, COMPAT=_COMPATS[compat], POW2=pow2, ROWS=rows, COLS=cols, HADAMARD=hadamard,
                ROW_NOISE=row_noise is not None, COL_NOISE=col_noise is not None, SEEN=seen is not None,
                HARD=x.is_cuda and capability(x.device) >= 89, TM=TM, TK=TK,
                num_warps=8 if TM == 128 else 4)  # fmt: skip
    return one, other


def _empty(x: torch.Tensor, shape: tuple[int, int], kind: str) -> Coded:
    """Room for the codes and scales of a matrix of `shape`."""
    tile = tile_of(kind, shape)
    counts = (triton.cdiv(shape[0], tile[0]), triton.cdiv(shape[1], tile[1]))
    form = kind.split("-")[0]
    if form in ("mxfp4", "nvfp4"):
        codes = torch.empty(shape[0], counts[1] * tile[1] // 2, dtype=torch.uint8, device=x.device)
    else:
        codes = torch.empty(shape, dtype=torch.float8_e5m2 if form == "e5m2" else torch.float8_e4m3fn, device=x.device)
    dtype = {"e": torch.float32, "m": torch.uint8, "n": torch.float8_e4m3fn}[form[0]]
    overall = torch.empty(1, dtype=torch.float32, device=x.device) if form == "nvfp4" else None
    return Coded(codes, torch.empty(counts, dtype=dtype, device=x.device), tile, shape, overall)


@triton.jit
def _given(amax_ptr, encode_ptr, decode_ptr, size, MAX: tl.constexpr, COMPAT: tl.constexpr, POW2: tl.constexpr,
           GIVEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if GIVEN:
        encode = tl.load(amax_ptr + at, at < size, 1.0)
        decode = tl.div_rn(1.0, encode)
    else:
        encode, decode = _float8_scales(tl.load(amax_ptr + at, at < size, 0).to(tl.float32, bitcast=True), MAX, COMPAT, POW2)
    tl.store(encode_ptr + at, encode, at < size)
    tl.store(decode_ptr + at, decode, at < size)


def _given_scales(row_amax: torch.Tensor, col_amax: torch.Tensor, scale: torch.Tensor | None, kind: str, compat: str, pow2: bool,
                  one: Coded | None, other: Coded | None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Encode scales for rows and columns; the decode scales go into the results."""
    made = []
    for coded, amax in ((one, row_amax), (other, col_amax)):
        source = amax if scale is None else scale.reshape(-1).float()
        encode = torch.empty(source.numel(), dtype=torch.float32, device=source.device)
        if coded is not None:
            _given[(triton.cdiv(encode.numel(), 256),)](source, encode, coded.scale, encode.numel(),
                                                        MAX=448.0 if kind[:4] == "e4m3" else 57344.0, COMPAT=_COMPATS[compat],
                                                        POW2=pow2, GIVEN=scale is not None, BLOCK=256)  # fmt: skip
        made.append(encode)
    return made[0], made[1]


@triton.jit
def _global(amax_ptr, out_ptr):
    whole = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    enc = tl.minimum(tl.div_rn(2688.0, whole), 3.4028234663852886e38)
    tl.store(out_ptr, tl.where((whole > 0) & (whole < float("inf")), enc, 1.0))


def _global_scale(amax: torch.Tensor, coded: Coded) -> None:
    _global[(1,)](amax, coded.global_scale)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.element_size() == 1 else t


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    """The transform's signs with its factor 1/4."""
    return torch.tensor(SIGNS, dtype=torch.float32, device=device) / 4


def _key(noise: Noise | None, x: torch.Tensor) -> tuple[Any, ...]:
    if noise is None:
        return 0, x, 0, 0
    step = noise.step if isinstance(noise.step, torch.Tensor) else torch.tensor([noise.step], dtype=torch.int64)
    return noise.seed, step.reshape(1).to(x.device), noise.layer, noise.tensor


def offline_cases() -> list[Case]:
    signature = {"x_ptr": "*bf16", "sign_ptr": "*fp32", "row_codes_ptr": "*u8", "row_scale_ptr": "*u8", "row_given_ptr": "*i32",
                 "col_codes_ptr": "*u8", "col_scale_ptr": "*u8", "col_given_ptr": "*i32", "seen_ptr": "*i32", "M": "i32",
                 "K": "i32", "stride_m": "i32",
                 "seed": "i64", "step_ptr": "*i64", "layer": "i32", "row_tensor": "i32", "col_seed": "i64",
                 "col_step_ptr": "*i64", "col_layer": "i32", "col_tensor": "i32"}  # fmt: skip
    odd = ("seed", "layer", "row_tensor", "col_seed", "col_layer", "col_tensor")
    cases = []
    for kind, form, span, tile in [("e4m3-tensor", 0, 0, 64), ("e4m3-row", 0, 1, 64), ("e4m3-1x128", 0, 2, 128),
                                   ("e4m3-128x128", 0, 3, 128), ("mxfp8", 2, 2, 64), ("mxfp4", 3, 2, 64), ("nvfp4", 4, 2, 64),
                                   ("nvfp4-16x16", 4, 3, 64)]:  # fmt: skip
        given = "*fp32" if form <= 1 else "*i32"
        types = {**signature, "row_given_ptr": given, "col_given_ptr": given}
        if form <= 1:
            types |= {"row_scale_ptr": "*fp32", "col_scale_ptr": "*fp32"}
        special = kind in ("nvfp4", "mxfp4")
        constants = {"FORMAT": form, "SPAN": span, "COMPAT": 0, "POW2": "128" in kind, "ROWS": True, "COLS": True,
                     "HADAMARD": special, "ROW_NOISE": special, "COL_NOISE": special, "SEEN": form > 1 or span > 0,
                     "TM": tile, "TK": tile, "stride_k": 1}  # fmt: skip
        own = {cc: r"cvt\.rn\.satfinite\.e4m3x2\.f32" for cc in (90, 100, 120)}
        ways = ((" by the chip", True, own), ("", False, {80: WIDE_LOADS[80]})) if form <= 2 else (("", False, WIDE_LOADS),)
        for name, hard, expects in ways:
            cases.append(Case(f"train_quantize {kind}{name}", _both, types, constants | {"HARD": hard}, expects,
                              num_warps=8 if tile == 128 else 4, odd=odd, quick=(90,) if kind in ("e4m3-1x128", "nvfp4") else (),
                              reads=4 * tile * tile if kind == "e4m3-1x128" else 0,  # and writes
                              on="each" if kind in ("e4m3-1x128", "mxfp8", "mxfp4", "nvfp4") else "asked"))  # fmt: skip
    amax = {k: signature[k] for k in ("x_ptr", "sign_ptr", "M", "K", "stride_m")}
    amax |= {"tensor_ptr": "*i32", "turned_ptr": "*i32", "row_ptr": "*i32", "col_ptr": "*i32"}
    cases.append(Case("train_quantize amax", _amax, amax, {"TENSOR": True, "TURNED": True, "ROWS": True, "COLS": True, "TM": 64,
                      "TK": 64, "stride_k": 1}, {cc: r"(atom|red)\.global[._a-z]*max" for cc in WIDE_LOADS},
                      quick=(90,)))  # fmt: skip
    scales = {"amax_ptr": "*i32", "encode_ptr": "*fp32", "decode_ptr": "*fp32", "size": "i32"}
    cases.append(Case("train_quantize scales", _given, scales,
                      {"MAX": 448.0, "COMPAT": 0, "POW2": False, "GIVEN": False, "BLOCK": 256},
                      {cc: r"div\.rn\.f32" for cc in WIDE_LOADS}, odd=("size",), quick=(), on="one"))  # fmt: skip
    cases.append(Case("train_quantize global scale", _global, {"amax_ptr": "*i32", "out_ptr": "*fp32"}, {},
                      {cc: r"div\.rn\.f32" for cc in WIDE_LOADS}, quick=(), on="one"))  # fmt: skip
    return cases
