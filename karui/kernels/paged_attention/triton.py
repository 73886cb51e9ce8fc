"""Paged attention and the cache's writer.

A program holds a tile of (rows x heads of one key head) of one sequence and walks a part of its keys,
a block table look-up per key;

ith several parts `_merge` adds their softmaxes (Flash-Decoding). The number of parts depends on the shapes of the step alone,
not on
contexts, so a CUDA graph replays it with any contexts.

int8 and fp8 keys are multiplied as codes; their scales, one per token and head, go onto the columns of the scores,
the values' onto
the probabilities. fp8 codes are decoded in integers, which works on every GPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from karui.kernels.paged_attention import Cache, Plan
from karui.kernels.triton_support import num_processors
from karui.kernels.triton_support.codecs import decode_e4m3, encode_e4m3
from karui.kernels.triton_support.offline import WIDE_LOADS, Case
from karui.kernels.triton_support.products import dot

_LOG2E = math.log2(math.e)


@triton.jit
def _write(k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, k_token, k_head, v_token, v_head, G,
           slot_stride, head_stride, scale_slot, KIND: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """KIND 0: a plain dtype, 1: int8, 2: E4M3 (as bytes)."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, DP)
        k = tl.load(k_ptr + t * k_token + g * k_head + d, d < D, 0.0).to(tl.float32)
        v = tl.load(v_ptr + t * v_token + g * v_head + d, d < D, 0.0).to(tl.float32)
        at = slot * slot_stride + g * head_stride + d
        if KIND == 0:
            tl.store(keys_ptr + at, k.to(keys_ptr.dtype.element_ty), d < D)
            tl.store(values_ptr + at, v.to(values_ptr.dtype.element_ty), d < D)
        else:
            top: tl.constexpr = 127.0 if KIND == 1 else 448.0
            k_scale = tl.div_rn(tl.maximum(tl.max(tl.abs(k)), 1e-12), top)
            v_scale = tl.div_rn(tl.maximum(tl.max(tl.abs(v)), 1e-12), top)
            tl.store(key_scale_ptr + slot * scale_slot + g, k_scale)
            tl.store(value_scale_ptr + slot * scale_slot + g, v_scale)
            k, v = tl.div_rn(k, k_scale), tl.div_rn(v, v_scale)
            if KIND == 1:
                # adding 1.5 * 2^23 leaves the nearest whole number, ties to even
                tl.store(keys_ptr + at, ((k + 12582912.0) - 12582912.0).to(tl.int8), d < D)
                tl.store(values_ptr + at, ((v + 12582912.0) - 12582912.0).to(tl.int8), d < D)
            else:
                tl.store(keys_ptr + at, encode_e4m3(k).to(tl.uint8), d < D)
                tl.store(values_ptr + at, encode_e4m3(v).to(tl.uint8), d < D)


@triton.jit
def _operand(x, KIND: tl.constexpr, like):
    """Codes or values as something a product with `like` takes; exact."""
    if KIND == 2:
        return decode_e4m3(x.to(tl.int32)).to(like.dtype)
    return x.to(like.dtype)


