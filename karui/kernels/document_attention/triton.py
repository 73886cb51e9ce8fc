"""Causal attention inside documents of a ragged row, forward and backward (FlashAttention-2, arXiv 2307.08691, alg. 1 and 2).

Work is a list of tiles, each inside one document; the list is made on the device from cu_seqlens, so nothing waits for the host.
The backward pass has one kernel for dk and dv (a tile of keys, all queries of its group's heads that see it) and one for dq: no
atomics, so two runs give the same bits. With SHARED the rows of later documents see the first document too: their tiles read its
keys after their own, and its tiles of keys read all later rows. With WINDOW a tile reads only the keys (rows) that some row (key)
of it can see; SINKS and CAP are as in `pieces`, beside this file.

Legend: T tokens, D head_dim, BM queries and BN keys a tile. Scores, sinks and the cap are kept in base 2.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.triton_support import capability
from karui.kernels.triton_support.offline import Case
from karui.kernels.triton_support.products import dot
from karui.kernels.triton_support.tuning import Config, config, launch

_LOG2E = math.log2(math.e)


def tiles(cu_seqlens: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """int32 [bound, 3]: (document's start, its end, the tile's first row) of every tile; rows past the last one are empty."""
    cu = cu_seqlens.to(torch.int64)
    starts, ends = cu[:-1], cu[1:]
    counts = (ends - starts + block - 1) // block
    last = counts.cumsum(0)
    number = torch.arange(tokens // block + starts.numel(), device=cu.device)
    document = torch.searchsorted(last, number, right=True)
    known = document < starts.numel()
    document = document.clamp(max=starts.numel() - 1)
    first = starts[document] + (number - (last - counts)[document]) * block
    table = torch.stack([starts[document], ends[document], first], 1)
    return torch.where(known.unsqueeze(1), table, torch.zeros_like(table)).to(torch.int32)


class Documents:
    """cu_seqlens in int32 on `device`, and the tables of their tiles, each made once."""

    def __init__(self, cu_seqlens: torch.Tensor, tokens: int, device: torch.device) -> None:
        self.cu, self._tokens = cu_seqlens.to(device, torch.int32), tokens
        self._tables: dict[int, torch.Tensor] = {}

    def tiles(self, block: int) -> torch.Tensor:
        if block not in self._tables:
            self._tables[block] = tiles(self.cu, self._tokens, block)
        return self._tables[block]


_last: tuple[weakref.ref[torch.Tensor], tuple[Any, ...], Documents] | None = None


def documents(cu_seqlens: torch.Tensor, tokens: int, device: torch.device) -> Documents:
    """The documents of `cu_seqlens`: those of the call before if it is that tensor, unchanged, as it is in all layers of a step,
    each of which would launch some forty small kernels for its tables."""
    global _last
    if cu_seqlens.is_inference():  # such tensors do not count their changes
        return Documents(cu_seqlens, tokens, device)
    mark = cu_seqlens._version, tokens, device
    if _last is None or _last[0]() is not cu_seqlens or _last[1] != mark:
        _last = weakref.ref(cu_seqlens), mark, Documents(cu_seqlens, tokens, device)
    return _last[2]


@triton.jit
def _rows(ptr, rows, end, stride, d, D: tl.constexpr):
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + d[None, :], (rows[:, None] < end) & (d[None, :] < D), 0.0)


@triton.jit
def _scores(q, k, rows, keys, end, ahead, window, factor, cap, WINDOW: tl.constexpr, CAP: tl.constexpr):
    """(scaled scores in base 2, as shares of the cap); -inf where a key lies after its query, beyond the document or behind
    the window. `ahead`: what takes the rows' numbers to places that the keys' numbers are compared with."""
    s = dot(q, k.T, tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * factor
    share = s
    if CAP:
        share = 2.0 * tl.sigmoid(2.0 * s / cap) - 1.0  # tanh
        s = share * cap
    seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] < end)
    if WINDOW:
        seen &= keys[None, :] > (rows + ahead)[:, None] - window
    return tl.where(seen, s, float("-inf")), share


@triton.jit
def _keys_of(part: tl.constexpr, start, end, first, cu_ptr, window, BM: tl.constexpr, WINDOW: tl.constexpr):
    """(first, past the last, ahead) of the keys that a tile sees: part 0 in its own document, part 1 in the shared one."""
    if part == 0:
        begin, stop, ahead = start, tl.minimum(first + BM, end), start - start
    else:
        prefix = tl.load(cu_ptr + 1)
        begin, stop, ahead = start - start, tl.where(start > 0, prefix, 0), prefix - start
    if WINDOW:
        begin = tl.maximum(begin, first + ahead - window + 1)
    return begin, stop, ahead


@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, tiles_ptr, cu_ptr, q_head, q_row, k_head, k_row, v_head, v_row, T,
             window, factor, cap, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    tile, h = tl.program_id(0), tl.program_id(1)
    start, end, first = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
    if first < end:
        rows, d = first + tl.arange(0, BM), tl.arange(0, DP)
        q = _rows(q_ptr + h.to(tl.int64) * q_head, rows, end, q_row, d, D)
        k_ptr += (h // GROUP).to(tl.int64) * k_head
        v_ptr += (h // GROUP).to(tl.int64) * v_head
        if SINKS:
            top = tl.zeros([BM], tl.float32) + tl.load(sinks_ptr + h)
            total = tl.full([BM], 1.0, tl.float32)
        else:
            top = tl.full([BM], float("-inf"), tl.float32)
            total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        for part in tl.static_range(1 + SHARED):
            begin, stop, ahead = _keys_of(part, start, end, first, cu_ptr, window, BM, WINDOW)
            for at in range(begin, stop, BN):
                keys = at + tl.arange(0, BN)
                k = _rows(k_ptr, keys, stop, k_row, d, D)
                s, _ = _scores(q, k, rows, keys, stop, ahead, window, factor, cap, WINDOW, CAP)
                bigger = tl.maximum(top, tl.max(s, 1))
                # without a window key `start` is seen by every row, so `bigger` is finite from the first tile on
                level = tl.where(bigger == float("-inf"), 0.0, bigger) if WINDOW and not SINKS else bigger
                p = tl.exp2(s - level[:, None])
                shrink = tl.exp2(top - level)
                total = total * shrink + tl.sum(p, 1)
                v = _rows(v_ptr, keys, stop, v_row, d, D)
                acc = dot(p.to(v.dtype), v, acc * shrink[:, None])
                top = bigger
        tl.store(lse_ptr + h * T + rows, top + tl.log2(total), rows < end)
        out = out_ptr + (rows.to(tl.int64)[:, None] * HEADS + h) * D + d[None, :]
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), (rows[:, None] < end) & (d[None, :] < D))


@triton.jit
def _delta(out_ptr, dout_ptr, delta_ptr, T, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DP)
    at = (t * HEADS + h) * D + d
    o = tl.load(out_ptr + at, d < D, 0.0).to(tl.float32)
    do = tl.load(dout_ptr + at, d < D, 0.0).to(tl.float32)
    tl.store(delta_ptr + h * T + t, tl.sum(o * do))


@triton.jit
def _backward_kv(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr, starts_ptr, cu_ptr, q_head, q_row,
                 k_head, k_row, v_head, v_row, T, window, factor, cap, scaling, HEADS: tl.constexpr, GROUP: tl.constexpr,
                 D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr,
                 WINDOW: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    tile, g = tl.program_id(0), tl.program_id(1)
    end, first = tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
    if first < end:
        keys, d = first + tl.arange(0, BN), tl.arange(0, DP)
        k = _rows(k_ptr + g.to(tl.int64) * k_head, keys, end, k_row, d, D)
        v = _rows(v_ptr + g.to(tl.int64) * v_head, keys, end, v_row, d, D)
        dk = tl.zeros([BN, DP], tl.float32)
        dv = tl.zeros([BN, DP], tl.float32)
        for one in range(GROUP):
            h = g * GROUP + one
            for part in tl.static_range(1 + SHARED):
                # part 0: the document's own rows; part 1: those of all later ones, which see the first document
                begin = first if part == 0 else end
                stop = end if part == 0 else tl.where(first < tl.load(cu_ptr + 1), T, end)
                if WINDOW and part == 0:
                    stop = tl.minimum(stop, first + BN + window - 1)
                for at in range(begin, stop, BM):
                    rows = at + tl.arange(0, BM)
                    ahead = rows - rows
                    if WINDOW and part == 1:
                        ahead = tl.load(cu_ptr + 1) - tl.load(starts_ptr + rows, rows < stop, 0)
                    q = _rows(q_ptr + h.to(tl.int64) * q_head, rows, stop, q_row, d, D)
                    do = _rows(dout_ptr + h * D, rows, stop, HEADS * D, d, D)
                    lse = tl.load(lse_ptr + h * T + rows, rows < stop, float("inf"))
                    delta = tl.load(delta_ptr + h * T + rows, rows < stop, 0.0)
                    s, share = _scores(q, k, rows, keys, end, ahead, window, factor, cap, WINDOW, CAP)
                    p = tl.exp2(s - lse[:, None])
                    dv = dot(p.to(do.dtype).T, do, dv)
                    ds = p * (dot(do, v.T, tl.zeros([BM, BN], tl.float32)) - delta[:, None])
                    if CAP:
                        ds *= 1.0 - share * share
                    dk = dot(ds.to(q.dtype).T, q, dk)
        to = (keys.to(tl.int64)[:, None] * (HEADS // GROUP) + g) * D + d[None, :]
        keep = (keys[:, None] < end) & (d[None, :] < D)
        tl.store(dk_ptr + to, (dk * scaling).to(dk_ptr.dtype.element_ty), keep)
        tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), keep)


@triton.jit
def _backward_q(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr, cu_ptr, q_head, q_row, k_head, k_row,
                v_head, v_row, T, window, factor, cap, scaling, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
                DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr,
                CAP: tl.constexpr):  # fmt: skip
    tile, h = tl.program_id(0), tl.program_id(1)
    start, end, first = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
    if first < end:
        rows, d = first + tl.arange(0, BM), tl.arange(0, DP)
        q = _rows(q_ptr + h.to(tl.int64) * q_head, rows, end, q_row, d, D)
        do = _rows(dout_ptr + h * D, rows, end, HEADS * D, d, D)
        lse = tl.load(lse_ptr + h * T + rows, rows < end, float("inf"))
        delta = tl.load(delta_ptr + h * T + rows, rows < end, 0.0)
        k_ptr += (h // GROUP).to(tl.int64) * k_head
        v_ptr += (h // GROUP).to(tl.int64) * v_head
        dq = tl.zeros([BM, DP], tl.float32)
        for part in tl.static_range(1 + SHARED):
            begin, stop, ahead = _keys_of(part, start, end, first, cu_ptr, window, BM, WINDOW)
            for at in range(begin, stop, BN):
                keys = at + tl.arange(0, BN)
                k = _rows(k_ptr, keys, stop, k_row, d, D)
                v = _rows(v_ptr, keys, stop, v_row, d, D)
                s, share = _scores(q, k, rows, keys, stop, ahead, window, factor, cap, WINDOW, CAP)
                p = tl.exp2(s - lse[:, None])
                ds = p * (dot(do, v.T, tl.zeros([BM, BN], tl.float32)) - delta[:, None])
                if CAP:
                    ds *= 1.0 - share * share
                dq = dot(ds.to(k.dtype), k, dq)
        to = (rows.to(tl.int64)[:, None] * HEADS + h) * D + d[None, :]
        tl.store(dq_ptr + to, (dq * scaling).to(dq_ptr.dtype.element_ty), (rows[:, None] < end) & (d[None, :] < D))


class DocumentAttention(torch.autograd.Function):
    """q [1, H, T, D], k and v [1, G, T, D] of any strides with D dense, sinks [H] or None -> [1, T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scaling: float, shared: bool,
        window: int | None, sinks: torch.Tensor | None, softcap: float | None,
    ) -> torch.Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        heads, tokens, width = q.shape[1:]
        held = documents(cu, tokens, q.device)
        out = torch.empty(1, tokens, heads, width, dtype=q.dtype, device=q.device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        bm, bn, warps, stages = _blocks(q)
        table = held.tiles(bm)
        flags = {"SHARED": shared, "WINDOW": window is not None, "CAP": softcap is not None}
        numbers = *_strides(q, k, v), tokens, window or 0, scaling * _LOG2E, (softcap or 1.0) * _LOG2E
        level = lse if sinks is None else sinks.detach().float() * _LOG2E
        if tokens:
            _forward[(table.shape[0], heads)](
                q, k, v, out, lse, level, table, held.cu, *numbers, HEADS=heads, GROUP=heads // k.shape[1], D=width,
                DP=triton.next_power_of_2(width), BM=bm, BN=bn, SINKS=sinks is not None, **flags, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = numbers, scaling, flags, held
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        numbers, scaling, flags, held = ctx.how
        cu = held.cu
        dout = grads[0].contiguous()
        (heads, tokens, width), kv_heads = q.shape[1:], k.shape[1]
        dq, dk, dv = (torch.empty(1, tokens, x.shape[1], width, dtype=x.dtype, device=x.device) for x in (q, k, v))
        delta = torch.empty_like(lse)
        if tokens:
            padded = triton.next_power_of_2(width)
            _delta[(tokens, heads)](out, dout, delta, tokens, HEADS=heads, D=width, DP=padded, num_warps=1)
            block = _backward_block(q)
            table = held.tiles(block)
            common = {"HEADS": heads, "GROUP": heads // kv_heads, "D": width, "DP": padded, **flags}
            starts = _starts(cu, tokens) if flags["SHARED"] and flags["WINDOW"] else cu
            given = q, k, v, dout, lse, delta

            def run(c: Config) -> None:
                _backward_kv[(table.shape[0], kv_heads)](*given, dk, dv, table, starts, cu, *numbers, scaling, **common, **c())

            key = ("document_attention dk dv", heads, kv_heads, width, triton.next_power_of_2(tokens), q.dtype, *flags.values())
            square = config(4, 2, BM=block, BN=block)
            launch(key, [square, *_TALL] if _takes_tall(q) else [square], run, q.device)
            _backward_q[(table.shape[0], heads)](*given, dq, table, cu, *numbers, scaling, **common, **square())
        dsinks = None
        if sinks is not None:
            dsinks = -((sinks.float().unsqueeze(1) * _LOG2E - lse).exp2() * delta).sum(1).to(sinks.dtype)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None, None, None, dsinks, None


def _starts(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """int32 [T]: where each row's document begins."""
    rows = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]


def _strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for x in (q, k, v) for s in (x.stride(1), x.stride(2)))


def _blocks(q: torch.Tensor) -> tuple[int, int, int, int]:
    """(BM, BN, warps, stages) of the forward kernel; small in the interpreter, so that several tiles are used."""
    if q.device.type == "cpu":
        return 16, 16, 4, 1
    return (128, 64, 8, 3) if q.shape[-1] <= 128 else (64, 32, 4, 2)


# For dk and dv: half of the registers for each key, whose sums do not fit beside the scores else and spill.
_TALL = [config(8, 2, BM=128, BN=64)]


def _takes_tall(q: torch.Tensor) -> bool:
    """Whether a multiprocessor has the shared memory for `_TALL`, and gains by it: Hopper, with heads of more than 64."""
    return q.device.type == "cuda" and capability(q.device) == 90 and 64 < q.shape[-1] <= 128


def _backward_block(q: torch.Tensor) -> int:
    """Queries and keys a tile of both backward kernels."""
    if q.device.type == "cpu":
        return 16
    return 64 if q.shape[-1] <= 128 else 32


def offline_cases() -> list[Case]:
    bf16 = {80: r"mma\.sync[.a-z0-9]*bf16", 89: r"mma\.sync[.a-z0-9]*bf16", 90: r"wgmma\.mma_async[.a-z0-9]*bf16",
            100: r"tcgen05\.mma", 120: r"mma\.sync[.a-z0-9]*bf16"}  # fmt: skip
    # tiles of 32 rows are too small for a warp group
    small = bf16 | {90: r"(wgmma|mma\.sync)[._a-z0-9]*bf16", 100: r"(tcgen05\.mma|mma\.sync[.a-z0-9]*bf16)"}
    pointers = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    pointers |= {f"{name}_ptr": "*fp32" for name in ("lse", "delta", "sinks")}
    pointers |= {f"{name}_ptr": "*i32" for name in ("tiles", "cu", "starts")}
    numbers = {f"{x}_{y}": "i32" for x in "qkv" for y in ("head", "row")}
    numbers |= {"T": "i32", "window": "i32", "factor": "fp32", "cap": "fp32", "scaling": "fp32"}
    every = pointers | numbers
    cases = []
    forms = ((128, False, False), (128, True, False), (256, True, False), (128, True, True), (256, False, True))
    for width, shared, own in forms:
        q = torch.empty(0, width, device="meta")
        label = (f" D {width}" if width > 128 else "") + (" shared" if shared else "") + (" window, sinks, cap" if own else "")
        square, where = (_backward_block(q), _backward_block(q), 4, 2), small if width > 128 else bf16
        kernels = {"forward": (_forward, _blocks(q)), "dk dv": (_backward_kv, square), "dq": (_backward_q, square)}
        for name, (kernel, (bm, bn, warps, stages)) in kernels.items():
            types = {k: every[k] for k in kernel.arg_names if k in every}
            constants = {"HEADS": 32, "GROUP": 4, "D": width, "DP": width, "BM": bm, "BN": bn, "SHARED": shared, "WINDOW": own,
                         "SINKS": own, "CAP": own}  # fmt: skip
            constants = {k: x for k, x in constants.items() if k in kernel.arg_names}
            cases.append(Case(f"document_attention {name}{label}", kernel, types, constants, where, warps, stages, ("T",),
                              quick=(90,) if shared else (),
                              on="asked" if shared else "each" if width == 128 else "one"))  # fmt: skip
    types = {name: every[name] for name in ("out_ptr", "dout_ptr", "delta_ptr", "T")}
    cases.append(Case("document_attention delta", _delta, types, {"HEADS": 32, "D": 128, "DP": 128},
                      {cc: r"ld\.global\.v2" for cc in (80, 89, 90, 100, 120)}, 1, odd=("T",), quick=()))  # fmt: skip
    return cases
