"""Kernels, training step and engine on one GPU: correctness against float64 first, then shares of ceilings measured in the same run.

    python benchmarks/gpu.py --json out.json            one card, under 8 minutes, no network
    python benchmarks/gpu.py --only correctness         on a CPU this is all there is: tiny shapes, Triton's interpreter

It needs torch, triton and transformers beside this checkout, which need not be installed. The QLoRA step needs peft, and its peer
bitsandbytes too.

Ceilings: a large copy (GB/s) and torch's bf16 product at 8192^3 (TFLOP/s). Times are medians of CUDA-event timings after a warm-up.
What decoding runs is timed as a CUDA graph over so many copies of the weights that no cache holds them. Kernel configurations are timed
once per class of shapes (`triton_support.tuning`).

On a GPU comparisons run in several processes, and beside them each part of the speed half once on a small model, for its kernels to
be compiled: one after the other that would take all of the time. The speed half then has the GPU to itself. A kernel that fails, hangs
or breaks its process is reported as failed, and a new process does what is left; parts that no time is left for say so, parts that
do not fit into the card's memory too. The exit code is 1 when a comparison is wrong or anything failed. A test walks through the whole
speed half on a CPU with the shapes of `TINY`.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import json  # noqa: E402
import platform  # noqa: E402
from importlib.util import find_spec  # noqa: E402

if MISSING := [name for name in ("triton", "transformers") if find_spec(name) is None]:
    names, version = " ".join(MISSING), f"{sys.version_info.major}.{sys.version_info.minor}"
    sys.exit(f"{names} not installed: pip install {names}; for a machine without a network: pip download -d wheels --only-binary=:all: "
             f"--python-version {version} {names} where there is one, and here pip install --no-index --find-links wheels {names}")

from figures import Figure, arguments, report  # noqa: E402

from karui.configs.quantspec import QuantSpec  # noqa: E402
from karui.kernels.triton_support import tuning  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
START = time.monotonic()
BUDGET_S = 440.0 if GPU else math.inf
FOR_SPEED_S = 240.0  # of the budget, which the correctness half leaves
PROCESSES = 8  # that compare
RECIPES = {"fp8-current": 89, "fp8-rowwise": 89, "fp8-blockwise": 89, "mxfp8": 100}  # the capability whose tensor cores have it
FAILED = "failed: "


def left() -> float:
    return BUDGET_S - (time.monotonic() - START)


def failure(name: str, problem: Exception) -> Figure:
    if isinstance(problem, torch.OutOfMemoryError):
        return Figure(name=name, ours=None, unit="", note=f"does not fit on this card: {str(problem)[:200]}")
    return Figure(name=name, ours=None, unit="", note=f"{FAILED}{type(problem).__name__}: {str(problem)[:300]}")


def no_time(name: str) -> Figure:
    return Figure(name=name, ours=None, unit="", note="no time was left")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=_RNG).to(dtype)


_RNG = torch.Generator(device=DEVICE).manual_seed(0)


# -- correctness


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error as a share of the largest value."""
    want = want.double()
    return float((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30))


