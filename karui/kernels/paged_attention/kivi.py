"""KIVI caches on a GPU (arXiv 2402.02750): coding a block, and attention over codes and over a row's own block in fp16.

    enter(qkv, ...)              as `paged_attention.enter`, into pages in fp16; blocks whose last row comes are coded
    kivi_attention(q, ...)       decoding, chains of drafts, prefill: one kernel

What a query sees, the layout and the codes are those of `karui.inference.cache.kivi`, which is the reference: the tokens of its
own block in fp16, all blocks before as codes. So a tile of rows lies within one block, and its pages are one page.

Words of four codes are read: of keys four tokens of a channel, whose scores are a product for each place, of values four
dimensions of a token, as for int4 caches. Decoded in fp32: code * step + min.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.paged_attention import Cache, KiviCache, Plan
from karui.kernels.paged_attention.triton import LOG2E, coded, merge_parts, nibble, num_parts, spread
from karui.kernels.paged_attention.triton import enter as enter_plain
from karui.kernels.triton_support.offline import WIDE_LOADS, Case
from karui.kernels.triton_support.products import dot


@triton.jit
def _code(key_pages_ptr, value_pages_ptr, slots_ptr, rows_ptr, keys_ptr, keys16_ptr, values_ptr, values16_ptr, page_slot,
          page_head, key_block, key_head, key_dim, value_slot, value_head, BLOCK: tl.constexpr, BITS: tl.constexpr,
          Q: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr):  # fmt: skip
    """Program (row, head): if the row is its block's last one, the codes of the block; strides in bytes, of pages in values."""
    t, g = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if (slot >= 0) & (slot % BLOCK == BLOCK - 1):
        block, page = slot // BLOCK, tl.load(rows_ptr + t).to(tl.int64) // BLOCK
        EACH: tl.constexpr = 8 // BITS
        d, i, b = tl.arange(0, DP), tl.arange(0, 32), tl.arange(0, 32 // EACH)
        r = tl.arange(0, 32 * GP)  # token and group of its dimensions
        token, group = r // GP, r % GP
        n, c = tl.arange(0, Q), tl.arange(0, Q // EACH)
        for unit in range(BLOCK // 32):
            first = (page * BLOCK + unit * 32) * page_slot + g * page_head
            x = tl.load(key_pages_ptr + first + i[None, :] * page_slot + d[:, None], (d < D)[:, None], 0.0).to(tl.float32)
            code, step, low = coded(x, BITS)
            at = block * key_block + g * key_head + d * key_dim
            tl.store(keys_ptr + at[:, None] + unit * (32 // EACH) + b[None, :], code, (d < D)[:, None])
            to = keys16_ptr + (at + BLOCK // EACH) // 2 + unit
            tl.store(to, step, d < D)
            tl.store(to + BLOCK // 32, low, d < D)
            inside = group < D // Q
            x = tl.load(value_pages_ptr + first + token[:, None] * page_slot + (group * Q)[:, None] + n[None, :], inside[:, None],
                        0.0).to(tl.float32)  # fmt: skip
            code, step, low = coded(x, BITS)
            at = (block * BLOCK + unit * 32 + token) * value_slot + g * value_head
            tl.store(values_ptr + (at + group * (Q // EACH))[:, None] + c[None, :], code, inside[:, None])
            to = values16_ptr + (at + D // EACH) // 2 + group
            tl.store(to, step, inside)
            tl.store(to + D // Q, low, inside)


@triton.jit
def _soften(scores, seen, top, total):
    """(weights, factor on what was summed before, largest score, sum of weights)."""
    scores = tl.where(seen, scores, float("-inf"))
    bigger = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(bigger == float("-inf"), 0.0, bigger)
    p, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    return p, shrink, bigger, total * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["T", "table_stride", "window", "rows", "tiles", "parts"])
def _attend(q_ptr, keys_ptr, keys16_ptr, values_ptr, values16_ptr, key_pages_ptr, value_pages_ptr, page_rows_ptr, starts_ptr,
            contexts_ptr, tables_ptr, out_ptr, top_ptr, sum_ptr, T, q_token, q_head, page_slot, page_head, table_stride, factor,
            window, rows, tiles, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BITS: tl.constexpr,
            Q: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Program (sequence and tile, key head, part): the tile is `rows` positions of a block, those that the step has. Words of
    codes are int16 of 4 bits, uint8 of 2. The last part has the rows' own block. BN divides a block."""
    WIDE: tl.constexpr = 4 // BITS  # words in a step or a min
    KV: tl.constexpr = HEADS // GROUP
    KEY: tl.constexpr = BLOCK // 4 + BLOCK // 32 * 2 * WIDE  # words of a channel of a block, and of a token's values
    VALUE: tl.constexpr = D // 4 + D // Q * 2 * WIDE
    s, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    g, part = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + s)
    context = tl.load(contexts_ptr + s)
    before = context - (tl.load(starts_ptr + s + 1) - start)
    each_block = tl.cdiv(BLOCK, rows)
    own = (before // BLOCK + tile // each_block) * BLOCK
    first = tl.maximum(before, own + tile % each_block * rows)
    stop = tl.minimum(context, tl.minimum(own + (tile % each_block + 1) * rows, own + BLOCK))
    if first < stop:
        r, n, w, unit = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BN // 4), tl.arange(0, BN // 32)
        d, e, group = tl.arange(0, DP), tl.arange(0, DP // 4), tl.arange(0, DP // Q)
        i = first + r // GROUP
        real = i < stop
        head = g * GROUP + r % GROUP
        row = (start + i - before).to(tl.int64)
        mask = real[:, None] & (d[None, :] < D)
        q = tl.load(q_ptr + row[:, None] * q_token + head[:, None] * q_head + d[None, :], mask, 0.0)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP // 4], tl.float32)
        acc1, acc2, acc3 = acc, acc, acc
        begin, oldest = 0, 0
        if WINDOW:
            oldest = tl.maximum(first - window + 1, 0)
            begin = tl.minimum(oldest // BN * BN, own)
        each = tl.cdiv(tl.cdiv(own - begin, BN), parts) * BN
        begin += part * each
        for at in range(begin, tl.minimum(begin + each, own), BN):
            block = tl.load(tables_ptr + s * table_stride + at // BLOCK).to(tl.int64)
            channel = ((block * KV + g) * D + d) * KEY
            words = tl.load(keys_ptr + channel[:, None] + at % BLOCK // 4 + w[None, :], (d < D)[:, None], 0).to(tl.int32)
            near = (keys16_ptr + (channel + BLOCK // 4) // WIDE)[:, None] + at % BLOCK // 32 + unit[None, :]
            step = spread(tl.load(near, (d < D)[:, None], 0.0).to(tl.float32), 8)
            low = spread(tl.load(near + BLOCK // 32, (d < D)[:, None], 0.0).to(tl.float32), 8)
            none = tl.zeros([BM, BN // 4], tl.float32)
            scores = tl.join(tl.join(dot(q, nibble(words, 0, BITS, step, low, q), none, "tf32x3"),
                                     dot(q, nibble(words, 2, BITS, step, low, q), none, "tf32x3")),
                             tl.join(dot(q, nibble(words, 1, BITS, step, low, q), none, "tf32x3"),
                                     dot(q, nibble(words, 3, BITS, step, low, q), none, "tf32x3")))  # fmt: skip
            seen = (i >= 0)[:, None] & (n >= 0)[None, :]
            if WINDOW:
                seen = (at + n)[None, :] > i[:, None] - window
            p, shrink, top, total = _soften(scores.reshape([BM, BN]) * factor, seen, top, total)
            p = p.to(q.dtype)
            line = ((block * BLOCK + at % BLOCK + n) * KV + g) * VALUE
            words = tl.load(values_ptr + line[:, None] + e[None, :], (e < D // 4)[None, :], 0).to(tl.int32)
            near = (values16_ptr + (line + D // 4) // WIDE)[:, None] + group[None, :]
            step = spread(tl.load(near, (group < D // Q)[None, :], 0.0).to(tl.float32), Q // 4)
            low = spread(tl.load(near + D // Q, (group < D // Q)[None, :], 0.0).to(tl.float32), Q // 4)
            acc = dot(p, nibble(words, 0, BITS, step, low, q), acc * shrink[:, None], "tf32x3")
            acc1 = dot(p, nibble(words, 1, BITS, step, low, q), acc1 * shrink[:, None], "tf32x3")
            acc2 = dot(p, nibble(words, 2, BITS, step, low, q), acc2 * shrink[:, None], "tf32x3")
            acc3 = dot(p, nibble(words, 3, BITS, step, low, q), acc3 * shrink[:, None], "tf32x3")
        if part == parts - 1:
            # a row of padding has none, and nothing is made of what it sees
            page = tl.maximum(tl.load(page_rows_ptr + start + first - before), 0).to(tl.int64) // BLOCK * BLOCK
            begin = tl.maximum(own, oldest)
            for at in range(begin, stop, BN):
                j = at + n
                line = ((page + j - own) * page_slot + g * page_head)[:, None]
                k = tl.load(key_pages_ptr + line + d[None, :], (j < stop)[:, None] & (d < D)[None, :], 0.0).to(q.dtype)
                scores = dot(q, k.T, tl.zeros([BM, BN], tl.float32), "tf32x3") * factor
                seen = (j[None, :] <= i[:, None]) & (j < stop)[None, :]
                if WINDOW:
                    seen = seen & (j[None, :] > i[:, None] - window)
                p, shrink, top, total = _soften(scores, seen, top, total)
                p = p.to(q.dtype)
                v = value_pages_ptr + line + 4 * e[None, :]
                inside = (j < stop)[:, None] & (e < D // 4)[None, :]
                acc = dot(p, tl.load(v, inside, 0.0).to(q.dtype), acc * shrink[:, None], "tf32x3")
                acc1 = dot(p, tl.load(v + 1, inside, 0.0).to(q.dtype), acc1 * shrink[:, None], "tf32x3")
                acc2 = dot(p, tl.load(v + 2, inside, 0.0).to(q.dtype), acc2 * shrink[:, None], "tf32x3")
                acc3 = dot(p, tl.load(v + 3, inside, 0.0).to(q.dtype), acc3 * shrink[:, None], "tf32x3")
        acc = tl.join(tl.join(acc, acc2), tl.join(acc1, acc3)).reshape([BM, DP])  # dimension 4 e + place
        if not SPLIT:
            out = out_ptr + (row[:, None] * HEADS + head[:, None]) * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)
        else:
            to = (part.to(tl.int64) * T + row) * HEADS + head
            tl.store(out_ptr + to[:, None] * D + d[None, :], acc, mask)
            tl.store(top_ptr + to, top, real)
            tl.store(sum_ptr + to, total, real)


def enter(qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor,
          cache: KiviCache, norms: tuple[torch.Tensor, ...] | None = None, eps: float = 0.0) -> torch.Tensor:  # fmt: skip
    """As `paged_attention.enter`: q of a step's qkv; keys and values go to `rows` [T] of the pages, and blocks of which `slots`
    [T] has the last one are coded. Rows and slots below 0 are skipped."""
    q = enter_plain(qkv, heads, cos, sin, rows, Cache(cache.key_pages, cache.value_pages), norms, eps)
    heads, width, group = cache.keys.shape[1], cache.keys.shape[2], cache.group
    wide, groups = triton.next_power_of_2(width), triton.next_power_of_2(width // group)
    if len(slots):
        keys, values, pages = cache.keys, cache.values, cache.key_pages
        _code[(len(slots), heads)](
            pages, cache.value_pages, slots, rows, keys, keys.view(torch.float16), values, values.view(torch.float16),
            pages.stride(0), pages.stride(1), *keys.stride()[:3], *values.stride()[:2], BLOCK=cache.block_size, BITS=cache.bits,
            Q=group, D=width, DP=wide, GP=groups, num_warps=4)  # fmt: skip
    return q


def kivi_attention(q: torch.Tensor, cache: KiviCache, plan: Plan, page_rows: torch.Tensor, scaling: float,
                   window: int | None = None, parts: int | None = None) -> torch.Tensor:  # fmt: skip
    """As `paged_attention`, without trees. page_rows: [T] where the rows' own keys lie in the pages."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    kv_heads, block = cache.keys.shape[1], cache.block_size
    group, padded = heads // kv_heads, max(64, triton.next_power_of_2(width))
    single = q.dtype == torch.float32
    # few rows: products of 16 columns, a quarter of a step's keys, which more than one warp would share by doing it all
    most = 64 if padded * (4 if single else 2) <= 256 else 32 if not single else 16
    rows = block if min(plan.max_rows, block) * group <= most else max(1, min(most // group, block))
    bm = max(16, triton.next_power_of_2(min(plan.max_rows, rows) * group))
    sequences = plan.contexts.shape[0]
    tiles = ((plan.max_rows + block - 2) // block + 1) * triton.cdiv(block, rows)
    warps = 1 if bm <= 16 else 4
    parts = parts or num_parts(sequences, tiles, kv_heads, plan.block_tables.shape[1] * block, q.device, warps)
    partial = torch.empty(parts, tokens, heads, width, device=q.device) if parts > 1 else out
    top, total = (torch.empty(parts, tokens, heads, device=q.device) if parts > 1 else partial for _ in range(2))
    kind = torch.int16 if cache.bits == 4 else torch.uint8
    keys, values, pages = cache.keys.view(kind), cache.values.view(kind), cache.key_pages
    assert keys.is_contiguous() and values.is_contiguous(), "the kernel knows how codes lie"
    _attend[(sequences * tiles, kv_heads, parts)](
        q, keys, cache.keys.view(torch.float16), values, cache.values.view(torch.float16), pages, cache.value_pages, page_rows,
        plan.query_starts, plan.contexts, plan.block_tables, partial, top, total, tokens, q.stride(0), q.stride(1),
        pages.stride(0), pages.stride(1), plan.block_tables.stride(0),
        scaling * LOG2E, window or 0, rows, tiles, parts, BLOCK=block, GROUP=group, HEADS=heads, BITS=cache.bits, Q=cache.group,
        WINDOW=window is not None, SPLIT=parts > 1, D=width, DP=padded, BM=bm, BN=64 if block % 64 == 0 else 32,
        num_warps=warps, num_stages=2)  # fmt: skip
    if parts > 1:
        merge_parts(partial, top, total, out)
    return out


def offline_cases() -> list[Case]:
    bf16 = {80: r"mma\.sync[.a-z0-9]*bf16", 89: r"mma\.sync[.a-z0-9]*bf16", 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*bf16",
            100: r"(tcgen05\.mma|mma\.sync)", 120: r"mma\.sync[.a-z0-9]*bf16"}  # fmt: skip
    odd = ("T", "table_stride", "window", "rows", "tiles", "parts", "key_dim", "key_head", "key_block", "value_slot",
           "value_head")  # fmt: skip
    halves = ("keys16_ptr", "values16_ptr", "key_pages_ptr", "value_pages_ptr")
    cases = []
    for name, bits, width, group, bm, split, window in (
        ("decode 4 bits", 4, 128, 4, 16, True, False), ("decode 2 bits", 2, 128, 4, 16, True, True),
        ("prefill 4 bits", 4, 128, 4, 64, False, False), ("prefill 2 bits, heads of 64", 2, 64, 3, 64, False, False),
        ("prefill 4 bits, heads of 256", 4, 256, 4, 32, False, False),
    ):  # fmt: skip
        word = "*i16" if bits == 4 else "*u8"
        types = {"q_ptr": "*bf16", "keys_ptr": word, "values_ptr": word, "out_ptr": "*fp32" if split else "*bf16",
                 "top_ptr": "*fp32", "sum_ptr": "*fp32", "factor": "fp32", **dict.fromkeys(halves, "*fp16"),
                 **{f"{n}_ptr": "*i32" for n in ("page_rows", "starts", "contexts", "tables")}}  # fmt: skip
        types = {n: types.get(n, "i32") for n in _attend.arg_names if n.islower() or n == "T"}
        constants = {"BLOCK": 64, "GROUP": group, "HEADS": 8 * group, "BITS": bits, "Q": 32, "WINDOW": window, "SPLIT": split,
                     "D": width, "DP": width, "BM": bm, "BN": 64}  # fmt: skip
        cases.append(Case(f"kivi {name}", _attend, types, constants, bf16, 1 if bm <= 16 else 4, 2, odd,
                          (90,) if name == "decode 4 bits" else ()))
        if split:
            kinds = {"slots_ptr": "*i32", "rows_ptr": "*i32", "keys_ptr": "*u8", "values_ptr": "*u8"}
            types = {n: kinds.get(n, "*fp16" if n.endswith("ptr") else "i32") for n in _code.arg_names if n.islower()}
            constants = {"BLOCK": 64, "BITS": bits, "Q": 32, "D": width, "DP": width, "GP": width // 32}
            cases.append(Case(f"kivi code {bits} bits", _code, types, constants, {cc: r"st\.global" for cc in WIDE_LOADS}, 4, 3,
                              odd, ()))  # fmt: skip
    return cases
