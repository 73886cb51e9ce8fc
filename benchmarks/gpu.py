"""Kernels, training step and engine on one GPU: correctness against float64 first, then shares of ceilings measured in the same run.

    python benchmarks/gpu.py --json out.json            one card, under 8 minutes, no network; torch, triton, transformers
    python benchmarks/gpu.py --only correctness         on a CPU this is all there is: tiny shapes, Triton's interpreter

Ceilings: the best of a few large copies (GB/s), and of torch's bf16 product at 8192^3 (TFLOP/s). Times are the median of CUDA-event
timings after a warm-up, with the L2 cache cleared between runs where an operand would fit in it. Parts that no time is left for say so.
Kernel configurations are timed once per shape (`triton_support.tuning`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import json  # noqa: E402
import platform  # noqa: E402

from figures import Figure, arguments, report  # noqa: E402

from karui.configs.quantspec import QuantSpec  # noqa: E402
from karui.kernels.triton_support import has_triton, tuning  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
START = time.monotonic()
BUDGET_S = 440.0
RECIPES = ("fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8")


def left() -> float:
    return BUDGET_S - (time.monotonic() - START)


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

    made["linear cross entropy"] = (loose, entropy)

    def distilled(kind: str) -> float:
        teacher = randn(17, 501) * 2

        def exact(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return loss_reference.loss_sum(h, w, teacher.double(), lambda t, s: loss_reference.divergence(kind, t, s, 0.3), 1.5)

        return differentiated(lambda h, w: linear_loss(h, w, divergence_rows(kind, teacher, temperature=1.5, beta=0.3), 8)[0], exact,
                              randn(17, 48, dtype=half), randn(501, 48, dtype=half))

    for kind in ("forward_kl", "reverse_kl", "jsd"):
        made[f"linear distillation, {kind}"] = (loose, lambda kind=kind: distilled(kind))

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

    def attention() -> float:
        cu = torch.tensor([0, 9 * big, 9 * big + 1, 21 * big], device=DEVICE)
        q, k, v = (randn(1, h, 21 * big, 64 if GPU else 16, dtype=half) for h in (4, 2, 2))
        return differentiated(lambda q, k, v: document_attention.document_attention(q, k, v, cu, 0.125, backend="triton"),
                              lambda q, k, v: attention_reference.document_attention(q, k, v, cu, 0.125).transpose(1, 2), q, k, v)

    made["ragged attention"] = (loose, attention)

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
        scaled = dtype in (torch.int8, torch.float8_e4m3fn)
        keys, values = (torch.zeros(256, heads, width, device=DEVICE).to(dtype) for _ in range(2))
        scales = [torch.zeros(256, heads, device=DEVICE) for _ in range(2)] if scaled else [None, None]
        cache = paged_attention.Cache(keys, values, *scales)
        slots = torch.arange(256, device=DEVICE, dtype=torch.int32)
        paged_attention.write_kv(randn(256, heads, width), randn(256, heads, width), slots, cache, "triton")
        tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
        words = paged_attention.tree_words([tree, None], [3, 1]).to(DEVICE)
        tables = torch.randperm(16)[:8].reshape(2, 4).to(DEVICE, torch.int32)
        plan = paged_attention.Plan(*(torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, 3, 4], [60, 33])), tables, block, 3, words)
        q = randn(4, 8, width, dtype=half)
        want = paged_attention.paged_attention(q, cache, plan, 0.2, None, "torch")
        return max(relative(kernel.paged_attention(q, cache, plan, 0.2, None, parts=n), want) for n in (1, 3))

    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        made[f"paged attention {str(dtype)[6:]}"] = (2e-2, lambda dtype=dtype: paged(dtype))

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
    figures = []
    for name, (bound, run) in checks().items():
        try:
            error, note = run(), ""
        except Exception as problem:  # one broken kernel must not hide the others
            error, note = float("inf"), f"{type(problem).__name__}: {str(problem)[:200]}"
        figures.append(Figure(name=f"correct: {name}", ours=error, unit="error", goal=bound, better="lower", note=note))
    return figures


# -- speed


def milliseconds(run: Callable[[], Any], repeats: int = 15, flush: bool = True) -> float:
    """Median time of one run."""
    cold = torch.empty(64 * 2**20, dtype=torch.int32, device=DEVICE) if flush else None
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        if cold is not None:
            cold.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def in_graph(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as a CUDA graph, as decoding runs it: launches cost nothing."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def ceilings() -> tuple[float, float, list[Figure]]:
    a = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    copy = 2 * a.numel() / milliseconds(lambda: b.copy_(a), flush=False) / 1e6
    x, y = randn(8192, 8192, dtype=torch.bfloat16), randn(8192, 8192, dtype=torch.bfloat16)
    product = 2 * 8192**3 / milliseconds(lambda: x @ y.t(), flush=False) / 1e9
    return copy, product, [Figure(name="ceiling: copy", ours=copy, unit="GB/s"), Figure(name="ceiling: bf16 8192^3", ours=product, unit="TFLOP/s")]


def gemms(bf16: float) -> list[Figure]:
    from karui.kernels.gemm_fp8 import gemm_fp8
    from karui.kernels.gemm_mx import gemm_mx
    from karui.kernels.quantize.scaled_float8 import ScaledFloat8
    from karui.kernels.train_quantize import quantize_both
    from karui.kernels.triton_support import obstacle

    if obstacle(DEVICE, 89):
        return [Figure(name="FP8 GEMM", ours=None, unit="TFLOP/s", note=obstacle(DEVICE, 89))]
    n, figures = 8192, []
    x = randn(n, n, dtype=torch.bfloat16)
    flops = 2 * n**3 / 1e9
    for a_kind, b_kind, goal in (("tensor", "tensor", None), ("row", "row", None), ("1x128", "128x128", 1.5), ("1x128", "1x128", None)):
        a, b = (quantize_both(x, f"e4m3-{k}", cols=False)[0] for k in (a_kind, b_kind))
        left_, right = (ScaledFloat8(q.codes, q.scale, q.tile) for q in (a, b))
        speed = flops / milliseconds(lambda l=left_, r=right: gemm_fp8(l, r, torch.bfloat16, "triton"), flush=False)
        figures.append(Figure(name=f"FP8 GEMM {a_kind} x {b_kind}, 8192^3", ours=speed, unit="TFLOP/s", peer=bf16, peer_name="torch bf16", goal=goal))
    if not obstacle(DEVICE, 100):
        for kind in ("mxfp8", "mxfp4", "nvfp4"):
            a, _ = quantize_both(x, kind, cols=False)
            speed = flops / milliseconds(lambda a=a: gemm_mx(a, a, torch.bfloat16, "triton"), flush=False)
            figures.append(Figure(name=f"GEMM {kind}, 8192^3", ours=speed, unit="TFLOP/s", peer=bf16, peer_name="torch bf16"))
    return figures


def experts(bf16: float, copy: float) -> list[Figure]:
    """16 experts of 4096 x 2048: a training step's rows, and a token's four experts in decoding."""
    from karui.kernels.gemm_grouped import gemm_grouped, group_rows
    from karui.kernels.gemm_weight import PackedWeight, gemm_weight

    num, n, k = 16, 4096, 2048
    w, x = randn(num, n, k, dtype=torch.bfloat16), randn(16384, k, dtype=torch.bfloat16)
    groups = group_rows(torch.randint(0, num, (16384,), device=DEVICE), num)
    speed = 2 * 16384 * n * k / milliseconds(lambda: gemm_grouped(x, w, groups), flush=False) / 1e9
    figures = [Figure(name="grouped GEMM bf16, 16384 rows", ours=speed, unit="TFLOP/s", peer=bf16, peer_name="torch bf16 8192^3")]
    few = group_rows(torch.tensor([1, 4, 9, 15], device=DEVICE), num)
    packed = PackedWeight(torch.randint(0, 256, (num * n, k // 2), dtype=torch.uint8, device=DEVICE),
                          torch.rand(num * n, k // 128, device=DEVICE).half(), None, None, 4, 8, (num * n, k))
    for name, moved, run in (("bf16", 4 * n * k * 2, lambda: gemm_grouped(x[:4], w, few)),
                             ("W4 g128", packed.num_bytes / 4, lambda: gemm_weight(x[:4], packed, groups=few))):
        run()  # tunes outside of the graph
        speed = moved / milliseconds(in_graph(run)) / 1e6
        figures.append(Figure(name=f"4 of 16 experts {name}, 1 row each", ours=speed, unit="GB/s", peer=copy, peer_name="copy"))
    return figures


def quantizers(copy: float) -> list[Figure]:
    from karui.kernels.train_quantize import quantize_both

    x, figures = randn(8192, 8192, dtype=torch.bfloat16), []
    for kind, out in (("e4m3-1x128", 1.0), ("e4m3-128x128", 1.0), ("mxfp8", 1.0), ("mxfp4", 0.5), ("nvfp4", 0.5)):
        moved = x.numel() * (2 + 2 * out + (2 if kind == "nvfp4" else 0))
        speed = moved / milliseconds(lambda kind=kind: quantize_both(x, kind, backend="triton")) / 1e6
        figures.append(Figure(name=f"quantize {kind}, rows and columns", ours=speed, unit="GB/s", peer=copy, peer_name="copy"))
    return figures


def decoding(copy: float) -> list[Figure]:
    from karui.kernels.gemm_weight import PackedWeight, gemm_float8, gemm_int8, gemm_weight, pack_weight, takes_float8, takes_int8
    from karui.kernels.paged_attention import Cache, Plan, paged_attention
    from karui.kernels.quantize import quantize
    from karui.kernels.triton_support import obstacle

    figures, n, k = [], 28672, 8192
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    for group in (128, 32):
        w = PackedWeight(data, torch.rand(n, k // group, device=DEVICE).half(), None, None, 4, 8, (n, k))
        for m in (1, 16):
            x = randn(m, k, dtype=torch.bfloat16)
            gemm_weight(x, w)  # tunes outside of the graph
            speed = w.num_bytes / milliseconds(in_graph(lambda x=x, w=w: gemm_weight(x, w))) / 1e6
            goal = 0.75 if (m, group) == (1, 128) else None
            figures.append(Figure(name=f"W4A16 g{group}, {m} rows, {n}x{k}", ours=speed, unit="GB/s", peer=copy, peer_name="copy", goal=goal))
    for spec in ("fp8", "nvfp4", "w8", "w1.58"):
        w = pack_weight(quantize(randn(4096, 8192), QuantSpec.parse(spec)))
        forms = {"A16": gemm_weight} | ({"A8": gemm_float8} if takes_float8(w) and not obstacle(DEVICE, 89) else {})
        forms |= {"A8": gemm_int8} if takes_int8(w) else {}
        for name, product in forms.items():
            x = randn(1, 8192, dtype=torch.bfloat16)
            product(x, w)  # tunes outside of the graph
            speed = w.num_bytes / milliseconds(in_graph(lambda x=x, w=w, f=product: f(x, w))) / 1e6
            figures.append(Figure(name=f"{spec} {name}, 1 row, 4096x8192", ours=speed, unit="GB/s", peer=copy, peer_name="copy"))
    for name, sequences, context, eight in (("32 sequences", 32, 4096, False), ("32 sequences", 32, 4096, True), ("1 sequence", 1, 32768, False)):
        blocks = sequences * context // 16
        slots = blocks * 16
        dtype = torch.float8_e4m3fn if eight else torch.bfloat16
        scales = [torch.rand(slots, 8, device=DEVICE) if eight else None for _ in range(2)]
        cache = Cache(*(randn(slots, 8, 128, dtype=torch.bfloat16).to(dtype) for _ in range(2)), *scales)
        tables = torch.randperm(blocks, device=DEVICE).int().reshape(sequences, -1)
        plan = Plan(torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE), torch.full((sequences,), context, dtype=torch.int32, device=DEVICE), tables, 16, 1)
        q = randn(sequences, 32, 128, dtype=torch.bfloat16)
        moved = 2 * slots * 8 * (128 * dtype.itemsize + (4 if eight else 0))
        speed = moved / milliseconds(in_graph(lambda q=q, c=cache, p=plan: paged_attention(q, c, p, 0.09))) / 1e6
        figures.append(Figure(name=f"paged decode, {name} of {context}{', fp8' if eight else ''}", ours=speed, unit="GB/s", peer=copy, peer_name="copy"))
        del cache
    return figures


def attention(bf16: float) -> list[Figure]:
    from karui.kernels.document_attention import document_attention

    tokens, heads, width = 8192, 32, 128
    q, k, v = (randn(1, h, tokens, width, dtype=torch.bfloat16).requires_grad_() for h in (heads, 8, 8))
    cu = torch.tensor([0, tokens], device=DEVICE)
    flops = 4 * tokens**2 * heads * width / 2 / 1e9
    figures = []
    for name, other in (("forward", False), ("forward and backward", True)):
        def run(backend: str, other: bool = other) -> None:
            out = document_attention(q, k, v, cu, 0.09, backend=backend)
            if other:
                out.sum().backward()
        speeds = [flops * (3.5 if other else 1) / milliseconds(lambda b=b: run(b), 8, False) for b in ("triton", "torch")]
        figures.append(Figure(name=f"ragged attention {name}, 8192 tokens", ours=speeds[0], unit="TFLOP/s", peer=speeds[1], peer_name="torch sdpa"))
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


def training() -> list[Figure]:
    from karui.lowprec import LowPrecision, Precision

    tokens = torch.randint(0, 32000, (2, 4096), device=DEVICE)

    def step_ms(recipe: str | None) -> float:
        model = llama()
        low = LowPrecision(Precision.parse(recipe)) if recipe else None
        if low is not None:
            low.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if low is not None:
            low.attach(optimizer)

        def step() -> None:
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return milliseconds(step, 5, False)

    plain = tokens.numel() / step_ms(None) * 1e3
    figures = [Figure(name="step of a 1B llama, bf16", ours=plain, unit="tokens/s")]
    for recipe in RECIPES:
        if left() < 150:
            figures.append(Figure(name=f"step, {recipe}", ours=None, unit="tokens/s", note="no time was left"))
            continue
        try:
            torch.cuda.empty_cache()
            figures.append(Figure(name=f"step, {recipe}", ours=tokens.numel() / step_ms(recipe) * 1e3, unit="tokens/s", peer=plain, peer_name="bf16", goal=1.2))
        except Exception as problem:
            figures.append(Figure(name=f"step, {recipe}", ours=None, unit="tokens/s", note=f"{type(problem).__name__}: {str(problem)[:200]}"))
    return figures


def qlora_step(model: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """karui's QLoRA step (NF4 with double quantization, rank 16 on every linear) on the rows of `tokens` [n, length] as packed
    documents; gives the mean loss."""
    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep
    from karui.trainers.data import IGNORE
    from karui.trainers.model import ATTENTION, LossSum, install_lean_ops, register_attention

    register_attention()
    model.set_attn_implementation(ATTENTION)
    adapted = attach(model, LoraStep(method="qlora", base="nf4dq", rank=16, alpha=32)).model.to(DEVICE)
    install_lean_ops(adapted)
    loss_sum, (rows, length) = LossSum(adapted, 4096), tokens.shape
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)], 1).flatten()
    positions, borders = torch.arange(length, device=DEVICE).repeat(rows), torch.arange(0, rows * length + 1, length, device=DEVICE)
    return _steps(adapted, lambda: loss_sum(tokens.flatten(), positions, borders, targets) / (rows * (length - 1)))


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


def qlora() -> list[Figure]:
    from importlib.util import find_spec

    missing = [name for name in ("peft", "bitsandbytes") if find_spec(name) is None]
    tokens = torch.randint(0, 32000, (2, 4096), device=DEVICE)
    ours = tokens.numel() / milliseconds(qlora_step(llama(), tokens), 5, False) * 1e3
    torch.cuda.empty_cache()
    peer, note = None, f"{' and '.join(missing)} not installed" if missing else ""
    if not missing:
        try:
            peer = tokens.numel() / milliseconds(peft_step(llama(), tokens), 5, False) * 1e3
        except Exception as problem:
            note = f"the peer failed: {type(problem).__name__}: {str(problem)[:200]}"
    return [Figure(name="QLoRA step of a 1B llama, nf4dq, rank 16", ours=ours, unit="tokens/s", peer=peer, peer_name="peft + bitsandbytes", note=note)]


def lora() -> list[Figure]:
    """Base product and update: karui's kernel against torch's three products."""
    from karui.kernels.gemm_weight import pack_weight
    from karui.kernels.gemm_weight.triton import gemm_lora
    from karui.kernels.lora.triton import low_rank_matmul
    from karui.kernels.quantize import quantize

    figures = []
    for rank in (16, 64):
        x, w, a, b = (randn(*s, dtype=torch.bfloat16) for s in ((8192, 4096), (4096, 4096), (rank, 4096), (4096, rank)))
        flops = 2 * 8192 * 4096 * (4096 + 2 * rank) / 1e9
        ours = flops / milliseconds(lambda x=x, w=w, a=a, b=b: low_rank_matmul(x, w.t(), a.t(), b.t(), 2.0), flush=False)
        peer = flops / milliseconds(lambda x=x, w=w, a=a, b=b: torch.mm(x, w.t()).addmm_(torch.mm(x, a.t()).mul_(2.0), b.t()), flush=False)
        figures.append(Figure(name=f"LoRA forward, 8192x4096x4096, rank {rank}", ours=ours, unit="TFLOP/s", peer=peer, peer_name="torch, 3 products"))
    packed = pack_weight(quantize(w, QuantSpec.parse("nf4")))
    few = x[:256]
    ours = milliseconds(lambda: gemm_lora(few, packed, None, a, b, 2.0))
    figures.append(Figure(name="LoRA over nf4, 256 rows, 4096x4096, rank 64", ours=ours, unit="ms", better="lower"))
    return figures


def engine() -> list[Figure]:
    from karui.inference.engine import Engine
    from karui.inference.models.config import from_hf
    from karui.inference.models.gpu import TritonRunner
    from karui.inference.requests import SamplingParams
    from karui.kernels.quantize import quantize

    model = llama().eval()
    prompt = torch.randint(0, 32000, (128,)).tolist()
    new = 256

    def generate() -> None:
        model.generate(torch.tensor([prompt], device=DEVICE), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

    generate()
    begin = time.monotonic()
    generate()
    torch.cuda.synchronize()
    peer = new / (time.monotonic() - begin)
    weights = {name: w for name, w in model.state_dict().items() if name != "lm_head.weight"}
    config = from_hf(model.config.to_dict())
    figures = []
    for name, spec in (("bf16", None), ("w4g128", "w4g128")):
        made = {n: quantize(w, QuantSpec.parse(spec)) if spec and w.ndim == 2 and "embed" not in n else w for n, w in weights.items()}
        served = Engine(TritonRunner(config, made, DEVICE), memory=8 << 30, max_context=2048, kv_dtype="bfloat16", max_sequences=64)
        params = SamplingParams(max_tokens=new)
        served.generate([prompt], params)
        begin = time.monotonic()
        served.generate([prompt], params)
        speed = new / (time.monotonic() - begin)
        figures.append(Figure(name=f"engine decode {name}, batch 1", ours=speed, unit="tokens/s", peer=peer, peer_name="transformers generate", goal=5.0 if spec is None else None))
        batch = [[*prompt[:-1], i] for i in range(64)]
        served.generate(batch, params)
        begin = time.monotonic()
        served.generate(batch, params)
        figures.append(Figure(name=f"engine throughput {name}, 64 requests", ours=64 * new / (time.monotonic() - begin), unit="tokens/s"))
        del served
        torch.cuda.empty_cache()
    return figures


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=("correctness", "speed"), help="one half")
    given = parser.parse_args()
    if not has_triton():
        print("Triton is not installed: pip install 'karui[triton]'")
        return 1
    figures = correctness() if given.only != "speed" else []
    for f in figures:
        if not f.met:
            print(f"WRONG {f.name}: {f.ours} > {f.goal} {f.note}", flush=True)
    if GPU and given.only != "correctness":
        tuning.tune(True)
        copy, bf16, found = ceilings()
        figures += found
        for name, part in (("GEMMs", lambda: gemms(bf16)), ("decoding", lambda: decoding(copy)), ("quantizers", lambda: quantizers(copy)),
                           ("experts", lambda: experts(bf16, copy)),
                           ("engine", engine), ("attention", lambda: attention(bf16)), ("LoRA", lora), ("QLoRA", qlora),
                           ("training", training)):
            if left() < 60:
                figures.append(Figure(name=name, ours=None, unit="", note="no time was left"))
                continue
            try:
                figures += part()
            except Exception as problem:
                figures.append(Figure(name=name, ours=None, unit="", note=f"{type(problem).__name__}: {str(problem)[:300]}"))
            torch.cuda.empty_cache()
            if given.json:  # what was measured so far survives a kill
                given.json.write_text(json.dumps([vars(f) for f in figures], indent=1))
    elif not GPU:
        print("no GPU: the speed half needs one")
    import triton

    where = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, Triton's interpreter"
    report(figures, given.json, gpu=where, triton=triton.__version__, cuda=torch.version.cuda, seconds=round(time.monotonic() - START),
           configurations={str(k): str(v) for k, v in tuning.chosen().items()})
    return 1 if any(f.name.startswith("correct") and not f.met for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