def differentiated(fast: Callable[..., torch.Tensor], exact: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> float:
    """Worst error of the output and of all gradients against float64 autograd."""
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    a, b = fast(*mine), exact(*theirs)
    grad = randn(*a.shape).to(a.dtype) if a.ndim else torch.ones_like(a)
    a.backward(grad)
    b.backward(grad.double())
    pairs = [(a.detach(), b.detach())] + [(m.grad, t.grad) for m, t in zip(mine, theirs)]
    return max(relative(x, y) for x, y in pairs)


def checks() -> dict[str, tuple[float, Callable[[], float]]]:
    """Name -> (bound, function that returns the error). Small shapes, odd where the kernel takes them."""
    from karui.kernels import (
        cross_entropy,
        document_attention,
        gemm_grouped,
        paged_attention,
        rms_norm,
        rope,
        swiglu,
        train_quantize,
    )
    from karui.kernels.document_attention import reference as attention_reference
    from karui.kernels.gemm_fp8 import gemm_fp8
    from karui.kernels.gemm_grouped import reference as grouped_reference
    from karui.kernels.gemm_mx import gemm_mx
    from karui.kernels.gemm_weight import (
        dequantize_weight,
        gemm_float8,
        gemm_int8,
        gemm_weight,
        gemm_weight_dgrad,
        pack_weight,
        takes_int8,
    )
    from karui.kernels.linear_loss import linear_loss
    from karui.kernels.linear_loss import reference as loss_reference
    from karui.kernels.linear_loss.triton import divergence_rows
    from karui.kernels.lora import lora_linear
    from karui.kernels.lora import reference as lora_reference
    from karui.kernels.quantize import quantize
    from karui.kernels.quantize.scaled_float8 import quantize_float8
    from karui.kernels.rms_norm import reference as norm_reference
    from karui.kernels.rope import reference as rope_reference
    from karui.kernels.sampling import Settings, sample
    from karui.kernels.triton_support import obstacle

    half = torch.bfloat16 if GPU else torch.float32  # fp32 is sharper where the interpreter runs it
    loose = 2e-2 if GPU else 1e-4
    of_logits = 2 * loose  # which are rounded to bf16 before their exponentials are taken
    big = 8 if GPU else 1
    eight = obstacle(DEVICE, 89) == ""
    made: dict[str, tuple[float, Callable[[], float]]] = {}
    made["rms_norm"] = (loose, lambda: differentiated(lambda x, w: rms_norm.rms_norm(x, w, 1e-5, "triton"),
                                                      lambda x, w: norm_reference.rms_norm(x, w, 1e-5), randn(33, 200, dtype=half), randn(200, dtype=half)))
    made["swiglu"] = (loose, lambda: differentiated(lambda a, b: swiglu.swiglu(a, b, "triton"),
                                                    lambda a, b: torch.nn.functional.silu(a) * b, randn(33, 131, dtype=half), randn(33, 131, dtype=half)))

    def turned() -> float:
        angle = torch.rand(13, 32, device=DEVICE) * 6
        return differentiated(lambda x: rope.rope(x, angle.cos(), angle.sin(), "triton"),
                              lambda x: rope_reference.rope(x, angle.cos().double(), angle.sin().double()), randn(13, 5, 64, dtype=half))

    made["rope"] = (loose, turned)

    def entropy() -> float:
        targets = torch.randint(0, 501, (17,), device=DEVICE)
        return differentiated(lambda h, w: cross_entropy.linear_cross_entropy(h, w, targets, 8, "triton")[0],
                              lambda h, w: torch.nn.functional.cross_entropy(h @ w.t(), targets, reduction="sum"),
                              randn(17, 48, dtype=half), randn(501, 48, dtype=half))

    made["linear cross entropy"] = (of_logits, entropy)

    def distilled(kind: str) -> float:
        teacher = randn(17, 501) * 2

        def exact(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return loss_reference.loss_sum(h, w, teacher.double(), lambda t, s: loss_reference.divergence(kind, t, s, 0.3), 1.5)

        return differentiated(lambda h, w: linear_loss(h, w, divergence_rows(kind, teacher, temperature=1.5, beta=0.3), 8)[0], exact,
                              randn(17, 48, dtype=half), randn(501, 48, dtype=half))

    for kind in ("forward_kl", "reverse_kl", "jsd"):
        made[f"linear distillation, {kind}"] = (of_logits, lambda kind=kind: distilled(kind))

    def adapted(spec: str | None, rows: int) -> float:
        from karui.adapters.quantized_linear import BaseWeight, QuantizedLinear

        base = None if spec is None else QuantizedLinear(quantize(randn(72, 256), QuantSpec.parse(spec)))
        w = (randn(72, 256) if base is None else base.dequantize(torch.float32)).to(half if base is None else torch.float32)
        weight = (lambda dtype: w.to(dtype)) if base is None else BaseWeight(base)
        return differentiated(lambda x, a, b: lora_linear(x, weight, None, a, b, 0.5, "triton"),
                              lambda x, a, b: lora_reference.lora_linear(x, w.double(), None, a, b, 0.5),
                              randn(rows, 256, dtype=half), randn(9, 256, dtype=half), randn(72, 9, dtype=half))

    for spec in (None, "nf4", "w4g32"):
        made[f"LoRA over {spec or 'a dense base'}"] = (loose, lambda spec=spec: max(adapted(spec, m) for m in ((5, 700) if GPU else (19,))))

    def by_row(dtype: torch.dtype) -> float:
        from karui.kernels.lora_rows import Stack, lora_rows

        part = torch.cat([torch.full((n,), i, dtype=torch.int32, device=DEVICE) for i, n in enumerate((70, 9, 9))])
        stack = Stack(randn(3, 9, 65, dtype=dtype), randn(3, 88, 3, dtype=dtype), part, torch.rand(3, 88, device=DEVICE) + 0.5)
        x, y, slots = randn(5, 65, dtype=dtype), randn(5, 88, dtype=dtype), torch.tensor([2, -1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
        wide, exact = Stack(stack.a.double(), stack.b.double(), part, stack.gain), y.double()
        lora_rows(exact, x.double(), slots, wide, "torch")
        lora_rows(y, x, slots, stack, "triton")
        return relative(y, exact)

    made["LoRA of many adapters, row by row"] = (loose, lambda: by_row(half))

    def attention() -> float:
        cu = torch.tensor([0, 9 * big, 9 * big + 1, 21 * big], device=DEVICE)
        q, k, v = (randn(1, h, 21 * big, 64 if GPU else 16, dtype=half) for h in (4, 2, 2))
        return differentiated(lambda q, k, v: document_attention.document_attention(q, k, v, cu, 0.125, backend="triton"),
                              lambda q, k, v: attention_reference.document_attention(q, k, v, cu, 0.125).transpose(1, 2), q, k, v)

    made["ragged attention"] = (loose, attention)

    def windowed_attention() -> float:
        cu = torch.tensor([0, 9 * big, 9 * big + 1, 21 * big], device=DEVICE)
        q, k, v = (randn(1, h, 21 * big, 64 if GPU else 16, dtype=half) for h in (4, 2, 2))
        own = {"shared": True, "window": 7 * big, "softcap": 3.0}
        return differentiated(lambda q, k, v, s: document_attention.document_attention(q, k, v, cu, 0.125, sinks=s, **own, backend="triton"),
                              lambda q, k, v, s: attention_reference.document_attention(q, k, v, cu, 0.125, sinks=s, **own).transpose(1, 2),
                              q, k, v, randn(4))

    made["ragged attention, window, sinks, soft cap"] = (loose, windowed_attention)

    def grouped() -> float:
        groups = sorted_rows(5 * big, 0, 12 * big)
        return differentiated(lambda x, w: gemm_grouped.gemm_grouped(x, w, groups, "triton"),
                              lambda x, w: grouped_reference.gemm_grouped(x, w, groups.offsets), randn(17 * big, 40, dtype=half), randn(3, 24, 40, dtype=half))

    made["grouped GEMM"] = (loose, grouped)

    def placed() -> float:
        chosen = torch.randint(0, 70, (300 * big,), device=DEVICE)
        fast, slow = (gemm_grouped.group_rows(chosen, 70, backend) for backend in ("triton", "torch"))
        return float(sum(int((getattr(fast, n) != getattr(slow, n)).sum()) for n in ("order", "place", "offsets", "tiles")))

    made["rows by expert, places that differ"] = (0.0, placed)

    def packed_experts(spec: str) -> float:
        q, groups = quantize(randn(3 * 72, 512), QuantSpec.parse(spec)), sorted_rows(5 * big, 0, 2 * big)
        x, w = randn(7 * big, 512, dtype=torch.bfloat16), pack_weight(q)
        if takes_int8(w):
            return relative(gemm_int8(x, w, None, "triton", groups), gemm_int8(x, w, None, "torch", groups))
        want = grouped_reference.gemm_grouped(x.double(), q.dequantize().double().view(3, 72, 512), groups.offsets)
        return relative(gemm_weight(x, w, None, "triton", groups), want)

    for spec in ("w4g128", "nf4", "nvfp4", "w8"):
        made[f"packed experts {spec}{', int8 inputs' if spec == 'w8' else ''}"] = (2e-2, lambda spec=spec: packed_experts(spec))

    def codes(kind: str) -> float:
        x = randn(40 * big, 200, dtype=torch.bfloat16) * 3
        noise = train_quantize.Noise(1, 2, 3, 4) if kind in ("mxfp4", "nvfp4") else None
        options: dict[str, Any] = {"row_noise": noise, "hadamard": kind == "nvfp4"}
        fast, slow = (train_quantize.quantize_both(x, kind, **options, backend=b) for b in ("triton", "torch"))
        wrong = 0
        for a, b in zip(fast, slow):
            for name in ("codes", "scale"):
                wrong += int((getattr(a, name).contiguous().view(torch.uint8) != getattr(b, name).contiguous().view(torch.uint8)).sum())
        return float(wrong)

    for kind in ("e4m3-tensor", "e4m3-row", "e4m3-1x128", "e4m3-128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4-16x16"):
        made[f"codes {kind}, bytes that differ"] = (0.0, lambda kind=kind: codes(kind))

    def eight_bit(tiles: tuple[str, str]) -> float:
        a, b = quantize_float8(randn(30 * big, 272), tile=tiles[0]), quantize_float8(randn(70, 272), tile=tiles[1])
        return relative(gemm_fp8(a, b, torch.float32, "triton"), a.dequantize().double() @ b.dequantize().double().t())

    for tiles in (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")) if eight or not GPU else ():
        made[f"FP8 GEMM {tiles[0]} x {tiles[1]}"] = (3e-3 if GPU else 1e-5, lambda tiles=tiles: eight_bit(tiles))

    def scaled(kind: str) -> float:
        a, b = (train_quantize.quantize_both(randn(n, 160), kind, cols=False, backend="torch")[0] for n in (30 * big, 70))
        return relative(gemm_mx(a, b, torch.float32, "triton"), a.dequantize().double() @ b.dequantize().double().t())

    for kind in ("mxfp8", "mxfp4", "nvfp4"):
        made[f"GEMM {kind}"] = (2e-3 if GPU else 1e-5, lambda kind=kind: scaled(kind))

    def packed(spec: str, m: int) -> float:
        q = quantize(randn(72, 512), QuantSpec.parse(spec))
        w, x = pack_weight(q), randn(m, 512, dtype=torch.bfloat16)
        errors = [relative(gemm_weight(x, w, None, "triton"), x.double() @ q.dequantize().double().t())]
        dy = randn(m, 72, dtype=torch.bfloat16)
        errors.append(relative(gemm_weight_dgrad(dy, w, "triton"), dy.double() @ q.dequantize(torch.bfloat16).double()))
        errors.append(float(not torch.equal(dequantize_weight(w, torch.float32, "triton"), q.dequantize())))
        return max(errors)

    for spec in ("w4g128", "w4g32a", "nf4", "w8", "w1.58", "fp8", "mxfp8", "mxfp4", "nvfp4"):
        made[f"packed weight {spec}"] = (2e-2, lambda spec=spec: max(packed(spec, m) for m in ((1, 33) if GPU else (3,))))

    def whole(spec: str) -> float:
        w, x = pack_weight(quantize(randn(72, 512), QuantSpec.parse(spec))), randn(5, 512)
        return relative(gemm_int8(x, w, None, "triton"), gemm_int8(x, w, None, "torch"))

    for spec in ("w8", "w1.58"):
        made[f"int8 x {spec}"] = (1e-5, lambda spec=spec: whole(spec))

    def eight_bits() -> float:
        w, x = pack_weight(quantize(randn(72, 1040), QuantSpec.parse("fp8"))), randn(5, 1040)
        return relative(gemm_float8(x, w, None, "triton"), gemm_float8(x, w, None, "torch"))

    if eight or not GPU:
        made["E4M3 x fp8, few rows"] = (3e-3 if GPU else 1e-5, eight_bits)

    def paged(dtype: torch.dtype) -> float:
        from karui.kernels.paged_attention import triton as kernel

        heads, width, block = 2, 64 if GPU else 16, 16
        scaled, packed = dtype in (torch.int8, torch.float8_e4m3fn), (width, 16) if dtype == torch.uint8 else None
        row = width if packed is None else paged_attention.row_bytes(*packed)
        keys, values = (torch.zeros(256, heads, row, device=DEVICE).to(dtype) for _ in range(2))
        scales = [torch.zeros(256, heads, device=DEVICE) for _ in range(2)] if scaled else [None, None]
        cache = paged_attention.Cache(keys, values, *scales, packed=packed)
        slots = torch.arange(256, device=DEVICE, dtype=torch.int32)
        paged_attention.write_kv(randn(256, heads, width), randn(256, heads, width), slots, cache, "triton")
        tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
        words = paged_attention.tree_words([tree, None], [3, 1]).to(DEVICE)
        tables = torch.randperm(16)[:8].reshape(2, 4).to(DEVICE, torch.int32)
        plan = paged_attention.Plan(*(torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, 3, 4], [60, 33])), tables, block, 3, words)
        q = randn(4, 8, width, dtype=half)
        want = paged_attention.paged_attention(q, cache, plan, 0.2, None, "torch")
        return max(relative(kernel.paged_attention(q, cache, plan, 0.2, None, parts=n), want) for n in (1, 3))

    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8):
        made[f"paged attention {'int4' if dtype == torch.uint8 else str(dtype)[6:]}"] = (2e-2, lambda dtype=dtype: paged(dtype))

    def unfinished_blocks(kv_dtype: str) -> float:
        """A prompt over three blocks and a token more, beside the torch runner's store and attention."""
        from karui.inference.batch import StepBatch
        from karui.inference.cache.kivi import BITS, KiviStore
        from karui.inference.models.attention import attend
        from karui.inference.models.step import Step
        from karui.kernels.paged_attention.kivi import enter, kivi_attention

        block, width, worst = 32, 64 if GPU else 16, 0.0
        store = KiviStore(1, 4, block, 2, width, kv_dtype, DEVICE)
        mine = [torch.zeros_like(x) for x in (store.keys[0], store.values[0], store.pages[0, 0], store.pages[1, 0])]
        cache = paged_attention.KiviCache(*mine, bits=BITS[kv_dtype], block_size=block, group=store.group)
        tables = torch.tensor([[2, 0, 3, 1]])
        for a, b in ((0, 70), (70, 71)):
            at = torch.arange(a, b)
            slots = tables[0, at // block] * block + at % block
            batch = StepBatch(*(t.int() for t in (at, at, slots, torch.tensor([0, b - a]), torch.tensor([b]), tables, torch.tensor([b - a - 1]))))
            step = Step.of(batch, block, {}, DEVICE)
            q, k, v = randn(b - a, 8, width, dtype=half).split((4, 2, 2), 1)
            store.write(0, step.slots, k, v)
            rows, turn = store._rows(step.slots).int(), torch.ones(b - a, width // 2, device=DEVICE)
            enter(torch.cat([q, k, v], 1).flatten(1), 4, turn, 0 * turn, step.slots.int(), rows, cache)
            worst = max(worst, float((cache.keys != store.keys[0]).sum() + (cache.values != store.values[0]).sum()))
            plan = paged_attention.Plan(*(t.to(DEVICE) for t in (batch.query_starts, batch.context_lens, batch.block_tables)), block, b - a)
            worst = max(worst, relative(kivi_attention(q.contiguous(), cache, plan, rows, width**-0.5), attend(store, 0, q.contiguous(), step, None)))
        return worst

    for kv_dtype in ("kivi4", "kivi2"):
        made[f"paged attention {kv_dtype}, and codes that differ"] = (2e-2, lambda kv_dtype=kv_dtype: unfinished_blocks(kv_dtype))

    def drawn() -> float:
        n = 3
        settings = Settings(torch.tensor([0.0, 1.0, 1.5], device=DEVICE), torch.tensor([0, 5, 0], device=DEVICE), torch.tensor([1.0, 1.0, 0.6], device=DEVICE),
                            torch.zeros(n, device=DEVICE), torch.arange(n, device=DEVICE), torch.arange(n, device=DEVICE))
        logits = randn(n, 301)
        return float((sample(logits, settings, "triton")[0] != sample(logits, settings, "torch")[0]).sum())

    made["sampling, draws that differ"] = (0.0, drawn)
    for spec, kv_dtype, experts in ((None, "fp8", 0), ("w4g32", "int8", 0), ("nvfp4", "fp8", 0), (None, "fp8", 5), ("w4g32", "fp8", 5)):
        made[f"runner {spec or 'dense'}{', experts' if experts else ''}, {kv_dtype} cache, decoding{' by graph' if GPU else ''}"] = (
            6e-2 if GPU else 1e-3, lambda spec=spec, kv_dtype=kv_dtype, experts=experts: runner(spec, kv_dtype, experts))  # fmt: skip
    return made


def sorted_rows(*counts: int) -> Any:
    """The groups of so many rows of each expert, in order."""
    from karui.kernels.gemm_grouped import group_rows

    experts = torch.arange(len(counts), device=DEVICE)
    return group_rows(experts.repeat_interleave(torch.tensor(counts, device=DEVICE)), len(counts), "triton")


def runner(spec: str | None, kv_dtype: str, experts: int) -> float:
    """Logits of a prefill and two decoding steps of two sequences, on the kernels' runner and on the plain one."""
    from karui.inference.batch import StepBatch
    from karui.inference.models.config import from_hf
    from karui.inference.models.decoder import TorchRunner
    from karui.inference.models.gpu import TritonRunner
    from karui.inference.models.weights import canonical
    from karui.kernels.quantize import quantize

    model = llama(2, experts, vocab_size=101, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    if experts:  # so far apart that rounding sends no token elsewhere
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight)
    weights = canonical({n: w for n, w in model.state_dict().items() if n != "lm_head.weight"})
    kept = ("embed_tokens.weight", "mlp.gate.weight")
    made = {n: quantize(w, QuantSpec.parse(spec)) if spec and w.ndim == 2 and not n.endswith(kept) else w for n, w in weights.items()}
    config, dtype = from_hf(model.config.to_dict()), torch.bfloat16 if GPU else torch.float32
    runners = TritonRunner(config, made, DEVICE, dtype), TorchRunner(config, made, DEVICE, dtype)
    tables, worst = torch.tensor([[3, 1], [2, 0]]), 0.0
    for each in runners:
        each.allocate(4, 16, kv_dtype)
    for rows, seen in ((5, 0), (1, 5), (1, 6)):
        positions = torch.arange(seen, seen + rows).repeat(2)
        slots = torch.cat([tables[s, 0] * 16 + torch.arange(seen, seen + rows) for s in range(2)])
        batch = StepBatch(*(t.int() for t in (
            torch.arange(2 * rows) + seen, positions, slots, torch.tensor([0, rows, 2 * rows]), torch.tensor([seen + rows] * 2), tables,
            torch.tensor([rows - 1, 2 * rows - 1]))))  # fmt: skip
        got, want = (each.forward(batch).logits for each in runners)
        worst = max(worst, relative(got, want))
    return worst


def correctness() -> list[Figure]:
    return [figure for name in checks() for figure in compared(name)]


def compared(name: str) -> list[Figure]:
    if left() < 0:
        return [no_time(f"correct: {name}")]
    try:
        bound, run = checks()[name]
        return [Figure(name=f"correct: {name}", ours=run(), unit="error", goal=bound, better="lower")]
    except Exception as problem:  # one broken kernel must not hide the others
        return [failure(f"correct: {name}", problem)]


# -- processes


def worker(half: str, names: list[str], out: Path, seconds: float) -> None:
    """What a process of `in_processes` does: a line of JSON as each name begins and as it ends. It ends early when an error has
    left the GPU's context unusable."""
    global BUDGET_S
    BUDGET_S = time.monotonic() - START + seconds
    tuning.tune(half != "correctness")
    if GPU and half == "warm":  # the comparisons beside it need little
        torch.cuda.set_per_process_memory_fraction(0.08)
    parts = None if half == "correctness" else speed_parts(FULL if half == "speed" else WARM)
    with out.open("a") as file:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        for name in names:
            say(begun=name)
            figures = compared(name) if parts is None else measured(name, parts)
            say(done=name, figures=[vars(f) for f in figures], configurations={str(k): str(v) for k, v in tuning.chosen().items()})
            try:
                settle()
            except Exception:  # an illegal access: every later call would fail
                os._exit(3)
    os._exit(0)  # not after what libraries do at an exit


@dataclass
class _Process:
    names: list[str]
    file: Path
    running: subprocess.Popen[bytes]
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        whole = self.file.read_text().rpartition("\n")[0] if self.file.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]


def in_processes(half: str, lists: Sequence[list[str]], seconds: float, keep: Callable[[list[Figure]], None] = lambda figures: None,
                 beside: Sequence[list[str]] = (), script: Path = Path(__file__)) -> tuple[list[Figure], dict[str, str]]:  # fmt: skip
    """The figures of all names and the configurations chosen; each list in a process of its own, all at once. What a process was at
    when it died, or when the time was over, has failed; the others of its list get a new process.

    Args:
        beside: lists of parts that are run for their kernels' sake, whatever comes of it; nothing is waited for once `lists` are
            done and `seconds` are over.
        keep: called with all figures so far whenever there are new ones.
    """
    end, begin = time.monotonic() + seconds, "correct: " if half == "correctness" else ""
    figures: list[Figure] = []
    chosen: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:

        def start(half: str, names: list[str]) -> _Process:
            number = len(list(Path(folder).iterdir()))
            file, log = Path(folder) / f"{number}.jsonl", Path(folder) / f"{number}.log"
            command = [sys.executable, str(script), "--worker", half, json.dumps(names), str(file), str(end - time.monotonic())]
            threads = {} if half == "speed" else {"OMP_NUM_THREADS": "2"}
            with log.open("wb") as to:
                return _Process(names, file, subprocess.Popen(command, stdout=to, stderr=to, env=os.environ | threads), log)

        warming = [start("warm", names) for names in beside]
        at_work, told = [start(half, names) for names in lists], {}
        while at_work or (time.monotonic() < end and any(p.running.poll() is None for p in warming)):
            time.sleep(0.1)
            for process in list(at_work):
                over = time.monotonic() > end
                ended = process.running.poll() is not None  # before the file is read
                lines = process.lines()
                for line in lines[told.get(process.file, 0):]:
                    if "done" in line:
                        figures += [Figure(**f) for f in line["figures"]]
                        chosen |= line["configurations"]
                        keep(figures)
                told[process.file] = len(lines)
                if not over and not ended:
                    continue
                process.running.kill()
                code = process.running.wait()
                at_work.remove(process)
                done = [line["done"] for line in lines if "done" in line]
                begun = [name for line in lines if (name := line.get("begun")) and name not in done]
                rest = [name for name in process.names if name not in (*done, *begun)]
                last = process.log.read_text(errors="replace").strip().splitlines()[-1:]
                why = " ".join(["its time was over" if over and not ended else f"the process ended with {code}", *last])[:300]
                failed = begun if over or begun or done else rest  # a process that began nothing will not do better
                figures += [Figure(name=begin + name, ours=None, unit="", note=FAILED + why) for name in failed]
                if over:
                    figures += [no_time(begin + name) for name in rest]
                elif rest and failed != rest:
                    at_work.append(start(half, rest))
                keep(figures)
        for process in warming:
            process.running.kill()
            process.running.wait()
    return figures, chosen


# -- speed


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of the speed half.

    Attributes:
        copied, cold: bytes of the copy, and of weights that no cache holds together.
        square: of the products and quantizers.
        experts: their number, N, K and rows.
        weight, narrow: [N, K] of the large and of the small packed weights.
        contexts: sequences and tokens of each, for paged attention; heads: of queries, of keys, and their width.
        attention: tokens of the ragged row; layers, model: of the llama; batch: its rows and their length.
        lora: rows and the width of a square weight, and the few rows that a packed base is read for.
        prompt, new, requests: tokens of a prompt, tokens to generate, prompts at once; grid: of the quantized engine's weights.
    """

    copied: int = 2**30
    cold: int = 2**29
    square: int = 8192
    experts: tuple[int, int, int, int] = (16, 4096, 2048, 16384)
    weight: tuple[int, int] = (28672, 8192)
    narrow: tuple[int, int] = (4096, 8192)
    contexts: tuple[tuple[int, int], ...] = ((32, 4096), (1, 32768))
    heads: tuple[int, int, int] = (32, 8, 128)
    attention: int = 8192
    layers: int = 16
    model: dict[str, int] = field(default_factory=dict)
    batch: tuple[int, int] = (2, 4096)
    lora: tuple[int, int, int] = (8192, 4096, 256)
    prompt: int = 128
    new: int = 256
    requests: int = 64
    grid: str = "w4g128"


FULL = Sizes()
# the same kernels, at least of memory and time; the longest contexts have to split keys as they do in full
WARM = replace(FULL, layers=1, cold=1, new=144)
TINY = Sizes(
    copied=2**12, cold=1, square=64, experts=(16, 16, 128, 20), weight=(32, 256), narrow=(32, 256), contexts=((2, 32), (1, 32)),
    heads=(4, 2, 16), attention=24, layers=1, batch=(2, 8), lora=(20, 64, 5), prompt=5, new=2, requests=2, grid="w4g32",
    model={"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
)  # fmt: skip


def one_run(run: Callable[[], Any]) -> float:
    """Milliseconds."""
    if not GPU:
        begin_s = time.perf_counter()
        run()
        return (time.perf_counter() - begin_s) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host gets ahead
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def milliseconds(run: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of one run."""
    for _ in range(3 if GPU else 0):
        run()
    return statistics.median(one_run(run) for _ in range(repeats if GPU else 1))


def in_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as a CUDA graph, as decoding runs it: launches cost nothing."""
    for _ in range(3 if GPU else 0):
        run()  # tunes, too
    if not GPU:
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cold_milliseconds(run: Callable[[Any], Any], held: Any, moved: float, s: Sizes) -> float:
    """Median time of `run(held)`, which reads `moved` bytes of it, from memory: in one graph with copies that no cache holds."""
    copies = [held, *(copy.deepcopy(held) for _ in range(min(64, math.ceil(s.cold / moved))))]
    return milliseconds(in_graph(lambda: [run(each) for each in copies])) / len(copies)


def settle() -> None:
    """Give back what the part before held."""
    gc.collect()
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def ceilings(s: Sizes) -> tuple[float, float, list[Figure]]:
    a = torch.empty(s.copied, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    copied = 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e6
    x, y = (randn(s.square, s.square, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * s.square**3 / milliseconds(lambda: x @ y.t()) / 1e9
    return copied, product, [Figure(name="ceiling: copy", ours=copied, unit="GB/s"),
                             Figure(name=f"ceiling: bf16 {s.square}^3", ours=product, unit="TFLOP/s")]


def gemms(s: Sizes, bf16: float) -> list[Figure]:
    from karui.kernels.gemm_fp8 import gemm_fp8
    from karui.kernels.gemm_mx import gemm_mx
    from karui.kernels.quantize.scaled_float8 import ScaledFloat8
    from karui.kernels.train_quantize import quantize_both
    from karui.kernels.triton_support import obstacle

    if obstacle(DEVICE, 89):
        return [Figure(name="FP8 GEMM", ours=None, unit="TFLOP/s", note=obstacle(DEVICE, 89))]
    n, figures = s.square, []
    x = randn(n, n, dtype=torch.bfloat16)
    flops = 2 * n**3 / 1e9
    for a_kind, b_kind, goal in (("tensor", "tensor", None), ("row", "row", None), ("1x128", "128x128", 1.5), ("1x128", "1x128", None)):
        a, b = (quantize_both(x, f"e4m3-{k}", cols=False, backend="triton")[0] for k in (a_kind, b_kind))
        left_, right = (ScaledFloat8(q.codes, q.scale, q.tile) for q in (a, b))
        speed = flops / milliseconds(lambda l=left_, r=right: gemm_fp8(l, r, torch.bfloat16, "triton"))
        figures.append(Figure(name=f"FP8 GEMM {a_kind} x {b_kind}, {n}^3", ours=speed, unit="TFLOP/s", peer=bf16, peer_name="torch bf16", goal=goal))
    for kind in ("mxfp8", "mxfp4", "nvfp4") if not obstacle(DEVICE, 100) else ():
        a, _ = quantize_both(x, kind, cols=False, backend="triton")
        speed = flops / milliseconds(lambda a=a: gemm_mx(a, a, torch.bfloat16, "triton"))
        figures.append(Figure(name=f"GEMM {kind}, {n}^3", ours=speed, unit="TFLOP/s", peer=bf16, peer_name="torch bf16"))
    return figures


def random_weight(n: int, k: int, group: int) -> Any:
    """A packed int4 weight [n, k]."""
    from karui.kernels.gemm_weight import PackedWeight, span_of

    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    return PackedWeight(data, torch.rand(n, k // group, device=DEVICE).half(), None, 4, 8, (n, k), span=span_of(k, group))


def experts(s: Sizes, bf16: float, copied: float) -> list[Figure]:
    """A training step's rows, and a token's four experts in decoding."""
    from karui.kernels.gemm_grouped import gemm_grouped, group_rows
    from karui.kernels.gemm_weight import gemm_weight

    num, n, k, rows = s.experts
    w, x = randn(num, n, k, dtype=torch.bfloat16), randn(rows, k, dtype=torch.bfloat16)
    groups = group_rows(torch.randint(0, num, (rows,), device=DEVICE), num, "triton")
    speed = 2 * rows * n * k / milliseconds(lambda: gemm_grouped(x, w, groups, "triton")) / 1e9
    figures = [Figure(name=f"grouped GEMM bf16, {rows} rows", ours=speed, unit="TFLOP/s", peer=bf16, peer_name="torch bf16 product")]
    few, x = group_rows(torch.tensor([1, 4, 9, 15], device=DEVICE), num, "triton"), x[:4]
    packed = random_weight(num * n, k, 128)
    for name, held, moved, run in (("bf16", w, 4 * n * k * 2, lambda w: gemm_grouped(x, w, few, "triton")),
                                   ("W4 g128", packed, packed.num_bytes * 4 / num, lambda w: gemm_weight(x, w, None, "triton", few))):
        speed = moved / cold_milliseconds(run, held, moved, s) / 1e6
        figures.append(Figure(name=f"4 of {num} experts {name}, 1 row each", ours=speed, unit="GB/s", peer=copied, peer_name="copy"))
    return figures


def quantizers(s: Sizes, copied: float) -> list[Figure]:
    """Bytes: what is read (twice where the tensor's scale is found first), and the codes of both directions."""
    from karui.kernels.train_quantize import quantize_both

    x, figures = randn(s.square, s.square, dtype=torch.bfloat16), []
    for kind, readings, code_bytes in (("e4m3-1x128", 1, 1.0), ("e4m3-128x128", 1, 1.0), ("mxfp8", 1, 1.0), ("mxfp4", 1, 0.5), ("nvfp4", 2, 0.5)):
        moved = x.numel() * (2 * readings + 2 * code_bytes)
        speed = moved / milliseconds(in_graph(lambda kind=kind: quantize_both(x, kind, backend="triton"))) / 1e6
        figures.append(Figure(name=f"quantize {kind}, rows and columns", ours=speed, unit="GB/s", peer=copied, peer_name="copy"))
    return figures


def decoding(s: Sizes, copied: float) -> list[Figure]:
    from karui.inference.cache.affine import encode, group_of
    from karui.inference.cache.kivi import BITS
    from karui.kernels.gemm_weight import gemm_float8, gemm_int8, gemm_weight, pack_weight, takes_float8, takes_int8
    from karui.kernels.paged_attention import Cache, KiviCache, Plan, paged_attention
    from karui.kernels.paged_attention.kivi import kivi_attention
    from karui.kernels.quantize import quantize
    from karui.kernels.triton_support import obstacle

    figures, (n, k) = [], s.weight

    def share(name: str, moved: float, run: Callable[[Any], Any], held: Any, goal: float | None = None) -> None:
        speed = moved / cold_milliseconds(run, held, moved, s) / 1e6
        figures.append(Figure(name=name, ours=speed, unit="GB/s", peer=copied, peer_name="copy", goal=goal))

    for group in (128, 32):
        w = random_weight(n, k, group)
        for m in (1, 16):
            x = randn(m, k, dtype=torch.bfloat16)
            share(f"W4A16 g{group}, {m} rows, {n}x{k}", w.num_bytes, lambda w, x=x: gemm_weight(x, w, None, "triton"), w,
                  0.75 if (m, group) == (1, 128) else None)
    n, k = s.narrow
    for spec in ("fp8", "nvfp4", "w8", "w1.58"):
        w, x = pack_weight(quantize(randn(n, k), QuantSpec.parse(spec))), randn(1, k, dtype=torch.bfloat16)
        forms = {"A16": gemm_weight} | ({"A8": gemm_float8} if takes_float8(w) and not obstacle(DEVICE, 89) else {})
        forms |= {"A8": gemm_int8} if takes_int8(w) else {}
        for name, product in forms.items():
            share(f"{spec} {name}, 1 row, {n}x{k}", w.num_bytes, lambda w, x=x, f=product: f(x, w, None, "triton"), w)
    heads, kv_heads, width = s.heads
    for sequences, context in s.contexts:
        slots = sequences * context
        tables = torch.randperm(slots // 16, device=DEVICE).int().reshape(sequences, -1)
        plan = Plan(torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE), torch.full((sequences,), context, dtype=torch.int32, device=DEVICE), tables, 16, 1)
        q = randn(sequences, heads, width, dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            scales = [torch.rand(slots, kv_heads, device=DEVICE) for _ in range(2)] if dtype.itemsize == 1 else [None, None]
            cache = Cache(*((randn(slots, kv_heads, width) * 9).to(dtype) for _ in range(2)), *scales)
            moved = 2 * slots * kv_heads * (width * dtype.itemsize + 4 * (dtype.itemsize == 1))
            share(f"paged decode, {sequences} of {context}, {str(dtype)[6:]}", moved, lambda c, q=q, p=plan: paged_attention(q, c, p, 0.09, None, "triton"), cache)
        group = group_of(width)
        cache = Cache(*(encode(randn(slots, kv_heads, width), 4, group) for _ in range(2)), packed=(width, group))
        share(f"paged decode, {sequences} of {context}, int4", 2 * cache.keys.numel(), lambda c, q=q, p=plan: paged_attention(q, c, p, 0.09, None, "triton"), cache)
        block = 64 if context > 64 else 32
        plan = replace(plan, block_tables=torch.randperm(slots // block, device=DEVICE).int().reshape(sequences, -1), block_size=block)
        pages = [randn(sequences * block, kv_heads, width, dtype=torch.float16) for _ in range(2)]
        last = torch.arange(1, sequences + 1, dtype=torch.int32, device=DEVICE) * block - 1  # each sequence's block is full
        for name, bits in BITS.items():
            codes = (encode(randn(slots // block, kv_heads, width, block), bits, 32), encode(randn(slots, kv_heads, width), bits, group))
            held = KiviCache(*codes, *pages, bits, block, group)
            moved = (1 - block / context) * (codes[0].numel() + codes[1].numel()) + 4 * pages[0].numel()
            share(f"paged decode, {sequences} of {context}, {name}", moved, lambda c, q=q, p=plan, rows=last: kivi_attention(q, c, p, rows, 0.09), held)
    return figures


def attention(s: Sizes) -> list[Figure]:
    """Operations: two products forward and five backward, each of half a square (causal)."""
    from karui.kernels.document_attention import document_attention

    heads, kv_heads, width = s.heads
    q, k, v = (randn(1, h, s.attention, width, dtype=torch.bfloat16).requires_grad_() for h in (heads, kv_heads, kv_heads))
    cu, grad = torch.tensor([0, s.attention], device=DEVICE), randn(1, s.attention, heads, width, dtype=torch.bfloat16)
    flops = 4 * s.attention**2 * heads * width / 2 / 1e9

    def run(backend: str, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            out = document_attention(q, k, v, cu, 0.09, backend=backend)
        if backward:
            torch.autograd.grad(out, (q, k, v), grad)

    figures = []
    for name, backward in (("forward", False), ("forward and backward", True)):
        ours, peer = (flops * (3.5 if backward else 1) / milliseconds(lambda b=b, other=backward: run(b, other), 8) for b in ("triton", "torch"))
        figures.append(Figure(name=f"ragged attention {name}, {s.attention} tokens", ours=ours, unit="TFLOP/s", peer=peer, peer_name="torch sdpa"))
    return figures


def llama(layers: int = 16, experts: int = 0, **changes: Any) -> Any:
    """A random llama, or with experts a mixtral of two per token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"num_local_experts": experts, "num_experts_per_tok": 2} if experts else {}
    kind = "mixtral" if experts else "llama"
    config = AutoConfig.for_model(kind, num_hidden_layers=layers, max_position_embeddings=8192, tie_word_embeddings=True, **(sizes | changes))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokens_of(s: Sizes, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, s.batch, device=DEVICE)


def packed_loss(model: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The mean loss as karui's trainer computes it: the rows of `tokens` [n, length] as packed documents, lean operations, a fused head."""
    from karui.trainers.data import IGNORE
    from karui.trainers.model import ATTENTION, LossSum, base_model, install_lean_ops, register_attention

    register_attention()
    base_model(model).set_attn_implementation(ATTENTION)
    install_lean_ops(model)
    loss_sum, (rows, length) = LossSum(model, 4096), tokens.shape
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)], 1).flatten()
    positions, borders = torch.arange(length, device=DEVICE).repeat(rows), torch.arange(0, rows * length + 1, length, device=DEVICE)
    return lambda: loss_sum(tokens.flatten(), positions, borders, targets) / (rows * (length - 1))


def training(s: Sizes) -> list[Figure]:
    """All parameters trained: bf16 in karui's trainer and as transformers has it, then each recipe beside the faster of the two."""
    from karui.kernels.triton_support import capability
    from karui.lowprec import LowPrecision, Precision

    def per_second(recipe: str | None, ours: bool = True) -> float:
        model = llama(s.layers, **s.model)
        tokens = tokens_of(s, model.config.vocab_size)
        low = LowPrecision(Precision.parse(recipe)) if recipe else None
        if low is not None:
            low.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if low is not None:
            low.attach(optimizer)
        loss_of = packed_loss(model, tokens) if ours else lambda: model(tokens, labels=tokens).loss

        def step() -> None:
            loss_of().backward()
            optimizer.step()
            optimizer.zero_grad()

        return math.prod(s.batch) / milliseconds(step, 5) * 1e3

    name = f"step of a llama of {s.layers} layers, bf16"
    theirs = per_second(None, ours=False)
    settle()
    try:
        bf16 = per_second(None)
        figures = [Figure(name=name, ours=bf16, unit="tokens/s", peer=theirs, peer_name="transformers")]
    except Exception as problem:
        bf16, figures = theirs, [failure(name, problem)]
    plain = max(bf16, theirs)
    for recipe, needs in RECIPES.items():
        if left() < 45:
            figures.append(no_time(f"step, {recipe}"))
            continue
        try:
            settle()
            goal = 1.2 if GPU and capability(DEVICE) >= needs else None
            figures.append(Figure(name=f"step, {recipe}", ours=per_second(recipe), unit="tokens/s", peer=plain, peer_name="bf16, the faster", goal=goal))
        except Exception as problem:
            figures.append(failure(f"step, {recipe}", problem))
    return figures


def qlora_step(model: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """karui's QLoRA step (NF4 with double quantization, rank 16 on every linear); gives the mean loss."""
    from karui.adapters.lora import attach

    step: Any = SimpleNamespace(  # what a recipe's step has, without the package that reads recipes
        base=QuantSpec.parse("nf4dq"), rank=16, alpha=32.0, scaling=2.0, rslora=False, dora=False, dropout=0.0, init="kaiming",
        targets="all-linear", train_also=())  # fmt: skip
    adapted = attach(model, step).model.to(DEVICE)
    return _steps(adapted, packed_loss(adapted, tokens))


def peft_step(model: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The same by peft over bitsandbytes' 4-bit linears."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    head = model.get_output_embeddings()
    for name, linear in [(n, m) for n, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head]:
        four = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        four.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, four.to(DEVICE))
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    return _steps(adapted, lambda: adapted(tokens, labels=tokens).loss)


def _steps(model: Any, loss_of: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=GPU)

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def qlora(s: Sizes) -> list[Figure]:
    missing = [name for name in ("peft", "bitsandbytes") if find_spec(name) is None]
    name = f"QLoRA step of a llama of {s.layers} layers, nf4dq, rank 16"
    if "peft" in missing:
        return [Figure(name=name, ours=None, unit="tokens/s", note="peft not installed")]

    def speed(make: Callable[[Any, torch.Tensor], Callable[[], torch.Tensor]]) -> float:
        model = llama(s.layers, **s.model)
        return math.prod(s.batch) / milliseconds(make(model, tokens_of(s, model.config.vocab_size)), 5) * 1e3

    ours = speed(qlora_step)
    settle()
    peer, note = None, f"{' and '.join(missing)} not installed" if missing else ""
    if not missing:
        try:
            peer = speed(peft_step)
        except Exception as problem:
            note = f"the peer {FAILED}{type(problem).__name__}: {str(problem)[:200]}"
    return [Figure(name=name, ours=ours, unit="tokens/s", peer=peer, peer_name="peft + bitsandbytes", note=note)]


def lora(s: Sizes) -> list[Figure]:
    """Base product and update: karui's kernel against torch's three products."""
    from karui.kernels.gemm_weight import pack_weight
    from karui.kernels.gemm_weight.triton import gemm_lora
    from karui.kernels.lora.triton import low_rank_matmul
    from karui.kernels.quantize import quantize

    figures, (m, n, few) = [], s.lora
    x, w = (randn(rows, n, dtype=torch.bfloat16) for rows in (m, n))
    for rank in (16, 64):
        a, b = randn(rank, n, dtype=torch.bfloat16), randn(n, rank, dtype=torch.bfloat16)
        flops = 2 * m * n * (n + 2 * rank) / 1e9
        ours = flops / milliseconds(lambda a=a, b=b: low_rank_matmul(x, w.t(), a.t(), b.t(), 2.0))
        peer = flops / milliseconds(lambda a=a, b=b: torch.mm(x, w.t()).addmm_(torch.mm(x, a.t()).mul_(2.0), b.t()))
        figures.append(Figure(name=f"LoRA forward, {m}x{n}x{n}, rank {rank}", ours=ours, unit="TFLOP/s", peer=peer, peer_name="torch, 3 products"))
    packed = pack_weight(quantize(w, QuantSpec.parse("nf4")))
    ours = cold_milliseconds(lambda p: gemm_lora(x[:few], p, None, a, b, 2.0), packed, packed.num_bytes, s)
    figures.append(Figure(name=f"LoRA over nf4, {few} rows, {n}x{n}, rank 64", ours=ours, unit="ms", better="lower"))
    return figures


def engine(s: Sizes) -> list[Figure]:
    """Tokens per second of a prompt alone, beside transformers' generate, and of many at once; no prompt is met twice."""
    from karui.inference.cache.kv import bytes_per_token
    from karui.inference.engine import Engine
    from karui.inference.models.config import from_hf
    from karui.inference.models.gpu import TritonRunner
    from karui.inference.models.weights import canonical
    from karui.inference.requests import SamplingParams
    from karui.kernels.quantize import quantize

    model = llama(s.layers, **s.model).eval()
    config = from_hf(model.config.to_dict())
    per_token = bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(0, model.config.vocab_size, (count, s.prompt)).tolist()

    def generate(given: list[list[int]]) -> int:
        ids = torch.tensor(given, device=DEVICE)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=s.new, min_new_tokens=s.new, do_sample=False, pad_token_id=0)
        return out.numel() - ids.numel()

    def per_second(run: Callable[[list[list[int]]], int], count: int) -> float:
        if GPU:
            run(prompts(count))
        given, begin = prompts(count), time.perf_counter()
        made = run(given)
        if GPU:
            torch.cuda.synchronize()
        return made / (time.perf_counter() - begin)

    peer, figures = per_second(generate, 1), []
    weights = canonical({name: w for name, w in model.state_dict().items() if name != "lm_head.weight"})
    for name, spec in (("bf16", None), (s.grid, s.grid)):
        made = {n: quantize(w, QuantSpec.parse(spec)) if spec and w.ndim == 2 and "embed" not in n else w for n, w in weights.items()}
        served = Engine(TritonRunner(config, made, DEVICE, torch.bfloat16 if GPU else torch.float32), kv_dtype="bfloat16",
                        memory=2 * s.requests * (s.prompt + s.new + 64) * per_token, max_context=s.prompt + s.new + 16, max_sequences=s.requests)  # fmt: skip

        def run(given: list[list[int]], served: Any = served) -> int:
            outputs = served.generate(given, SamplingParams(max_tokens=s.new))
            return sum(len(c.token_ids) for o in outputs for c in o.completions)

        figures.append(Figure(name=f"engine decode {name}, batch 1", ours=per_second(run, 1), unit="tokens/s", peer=peer, peer_name="transformers generate", goal=None if spec else 5.0))
        figures.append(Figure(name=f"engine throughput {name}, {s.requests} requests", ours=per_second(run, s.requests), unit="tokens/s"))
        if spec:
            figures.append(with_adapter(served, prompts, s, per_second))
        del served, run
        settle()
    return [*figures, streamed(config, made, prompts, s, per_second)]


def with_adapter(served: Any, prompts: Any, s: Sizes, per_second: Any) -> Figure:
    """All linears adapted with rank 16, a prompt alone, beside the same engine's base."""
    from karui.inference.models.decoder import LoraWeights
    from karui.inference.requests import Request, SamplingParams

    runner = served.runner
    layers = {part: LoraWeights(randn(16, runner.dense_weight(part).shape[1]), randn(own.stop - own.start, 16) * 1e-3, 1.0)
              for parts in runner._parts.values() for part, own in parts.items() if part.startswith("model.layers.")}  # fmt: skip
    runner.set_adapter(0, layers)
    served._adapters["measured"] = (0, 0)

    def run(given: list[list[int]], adapter: str | None) -> int:
        outputs = served.generate([Request(prompt=p, params=SamplingParams(max_tokens=s.new), adapter=adapter) for p in given])
        return sum(len(c.token_ids) for o in outputs for c in o.completions)

    base, adapted = (per_second(lambda given, a=a: run(given, a), 1) for a in (None, "measured"))
    return Figure(name="engine decode with an adapter, batch 1", ours=adapted, unit="tokens/s", peer=base, peer_name="without")


def streamed(config: Any, made: Any, prompts: Any, s: Sizes, per_second: Any) -> Figure:
    """Half of the layers' bytes come over the bus in every step, beside what the bus allows."""
    from karui.inference.engine import Engine
    from karui.inference.models.gpu import TritonRunner
    from karui.inference.requests import SamplingParams

    name = "engine decode, weights beyond weight_memory"
    if not GPU:
        return Figure(name=name, ours=None, unit="tokens/s", note="copies beside kernels need a GPU")
    whole = TritonRunner(config, made, DEVICE, torch.bfloat16, graphs=False).weight_bytes()
    settle()
    runner = TritonRunner(config, made, DEVICE, torch.bfloat16, weight_memory=int(0.7 * whole))
    assert runner._streamed is not None
    moved = sum(runner._streamed.sizes[i] for i in runner._away)
    host = torch.empty(moved, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(moved, dtype=torch.uint8, device=DEVICE)
    ceiling = 1e3 / milliseconds(lambda: there.copy_(host, non_blocking=True))
    served = Engine(runner, kv_dtype="bfloat16", memory="1GiB", max_context=s.prompt + s.new + 16, max_sequences=1)

    def run(given: list[list[int]]) -> int:
        return sum(len(c.token_ids) for o in served.generate(given, SamplingParams(max_tokens=s.new)) for c in o.completions)

    note = f"{moved / 1e6:.0f} of {whole / 1e6:.0f} MB come in every step"
    return Figure(name=name, ours=per_second(run, 1), unit="tokens/s", peer=ceiling,
                  peer_name="the bus", note=note)  # fmt: skip


PARTS = ("ceilings", "GEMMs", "attention", "decoding", "engine", "LoRA", "quantizers", "experts", "QLoRA", "training")


def speed_parts(s: Sizes) -> dict[str, Callable[[], list[Figure]]]:
    """The speed half by part; a part that compares with a ceiling measures it first where none has."""
    found: list[tuple[float | None, float | None, list[Figure]]] = []

    def ceiling(i: int) -> Any:
        if not found:
            try:
                found.append(ceilings(s))
            except Exception as problem:  # figures without a peer are figures still
                found.append((None, None, [failure("ceilings", problem)]))
        return found[0][i]

    return dict(zip(PARTS, (
        lambda: ceiling(2), lambda: gemms(s, ceiling(1)), lambda: attention(s), lambda: decoding(s, ceiling(0)), lambda: engine(s), lambda: lora(s),
        lambda: quantizers(s, ceiling(0)), lambda: experts(s, ceiling(1), ceiling(0)), lambda: qlora(s), lambda: training(s),
    )))  # fmt: skip


def measured(name: str, parts: dict[str, Callable[[], list[Figure]]]) -> list[Figure]:
    if left() < 30:
        return [no_time(name)]
    try:
        settle()
        return parts[name]()
    except Exception as problem:
        return [failure(name, problem)]


def speed(s: Sizes, keep: Callable[[list[Figure]], None] = lambda figures: None) -> list[Figure]:
    """All parts, one after the other in this process; `keep` is called after each with all figures so far."""
    figures: list[Figure] = []
    parts = speed_parts(s)
    for name in parts:
        figures += measured(name, parts)
        keep(figures)
    return figures


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        half, names, out, seconds = sys.argv[2:]
        worker(half, json.loads(names), Path(out), float(seconds))
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=("correctness", "speed"), help="one half")
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, Triton's interpreter"
    figures: list[Figure] = []
    chosen: dict[str, str] = {}

    def keep(found: list[Figure]) -> None:
        if given.json:  # what was measured so far survives a kill
            given.json.write_text(json.dumps([vars(f) for f in figures + found], indent=1))

    names = [] if given.only == "speed" else list(checks())
    if GPU:
        lists = [part for i in range(PROCESSES) if (part := names[i::PROCESSES])]
        warm = [] if given.only == "correctness" else [[name] for name in PARTS[1:]]
        figures, _ = in_processes("correctness", lists, BUDGET_S - FOR_SPEED_S, keep, warm)
    elif names:
        figures = correctness()
    for f in figures:
        if f.met is False or f.note.startswith(FAILED):
            print(f"WRONG {f.name}: {f.ours} > {f.goal} {f.note}", flush=True)
    if GPU and given.only != "correctness":
        found, chosen = in_processes("speed", [list(PARTS)], left(), keep)
        figures = figures + found
    elif not GPU:
        print("no GPU: the speed half needs one")
    import triton

    report(figures, given.json, gpu=where, triton=triton.__version__, cuda=torch.version.cuda, seconds=round(time.monotonic() - START),
           configurations=chosen)  # fmt: skip
    return exit_code(figures)


def exit_code(figures: list[Figure]) -> int:
    """1 when a comparison is wrong or anything failed."""
    return int(any(FAILED in f.note or (f.name.startswith("correct") and f.met is False) for f in figures))


if __name__ == "__main__":
    sys.exit(main())
