"""KIVI caches on a GPU (arXiv 2402.02750): coding a block, and attention over codes and over a row's own block in fp16.

    enter(qkv, ...)              as `paged_attention.enter`, into pages in fp16; blocks whose last row comes are coded
    kivi_attention(q, ...)       decoding, chains of drafts, prefill: one kernel

What a query sees, the layout and the codes are those of `karui.inference.cache.kivi`, which is the reference: the tokens of its
own block in fp16, all blocks before as codes. So a tile of rows lies within one block, and its pages are one page.

Words of 16 bits are read, four codes of 4 bits or eight of 2: of keys so many tokens of a channel, whose scores are a product for
each place in the words, of values so many dimensions of a token. They are decoded as those of int4 caches (`triton.decoded`), and
where rows-times-heads are few, they are the tall operands as there: by count 24 bytes a cycle with 4 bits (12 when decoded in
fp32), 18 with 2 bits (6).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.paged_attention import Cache, KiviCache, Plan
from karui.kernels.paged_attention.triton import (
    LOG2E,
    along,
    coded,
    decoded,
    exp2,
    in_halves,
    largest,
    loaded,
    merge_parts,
    num_parts,
    power,
)
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
def _soften(scores, seen, top, total, rate, ROWS: tl.constexpr):
    """(weights 2^(rate * score), factor on what was summed before, largest score, sum of weights)."""
    scores = tl.where(seen, scores, float("-inf"))
    bigger = tl.maximum(top, tl.max(scores, 1 - ROWS))
    base = tl.where(bigger == float("-inf"), 0.0, bigger) * rate
    p, shrink = exp2(scores * along(rate, ROWS) - along(base, ROWS)), exp2(top * rate - base)
    return p, shrink, bigger, total * shrink + tl.sum(p, 1 - ROWS)


@triton.jit
def _product(rows, others, acc, ROWS: tl.constexpr):
    """acc + rows @ others of matrices [rows, .] and [., others], or turned [others, rows] with ROWS 1, of operands turned too."""
    if ROWS == 1:
        return dot(others, rows, acc, "tf32x3")
    else:
        return dot(rows, others, acc, "tf32x3")


@triton.jit
def _scores(q, keys, ROWS: tl.constexpr):
    """Products of q with each place's keys, the places side by side."""
    none = tl.zeros([keys[0].shape[0], q.shape[1]] if ROWS == 1 else [q.shape[0], keys[0].shape[1]], tl.float32)
    each = ()
    for place in tl.static_range(len(keys)):
        each = each + (_product(q, keys[place], none, ROWS),)  # type: ignore[assignment]
    return _joined(each, ROWS)


@triton.jit
def _weighed(sums, p, values, shrink, ROWS: tl.constexpr):
    """sums * shrink + p @ values, place by place."""
    new = ()
    for place in tl.static_range(len(sums)):
        new = new + (_product(p, values[place], sums[place] * along(shrink, ROWS), ROWS),)  # type: ignore[assignment]
    return new


@triton.jit
def _paired(x):
    """Eight matrices [8, C], two after the other as four of [16, C]."""
    new = ()
    for at in tl.static_range(0, 8, 2):
        new = new + (tl.join(x[at], x[at + 1]).permute(2, 0, 1).reshape([16, x[0].shape[1]]),)  # type: ignore[assignment]
    return new


@triton.jit
def _joined(x, ROWS: tl.constexpr):
    """Four or eight matrices [R, C] as [R, C * places], a column of each in turn; with ROWS 1 so for rows."""
    if len(x) == 4:
        y = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    else:
        y = tl.join(tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6])), tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7])))
    y = y.reshape([x[0].shape[0], x[0].shape[1], len(x)])
    if ROWS == 1:
        return y.permute(0, 2, 1).reshape([x[0].shape[0] * len(x), x[0].shape[1]])
    else:
        return y.reshape([x[0].shape[0], x[0].shape[1] * len(x)])


