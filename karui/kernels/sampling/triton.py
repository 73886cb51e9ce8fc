"""Sampling in Triton: a program per row. Bisection on a probability finds where top-k's count or top-p's mass is reached, and
ends when one token at most lies between its bounds; a step is one pass over the row, which is in the L2 cache by then."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.sampling import Settings
from karui.kernels.triton_support.offline import WIDE_LOADS, Case

_STEPS = 24


@triton.jit
def _above(row, V, inverse, top, floor, least, BLOCK: tl.constexpr):
    """(count, mass) of exp(x / T - top) that are at least `least` and at least `floor`."""
    cols = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + cols
        e = tl.exp(tl.load(row + at, at < V, float("-inf")).to(tl.float32) * inverse - top)
        inside = (e >= least) & (e >= floor) & (at < V)
        count += inside.to(tl.float32)
        mass += tl.where(inside, e, 0.0)
    return tl.sum(count), tl.sum(mass)


# one number per row of each: where they begin depends on the number of rows, and must not be compiled in
_PER_ROW = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "out", "chance", "logprob")


@triton.jit(do_not_specialize_on_alignment=[f"{name}_ptr" for name in _PER_ROW])
def _sample(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, out_ptr, chance_ptr,
            logprob_ptr, stride, V, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    line = tl.program_id(0)
    row = logits_ptr + line.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + line).to(tl.float32)
    greedy = temperature == 0.0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    cols = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + cols
        largest = tl.maximum(largest, tl.load(row + at, at < V, float("-inf")).to(tl.float32))
    peak = tl.max(largest)
    top = peak * inverse
    floor = 0.0
    top_k, top_p = tl.load(top_k_ptr + line).to(tl.int32), tl.load(top_p_ptr + line).to(tl.float32)
    if (top_k > 0) & (top_k < V) & (temperature != 0.0):
        # invariant: at least top_k values are >= low, fewer are >= high
        low, high, below, over, left = 0.0, 1.0000001, 1.0 * V, 0.0, STEPS
        while left > 0:
            middle = 0.5 * (low + high)
            count, _mass = _above(row, V, inverse, top, 0.0, middle, BLOCK)
            enough = count >= top_k
            low, below = tl.where(enough, middle, low), tl.where(enough, count, below)
            high, over = tl.where(enough, high, middle), tl.where(enough, over, count)
            left = tl.where(below - over <= 1.0, 0, left - 1)
        floor = low
    if (top_p < 1.0) & (temperature != 0.0):
        below, whole = _above(row, V, inverse, top, floor, 0.0, BLOCK)
        low, high, over, left = 0.0, 1.0000001, 0.0, STEPS
        while left > 0:
            middle = 0.5 * (low + high)
            count, mass = _above(row, V, inverse, top, floor, middle, BLOCK)
            enough = mass >= top_p * whole
            low, below = tl.where(enough, middle, low), tl.where(enough, count, below)
            high, over = tl.where(enough, high, middle), tl.where(enough, over, count)
            left = tl.where(below - over <= 1.0, 0, left - 1)
        floor = tl.maximum(floor, low)
    floor = tl.maximum(floor, tl.load(min_p_ptr + line).to(tl.float32))
    seed = tl.load(seed_ptr + line)
    position = tl.load(position_ptr + line).to(tl.int32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    kept = tl.zeros([BLOCK], tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + cols
        plain = tl.load(row + at, at < V, float("-inf")).to(tl.float32)
        x = plain * inverse - top
        whole += tl.exp(plain - peak)
        fill = at * 0
        word, _b, _c, _d = tl.philox(seed, at, fill + position, fill, fill)
        uniform = ((word >> 8).to(tl.float32) + 0.5) * 0.000000059604644775390625
        score = tl.where(greedy, x, x - tl.log(-tl.log(uniform)))
        inside = (tl.exp(x) >= floor) & (at < V)
        kept += tl.where(inside, tl.exp(x), 0.0)
        score = tl.where(inside, score, float("-inf"))
        better = score > best
        where = tl.where(better, at, where)
        best = tl.where(better, score, best)
    winner = tl.max(best)
    token = tl.min(tl.where(best == winner, where, 2147483647))
    chosen = tl.load(row + token).to(tl.float32)
    tl.store(out_ptr + line, token.to(tl.int64))
    tl.store(chance_ptr + line, tl.where(greedy, 1.0, tl.exp(chosen * inverse - top) / tl.sum(kept)))
    tl.store(logprob_ptr + line, chosen - peak - tl.log(tl.sum(whole)))


def sample(logits: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `karui.kernels.sampling.sample`."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chances, logprobs = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    s = settings
    values = s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.position
    if rows:
        _sample[(rows,)](logits, *(v.contiguous() for v in values), out, chances, logprobs, logits.stride(0), vocabulary,
                         STEPS=_STEPS, BLOCK=min(triton.next_power_of_2(vocabulary), 8192), num_warps=16)  # fmt: skip
    return out, chances, logprobs


def offline_cases() -> list[Case]:
    types = {"logits_ptr": "*fp32", "temperature_ptr": "*fp64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64",
             "seed_ptr": "*i64", "position_ptr": "*i64", "out_ptr": "*i64", "chance_ptr": "*fp32",
             "logprob_ptr": "*fp32", "stride": "i32", "V": "i32"}  # fmt: skip
    return [Case("sampling", _sample, types, {"STEPS": _STEPS, "BLOCK": 8192}, WIDE_LOADS, 16)]