@triton.jit
def _attend(q_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, starts_ptr, contexts_ptr, tables_ptr, tree_ptr,
            positions_ptr,
            out_ptr, top_ptr, sum_ptr, T, q_token, q_head, slot_stride, head_stride, scale_slot, table_stride, factor, window,
            tiles, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr,
            TREE: tl.constexpr,
            WINDOW: tl.constexpr, POSITIONS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Program (sequence and tile of ROWS rows, key head, part); tile row r is row r // GROUP of the tile, head r % GROUP."""
    s, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    g, part = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + s)
    num_rows = tl.load(starts_ptr + s + 1) - start
    first = tile * ROWS
    if first < num_rows:
        context = tl.load(contexts_ptr + s)
        before = context - num_rows
        r, d = tl.arange(0, BM), tl.arange(0, DP)
        i = first + r // GROUP
        real = (i < num_rows) & (r < ROWS * GROUP)
        head = g * GROUP + r % GROUP
        row = (start + i).to(tl.int64)
        mask = real[:, None] & (d[None, :] < D)
        q = tl.load(q_ptr + row[:, None] * q_token + head[:, None] * q_head + d[None, :], mask, 0.0)
        word = i * 0
        if TREE:
            word = tl.load(tree_ptr + row, real, 0)
        place = before + i
        if POSITIONS:
            place = tl.load(positions_ptr + row, real, 0)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        # keys up to the last that any row of the tile sees, in equal parts of whole tiles
        end = context if TREE else tl.minimum(before + first + ROWS, context)
        each = tl.cdiv(tl.cdiv(end, BN), PARTS) * BN
        begin = part * each
        if WINDOW:
            begin = tl.maximum(begin, tl.maximum(before + first - window + 1, 0) // BN * BN)
            if POSITIONS:
                begin = part * each
        for at in range(begin, tl.minimum((part + 1) * each, end), BN):
            j = at + tl.arange(0, BN)
            block = tl.load(tables_ptr + s * table_stride + j // BLOCK, j < end, 0).to(tl.int64)
            slot = block * BLOCK + j % BLOCK
            where = slot[:, None] * slot_stride + g * head_stride + d[None, :]
            inside = (j[:, None] < end) & (d[None, :] < D)
            k = _operand(tl.load(keys_ptr + where, inside, 0), KIND, q)
            scores = dot(q, k.T, tl.zeros([BM, BN], tl.float32)) * factor
            if KIND != 0:
                scores *= tl.load(key_scale_ptr + slot * scale_slot + g, j < end, 0.0)[None, :]
            own = j[None, :] - before
            if TREE:
                bit = (word[:, None] >> tl.minimum(tl.maximum(own, 0), 31)) & 1
                seen = tl.where(word[:, None] == 0, own <= i[:, None], (own < 0) | (bit == 1))
            else:
                seen = own <= i[:, None]
            seen = seen & (j[None, :] < end)
            if WINDOW:
                key_place = j
                if POSITIONS:
                    key_place = tl.where(j < before, j, tl.load(positions_ptr + start + j - before, (j >= before) & (j < end), 0))
                seen = seen & (key_place[None, :] > place[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            bigger = tl.maximum(top, tl.max(scores, 1))
            # a part or a window can begin with keys that a row does not see: -inf minus -inf would be NaN
            base = tl.where(bigger == float("-inf"), 0.0, bigger)
            p = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            if KIND != 0:
                p *= tl.load(value_scale_ptr + slot * scale_slot + g, j < end, 0.0)[None, :]
            v = _operand(tl.load(values_ptr + where, inside, 0), KIND, q)
            acc = dot(p.to(v.dtype), v, acc * shrink[:, None])
            top = bigger
        if PARTS == 1:
            out = out_ptr + (row[:, None] * HEADS + head[:, None]) * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)
        else:
            at = (part.to(tl.int64) * T + row) * HEADS + head
            tl.store(out_ptr + at[:, None] * D + d[None, :], acc, mask)
            tl.store(top_ptr + at, top, real)
            tl.store(sum_ptr + at, total, real)


@triton.jit
def _merge(part_ptr, top_ptr, sum_ptr, out_ptr, size, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Program per (row, head): the parts' accumulators, each scaled to the largest maximum."""
    at = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    top = tl.load(top_ptr + at)
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(top_ptr + part * size + at))
    total = 0.0
    acc = tl.zeros([DP], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp2(tl.load(top_ptr + part * size + at) - top)
        total += weight * tl.load(sum_ptr + part * size + at)
        acc += weight * tl.load(part_ptr + (part * size + at) * D + d, d < D, 0.0)
    tl.store(out_ptr + at * D + d, (acc / total).to(out_ptr.dtype.element_ty), d < D)


_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def write_kv(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: Cache) -> None:
    """As `karui.kernels.paged_attention.write_kv`."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tokens, heads, width = k.shape
    keys, values = _bytes(cache.keys), _bytes(cache.values)
    key_scale, value_scale = (keys, values) if cache.key_scale is None else (cache.key_scale, cache.value_scale)
    assert value_scale is not None
    if tokens:
        _write[(tokens, heads)](k, v, slots, keys, values, key_scale, value_scale, k.stride(0), k.stride(1), v.stride(0),
                                v.stride(1),
                                heads, keys.stride(0), keys.stride(1), key_scale.stride(0), KIND=_KINDS.get(cache.keys.dtype, 0),
                                D=width, DP=triton.next_power_of_2(width), num_warps=1)  # fmt: skip


def num_parts(sequences: int, tiles: int, kv_heads: int, max_context: int, device: torch.device) -> int:
    """Into how many parts keys are split: enough programs for two per multiprocessor, parts of 256 keys or more, at most 32."""
    programs = sequences * tiles * kv_heads
    return max(1, min(2 * num_processors(device) // programs, max_context // 256, 32))


def paged_attention(q: torch.Tensor, cache: Cache, plan: Plan, scaling: float, window: int | None,
                    parts: int | None = None) -> torch.Tensor:  # fmt: skip
    """As `karui.kernels.paged_attention.paged_attention`; `parts` forces the split."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    kv_heads = cache.keys.shape[1]
    group = heads // kv_heads
    # few rows: one tile holds them all; many: tiles of 64 rows-times-heads
    rows = min(plan.max_rows, max(1, 64 // group)) if plan.max_rows * group > 128 else plan.max_rows
    bm = max(16, triton.next_power_of_2(rows * group))
    sequences, tiles = plan.contexts.shape[0], triton.cdiv(plan.max_rows, rows)
    reach = plan.block_tables.shape[1] * plan.block_size
    parts = parts or num_parts(sequences, tiles, kv_heads, reach, q.device)
    partial = torch.empty(parts, tokens, heads, width, device=q.device) if parts > 1 else out
    extra = torch.empty(2, parts, tokens, heads, device=q.device) if parts > 1 else torch.empty(2, 1, device=q.device)
    keys, values = _bytes(cache.keys), _bytes(cache.values)
    key_scale, value_scale = (keys, values) if cache.key_scale is None else (cache.key_scale, cache.value_scale)
    bn = 16 if q.device.type != "cuda" else 64 if width <= 128 else 32
    _attend[(sequences * tiles, kv_heads, parts)](
        q, keys, values, key_scale, value_scale, plan.query_starts, plan.contexts, plan.block_tables,
        plan.query_starts if plan.tree is None else plan.tree,
        plan.query_starts if plan.positions is None else plan.positions, partial,
        extra[0], extra[1], tokens, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), key_scale.stride(0),
        plan.block_tables.stride(0), scaling * _LOG2E, window or 0, tiles, BLOCK=plan.block_size, ROWS=rows, GROUP=group,
        HEADS=heads, KIND=_KINDS.get(cache.keys.dtype, 0), TREE=plan.tree is not None, WINDOW=window is not None,
        POSITIONS=window is not None and plan.positions is not None, PARTS=parts, D=width, DP=triton.next_power_of_2(width),
        BM=bm, BN=bn, num_warps=4, num_stages=3 if width <= 128 else 2)  # fmt: skip
    if parts > 1:
        _merge[(tokens * heads,)](partial, extra[0], extra[1], out, tokens * heads, PARTS=parts, D=width,
                                  DP=triton.next_power_of_2(width), num_warps=1)  # fmt: skip
    return out


def offline_cases() -> list[Case]:
    bf16 = {80: r"mma\.sync[.a-z0-9]*bf16", 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*bf16", 100: r"(tcgen05\.mma|mma\.sync)",
            120: r"mma\.sync[.a-z0-9]*bf16"}  # fmt: skip
    names = ("T", "q_token", "q_head", "slot_stride", "head_stride", "scale_slot", "table_stride", "window", "tiles")
    base = {"q_ptr": "*bf16", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32", "out_ptr": "*fp32", "top_ptr": "*fp32",
            "sum_ptr": "*fp32", "factor": "fp32", **{f"{n}_ptr": "*i32" for n in ("starts", "contexts", "tables", "tree",
                                                                                  "positions")},
            **{n: "i32" for n in names}}  # fmt: skip
    cases = []
    for name, kind, dtype, rows, tree, parts in [("decode bf16", 0, "*bf16", 1, False, 8), ("decode int8", 1, "*i8", 1, False, 8),
                                                 ("decode fp8", 2, "*u8", 1, False, 8), ("verify 16 rows", 0, "*bf16", 16,
                                                                                         True, 8),
                                                 ("prefill", 0, "*bf16", 16, False, 1)]:  # fmt: skip
        types = base | {"keys_ptr": dtype, "values_ptr": dtype} | ({"out_ptr": "*bf16"} if parts == 1 else {})
        constants = {"BLOCK": 16, "ROWS": rows, "GROUP": 4, "HEADS": 32, "KIND": kind, "TREE": tree, "WINDOW": False,
                     "POSITIONS": False, "PARTS": parts, "D": 128, "DP": 128, "BM": max(16, 4 * rows), "BN": 64}  # fmt: skip
        cases.append(Case(f"paged_attention {name}", _attend, types, constants, bf16, 4, 3, ("T", "window", "tiles",
                                                                                             "scale_slot"),
                          (90,) if name in ("decode int8", "verify 16 rows") else ()))  # fmt: skip
    write = {"k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i32", "keys_ptr": "*u8", "values_ptr": "*u8",
             "key_scale_ptr": "*fp32",
             "value_scale_ptr": "*fp32", **{n: "i32" for n in ("k_token", "k_head", "v_token", "v_head", "G", "slot_stride",
                                                              "head_stride", "scale_slot")}}  # fmt: skip
    cases.append(Case("paged_attention write fp8", _write, write, {"KIND": 2, "D": 128, "DP": 128},
                      {cc: r"st\.global" for cc in WIDE_LOADS}, 1, 1, ("G", "scale_slot")))  # fmt: skip
    return cases