@triton.jit(do_not_specialize=["T", "table_stride", "window", "rows", "tiles", "parts"])
def _attend(q_ptr, keys_ptr, keys16_ptr, values_ptr, values16_ptr, key_pages_ptr, value_pages_ptr, page_rows_ptr, starts_ptr,
            contexts_ptr, tables_ptr, out_ptr, top_ptr, sum_ptr, T, q_token, q_head, page_slot, page_head, table_stride, factor,
            window, rows, tiles, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BITS: tl.constexpr,
            Q: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, TURNED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Program (sequence and tile, key head, part): the tile is `rows` positions of a block, those that the step has. Words are
    int16. The last part has the rows' own block. TURNED: scores lie as [keys, rows], sums as [dimensions, rows]."""
    PLACES: tl.constexpr = 16 // BITS
    ROWS: tl.constexpr = 1 if TURNED else 0
    PAIRS: tl.constexpr = TURNED and DP // PLACES == 8  # a product has 16 dimensions at least
    KV: tl.constexpr = HEADS // GROUP
    EACH: tl.constexpr = BLOCK // PLACES  # words of a channel's tokens in a block
    KEY: tl.constexpr = EACH + BLOCK // 32 * 2  # with its steps and mins
    VALUE: tl.constexpr = D // PLACES + D // Q * 2  # of a token's values
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
        r, n, w, unit = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BN // PLACES), tl.arange(0, BN // 32)
        d, e, group = tl.arange(0, DP), tl.arange(0, DP // PLACES), tl.arange(0, DP // Q)
        i = first + r // GROUP
        real = i < stop
        head = g * GROUP + r % GROUP
        row = (start + i - before).to(tl.int64)
        mask = real[:, None] & (d[None, :] < D)
        q = tl.load(q_ptr + row[:, None] * q_token + head[:, None] * q_head + d[None, :], mask, 0.0)
        rate = tl.zeros([BM], tl.float32) + factor
        if q.dtype != tl.float32:
            up, down = power(largest(q))
            q = in_halves(q, up)
            rate = factor * 2.0 * down  # of halves of keys
        half = 1.0 if q.dtype == tl.float32 else 0.5
        if TURNED:
            q = q.T
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        sums = ()
        for _ in tl.static_range(4 if PAIRS else PLACES):
            sums = sums + (tl.zeros([16 if PAIRS else DP // PLACES, BM] if TURNED else [BM, DP // PLACES], tl.float32),)  # type: ignore[assignment]
        begin, oldest = 0, 0
        if WINDOW:
            oldest = tl.maximum(first - window + 1, 0)
            begin = tl.minimum(oldest // BN * BN, own)
        each = tl.cdiv(tl.cdiv(own - begin, BN), parts) * BN
        begin += part * each
        d_row, e_row, group_row = along(d, ROWS), along(e, 1 - ROWS), along(group, 1 - ROWS)
        last = (own // BLOCK - 1).to(tl.uint32)
        for at in range(begin, tl.minimum(begin + each, own), BN):
            table = tables_ptr + s * table_stride
            # blocks behind the last one are it again; nothing is made of what is seen there
            near = (at // PLACES + w).to(tl.uint32)
            block = tl.load(table + tl.minimum(near // EACH, last)).to(tl.int64)
            words = loaded(keys_ptr + along(block * (KV * D * KEY) + near % EACH, 1 - ROWS) + (g * D + d_row) * KEY, d_row, D, DP)
            near = (at // 32 + unit).to(tl.uint32)
            block = tl.load(table + tl.minimum(near // (BLOCK // 32), last)).to(tl.int64)
            to = keys16_ptr + along(block * (KV * D * KEY) + EACH + near % (BLOCK // 32), 1 - ROWS) + (g * D + d_row) * KEY
            step, low = loaded(to, d_row, D, DP), loaded(to + BLOCK // 32, d_row, D, DP)
            scores = _scores(q, decoded(words, step, low, 32 // PLACES, 1 - ROWS, BITS, q), ROWS)
            if WINDOW:
                seen = (along(at + n, 1 - ROWS) > along(i - window, ROWS)) & along(at + n < own, 1 - ROWS)
            else:
                seen = along(n < own - at, 1 - ROWS) & along(i >= 0, ROWS)
            p, shrink, top, total = _soften(scores, seen, top, total, rate, ROWS)
            near = (at + n).to(tl.uint32)
            block = tl.load(table + tl.minimum(near // BLOCK, last)).to(tl.int64)
            line = along(((block * BLOCK + near % BLOCK) * KV + g) * VALUE, ROWS)
            words = loaded(values_ptr + line + e_row, e_row, D // PLACES, DP // PLACES)
            to = values16_ptr + line + D // PLACES + group_row
            step, low = loaded(to, group_row, D // Q, DP // Q), loaded(to + D // Q, group_row, D // Q, DP // Q)
            values = decoded(words, step, low, Q // PLACES, 1 - ROWS, BITS, q)
            if PAIRS:
                values = _paired(values)
            sums = _weighed(sums, p.to(q.dtype), values, shrink, ROWS)
        if PAIRS:  # dimension 8 word + 2 pair + place in it
            acc = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3])).reshape([2, 8, BM, 4])  # type: ignore[misc]
            acc = acc.permute(1, 3, 0, 2).reshape([DP, BM])
        else:
            acc = _joined(sums, ROWS)
        if part == parts - 1:
            # a row of padding has none, and nothing is made of what it sees
            page = tl.maximum(tl.load(page_rows_ptr + start + first - before), 0).to(tl.int64) // BLOCK * BLOCK
            begin = tl.maximum(own, oldest)
            for at in range(begin, stop, 32):
                j = at + tl.arange(0, 32)
                line = (page + j - own) * page_slot + g * page_head
                k = tl.load(key_pages_ptr + along(line, 1 - ROWS) + d_row, along(j < stop, 1 - ROWS) & (d_row < D), 0.0)
                scores = _product(q, k.to(q.dtype), tl.zeros([32, BM] if TURNED else [BM, 32], tl.float32), ROWS) * half
                seen = (along(j, 1 - ROWS) <= along(i, ROWS)) & along(j < stop, 1 - ROWS)
                if WINDOW:
                    seen = seen & (along(j, 1 - ROWS) > along(i - window, ROWS))
                p, shrink, top, total = _soften(scores, seen, top, total, rate, ROWS)
                inside = along(j < stop, ROWS) & along(d < D, 1 - ROWS)
                v = tl.load(value_pages_ptr + along(line, ROWS) + along(d, 1 - ROWS), inside, 0.0)
                acc = _product((p * half).to(q.dtype), v.to(q.dtype), acc * along(shrink, ROWS), ROWS)
        total *= half
        if TURNED:
            acc = acc.T
        if not SPLIT:
            out = out_ptr + (row[:, None] * HEADS + head[:, None]) * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)
        else:
            to = (part.to(tl.int64) * T + row) * HEADS + head
            tl.store(out_ptr + to[:, None] * D + d[None, :], acc, mask)
            tl.store(top_ptr + to, top * rate, real)
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
    kv_heads, block, places = cache.keys.shape[1], cache.block_size, 16 // cache.bits
    group, padded = heads // kv_heads, max(64, triton.next_power_of_2(width))
    single = q.dtype == torch.float32
    most = 64 if padded * (4 if single else 2) <= 256 else 32 if not single else 16
    rows = block if min(plan.max_rows, block) * group <= most else max(1, min(most // group, block))
    bm = triton.next_power_of_2(min(plan.max_rows, rows) * group)
    # decoding: 8 rows-times-heads are the narrow side of a product, which has 16 at least on the other
    turned = bm <= 8
    bm = max(8 if turned else 16, bm)
    sequences = plan.contexts.shape[0]
    tiles = ((plan.max_rows + block - 2) // block + 1) * triton.cdiv(block, rows)
    warps = 1 if bm <= 16 else 4  # of few rows each warp would do all of a product
    parts = parts or num_parts(sequences, tiles, kv_heads, plan.block_tables.shape[1] * block, q.device, warps)
    partial = torch.empty(parts, tokens, heads, width, device=q.device) if parts > 1 else out
    top, total = (torch.empty(parts, tokens, heads, device=q.device) if parts > 1 else partial for _ in range(2))
    keys, values, pages = cache.keys.view(torch.int16), cache.values.view(torch.int16), cache.key_pages
    assert keys.is_contiguous() and values.is_contiguous(), "the kernel knows how codes lie"
    _attend[(sequences * tiles, kv_heads, parts)](
        q, keys, cache.keys.view(torch.float16), values, cache.values.view(torch.float16), pages, cache.value_pages, page_rows,
        plan.query_starts, plan.contexts, plan.block_tables, partial, top, total, tokens, q.stride(0), q.stride(1),
        pages.stride(0), pages.stride(1), plan.block_tables.stride(0),
        scaling * LOG2E, window or 0, rows, tiles, parts, BLOCK=block, GROUP=group, HEADS=heads, BITS=cache.bits, Q=cache.group,
        WINDOW=window is not None, SPLIT=parts > 1, TURNED=turned, D=width, DP=padded, BM=bm,
        BN=16 * places if turned else 64, num_warps=warps, num_stages=2)  # fmt: skip
    if parts > 1:
        merge_parts(partial, top, total, out)
    return out


def offline_cases() -> list[Case]:
    f16 = {80: r"mma\.sync[.a-z0-9]*f32\.f16", 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*f32\.f16",
           100: r"(tcgen05\.mma|mma\.sync)"}  # fmt: skip
    f16 |= dict.fromkeys((89, 120), f16[80])
    odd = ("T", "table_stride", "window", "rows", "tiles", "parts", "key_dim", "key_head", "key_block", "value_slot",
           "value_head")  # fmt: skip
    halves = ("keys16_ptr", "values16_ptr", "key_pages_ptr", "value_pages_ptr")
    cases = []
    for name, bits, width, group, bm, split, window in (
        ("decode 4 bits", 4, 128, 4, 8, True, False), ("decode 2 bits", 2, 128, 4, 8, True, False),
        ("decode 4 bits, heads of 64", 4, 64, 4, 8, True, True), ("decode 2 bits, heads of 64", 2, 64, 4, 8, True, False),
        ("decode 2 bits, 16 heads", 2, 64, 16, 16, True, False),
        ("prefill 4 bits", 4, 128, 4, 64, False, False), ("prefill 2 bits, heads of 64", 2, 64, 3, 64, False, False),
        ("prefill 4 bits, heads of 256", 4, 256, 4, 32, False, False), ("fp32, 2 bits", 2, 128, 4, 8, True, False),
    ):  # fmt: skip
        places, turned = 16 // bits, bm == 8
        query, bn = "*fp32" if "fp32" in name else "*bf16", 16 * places if turned else 64
        types = {"q_ptr": query, "keys_ptr": "*i16", "values_ptr": "*i16", "out_ptr": "*fp32" if split else query,
                 "top_ptr": "*fp32", "sum_ptr": "*fp32", "factor": "fp32", **dict.fromkeys(halves, "*fp16"),
                 **{f"{n}_ptr": "*i32" for n in ("page_rows", "starts", "contexts", "tables")}}  # fmt: skip
        types = {n: types.get(n, "i32") for n in _attend.arg_names if n.islower() or n == "T"}
        constants = {"BLOCK": 64, "GROUP": group, "HEADS": 8 * group, "BITS": bits, "Q": 32, "WINDOW": window, "SPLIT": split,
                     "TURNED": turned, "D": width, "DP": width, "BM": bm, "BN": bn}  # fmt: skip
        wanted = f16 if query == "*bf16" else {90: r"mma\.sync[.a-z0-9]*tf32"}
        reads = 2 * bn * width * (bits + 1) // 8 if query == "*bf16" and split else 0
        cases.append(Case(f"kivi {name}", _attend, types, constants, wanted, 1 if bm <= 16 else 4, 2, odd,
                          (90,) if name == "decode 4 bits" else (),
                          on="each" if name in ("decode 4 bits", "decode 2 bits", "prefill 4 bits") else "asked",
                          reads=reads))  # fmt: skip
        if split and width == 128 and query == "*bf16":
            kinds = {"slots_ptr": "*i32", "rows_ptr": "*i32", "keys_ptr": "*u8", "values_ptr": "*u8"}
            types = {n: kinds.get(n, "*fp16" if n.endswith("ptr") else "i32") for n in _code.arg_names if n.islower()}
            constants = {"BLOCK": 64, "BITS": bits, "Q": 32, "D": width, "DP": width, "GP": width // 32}
            cases.append(Case(f"kivi code {bits} bits", _code, types, constants, {cc: r"st\.global" for cc in WIDE_LOADS}, 4, 3,
                              odd, (), on="asked" if bits == 4 else "one"))  # fmt: skip
    return cases
