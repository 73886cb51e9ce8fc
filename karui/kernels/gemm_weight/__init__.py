"""y = x W^T for a W kept as 2-, 4- or 8-bit codes: decoded in registers on its way to the tensor cores, never written out.

    pack_weight(qtensor)           int 2 to 8 bits (symmetric, affine), ternary, binary, nf4, fp8, mxfp8, mxfp4, nvfp4
    gemm_weight(x, w)              the product, for a few rows (decoding) up to many
    gemm_weight_dgrad(dy, w)       dy W, for training on a frozen base (QLoRA, arXiv 2305.14314)
    dequantize_weight(w, dtype)    W itself, for products large enough that cuBLAS on a decoded copy wins
    gemm_int8(x, w)                W8A8 and ternary x int8: x quantized per row, products exact in int32
    gemm_float8(x, w)              W8A8 in E4M3: x quantized per row, products on FP8 tensor cores
    on_int8_rows(x)                x rounded to int8 per row and back: the input of W4A8

The three products take experts too: W [E * N, K] is their weights one after the other, the rows of x are in the order of `groups`
(`gemm_grouped.group_rows`), and y is [R, N].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.gemm_grouped import Groups, gemm_grouped
from karui.kernels.gemm_weight import reference
from karui.kernels.pack import pack
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.nf4 import block_absmax
from karui.kernels.triton_support import Backend, use_triton

# From this many rows on decoding W once and calling cuBLAS costs less than decoding it in every row of tiles.
DEQUANTIZE_ROWS = 512

Form = Literal["int", "nf4", "e4m3", "e2m1", "nvfp4"]
_BITS = {"ternary": 2, "binary": 2, "nf4": 4, "fp8": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
_STORED = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}  # bits of an int code -> of the field that holds it


@dataclass(frozen=True)
class PackedWeight:
    """W [N, K] as codes. What a code stands for is its `form`:

        int      (code - zero) * scale                nf4      its table's entry * scale
        e4m3     E4M3 * scale (fp8, mxfp8)            e2m1     E2M1 * scale (mxfp4)
        nvfp4    E2M1 * (scale / divisor)

    data: uint8 [N, K * bits / 8], lowest bits first (4 bits with high_first: the first of a pair in the high half).
    span: 0, or codes lie in words of 32 bits, lowest bits first: word j of each `span` inputs holds those of the inputs
        j + p * span / P for its P = 32 / bits places p.
    scale: fp32, bf16 or fp16 [N, G]; mxfp8, mxfp4: E8M0 in uint8; nvfp4: float8_e4m3fn [N, K / 16].
    zero: int32-valued uint8 [N, G] or None (then `middle`).  divisor: fp32 [N], nvfp4's scale of the whole tensor, row by row.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    middle: int
    shape: tuple[int, int]
    high_first: bool = False
    form: Form = "int"
    divisor: torch.Tensor | None = None
    span: int = 0

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it consists of, by field."""
        held = {name: getattr(self, name) for name in ("data", "scale", "zero", "divisor")}
        return {name: t for name, t in held.items() if t is not None}

    def to(self, device: torch.device | str) -> PackedWeight:
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors.items()}
        return replace(self, **moved)

    def rows(self, at: torch.Tensor) -> PackedWeight:
        """The weight of the rows `at` [n] int64: what a look-up in an embedding reads."""

        def pick(t: torch.Tensor) -> torch.Tensor:
            # torch does not index every 8-bit float on every device
            return t.view(torch.uint8)[at].view(t.dtype) if t.element_size() == 1 else t[at]

        picked: dict[str, Any] = {name: pick(t) for name, t in self.tensors.items()}
        return replace(self, **picked, shape=(len(at), self.shape[1]))

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def pack_weight(q: QTensor) -> PackedWeight:
    """A matrix [N, K] of the grids named above as `PackedWeight`.

    Raises:
        UnsupportedError: another grid, more than two dimensions, groups below 32, K no multiple of what fills a byte.
    """
    bits = _BITS.get(q.spec.format) or _STORED[q.spec.bits]
    if q.spec.format not in ("int", *_BITS) or len(q.shape) != 2:
        raise UnsupportedError(
            f"no packed kernel for {q.spec} of shape {q.shape}; kernels take matrices of int and {', '.join(_BITS)}."
        )
    n, k = q.shape
    if k % (8 // bits):
        raise UnsupportedError(f"{q.spec}: an input width of {k} does not fill whole bytes of {bits}-bit codes.")
    middle, divisor, codes, scale = 0, None, q.codes, q.scale
    form: Form = "int"
    if q.spec.format == "nf4":
        form, scale = "nf4", block_absmax(q)
    elif q.spec.format == "mxfp4":
        form, scale = "e2m1", q.scale.view(torch.uint8)
    elif q.spec.format in ("fp8", "mxfp8"):
        form, codes = "e4m3", codes.view(torch.uint8)
        scale = q.scale.view(torch.uint8) if q.spec.format == "mxfp8" else scale
    elif q.spec.format == "nvfp4":
        assert q.extra is not None
        form, divisor = "nvfp4", q.extra["global_scale"].float().expand(n).contiguous()
    else:
        middle = 0 if q.zero is not None else 1 if q.spec.format in ("ternary", "binary") else 2 ** (bits - 1)
        codes = (codes.to(torch.int16) + middle).to(torch.uint8)
    scale = scale.expand(n, -1) if scale.shape[0] == 1 else scale
    group = k // scale.shape[1]
    if form != "nvfp4" and group < k and not takes_group(group):
        raise UnsupportedError(f"{q.spec}: groups of {group}; the kernels take powers of two from 32 on, or whole rows.")
    zero = None if q.zero is None else q.zero.contiguous()
    span = span_of(k, group, bits, form)
    data = pack(in_words(codes, span, bits) if span else codes, bits).contiguous()
    return PackedWeight(data, scale.contiguous(), zero, bits, middle, (n, k), form=form, divisor=divisor, span=span)


def span_of(k: int, group: int, bits: int = 4, form: Form = "int") -> int:
    """Inputs whose codes the kernels take together as words, 0 where they cannot. A tensor core takes 16 inputs of each place in
    a word at least, 32 of int8 (ternary weights), and these have one scale."""
    places = 32 // bits
    spans = {("nvfp4", 4): (128,), ("int", 4): (256, 128), ("e2m1", 4): (256, 128), ("nf4", 4): (256, 128),
             ("int", 2): (512,) if group == k else (512, 256)}  # fmt: skip
    fits = (span for span in spans.get((form, bits), ()) if k % span == 0 and (group == k or group % (span // places) == 0))
    return next(fits, 0)


def in_words(codes: torch.Tensor, span: int, bits: int = 4) -> torch.Tensor:
    """Codes [n, k] in the order in which `PackedWeight.span` puts them into words."""
    n, k = codes.shape
    return codes.view(n, k // span, 32 // bits, -1).transpose(2, 3).reshape(n, k)


def gemm_weight(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None, backend: Backend = "auto",
                groups: Groups | None = None) -> torch.Tensor:  # fmt: skip
    """x [..., K] (bf16, fp16, fp32) times W^T, plus bias [N]: [..., N] in x's dtype."""
    _check(x, w.shape[1], w, "gemm_weight")
    num_experts = _num_experts(x, w, bias, groups)
    if use_triton(backend, x.device, "gemm_weight", refused=_refused(x)):
        from karui.kernels.gemm_weight import triton, words

        rows = x.reshape(-1, w.shape[1])
        many = backend == "auto" and rows.shape[0] >= DEQUANTIZE_ROWS * num_experts
        if many or (w.span and x.dtype != torch.bfloat16):  # words are decoded to bf16
            dense = _dequantized(w, x.dtype)
            if groups is not None:
                return gemm_grouped(x, dense.view(num_experts, -1, w.shape[1]), groups)
            return torch.nn.functional.linear(x, dense, bias)
        product = words.gemm if w.span else triton.gemm
        return product(rows, w, bias, groups).view(*x.shape[:-1], w.shape[0] // num_experts)
    return reference.by_expert(reference.gemm_weight, x, w, bias, groups)


def gemm_weight_dgrad(dy: torch.Tensor, w: PackedWeight, backend: Backend = "auto") -> torch.Tensor:
    """dy [..., N] times W: [..., K] in dy's dtype."""
    _check(dy, w.shape[0], w, "gemm_weight_dgrad")
    if use_triton(backend, dy.device, "gemm_weight_dgrad", refused=_refused(dy)):
        from karui.kernels.gemm_weight import triton

        rows = dy.reshape(-1, w.shape[0])
        if w.span or (backend == "auto" and rows.shape[0] >= DEQUANTIZE_ROWS):
            return dy @ _dequantized(w, dy.dtype)
        return triton.dgrad(rows, w).view(*dy.shape[:-1], w.shape[1])
    return dy @ reference.dequantize(w, dy.dtype)


def dequantize_weight(w: PackedWeight, dtype: torch.dtype = torch.bfloat16, backend: Backend = "auto") -> torch.Tensor:
    """W [N, K], computed in fp32 and cast."""
    if use_triton(backend, w.data.device, "dequantize_weight"):
        return _dequantized(w, dtype)
    return reference.dequantize(w, dtype)


def _dequantized(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    from karui.kernels.gemm_weight import triton, words

    return (words if w.span else triton).dequantize(w, dtype)


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None, backend: Backend = "auto",
              groups: Groups | None = None) -> torch.Tensor:  # fmt: skip
    """As `gemm_weight` with x rounded to int8 per row first (scale absmax / 127); W symmetric, 2 or 8 bits, scales per row.

    Raises:
        UnsupportedError: groups, zero points, 4-bit or nf4 weights.
    """
    _check(x, w.shape[1], w, "gemm_int8")
    if not takes_int8(w):
        raise UnsupportedError("gemm_int8 takes symmetric 8-bit or ternary weights with one scale per row; use gemm_weight.")
    num_experts = _num_experts(x, w, bias, groups)
    if use_triton(backend, x.device, "gemm_int8", refused=_refused(x)):
        from karui.kernels.gemm_weight import triton, words

        product = words.gemm_int8 if w.span else triton.gemm_int8
        return product(x.reshape(-1, w.shape[1]), w, bias, groups).view(*x.shape[:-1], w.shape[0] // num_experts)
    return reference.by_expert(reference.gemm_int8, x, w, bias, groups)


def on_int8_rows(x: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """x [..., K] (bf16, fp16, fp32) rounded to int8 per row (scale absmax / 127) and back, in x's dtype: what a weight with 8-bit
    activations is multiplied with where its codes are not multiplied with codes."""
    if use_triton(backend, x.device, "on_int8_rows", refused=_refused(x)):
        from karui.kernels.gemm_weight import triton

        return triton.on_int8_rows(x.reshape(-1, x.shape[-1])).view(x.shape)
    return reference.on_int8_rows(x)


def gemm_float8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None, backend: Backend = "auto",
                groups: Groups | None = None) -> torch.Tensor:  # fmt: skip
    """As `gemm_weight` with x rounded to E4M3 per row first (scale absmax / 448); W E4M3 with one scale per row.

    Raises:
        UnsupportedError: another grid; backend "triton" before compute capability 8.9, which has no FP8.
    """
    _check(x, w.shape[1], w, "gemm_float8")
    if not takes_float8(w):
        raise UnsupportedError("gemm_float8 takes E4M3 weights with one scale per row or tensor; use gemm_weight.")
    num_experts = _num_experts(x, w, bias, groups)
    if use_triton(backend, x.device, "gemm_float8", needs=89, refused=_refused(x)):
        from karui.kernels.gemm_weight import triton

        return triton.gemm_float8(x.reshape(-1, w.shape[1]), w, bias, groups).view(*x.shape[:-1], w.shape[0] // num_experts)
    return reference.by_expert(reference.gemm_float8, x, w, bias, groups)


def takes_group(group: int) -> bool:
    """Whether the kernels have groups of this size beside whole rows (NVFP4's of 16 are a case of their own)."""
    return group >= 32 and group & (group - 1) == 0


def takes_int8(w: PackedWeight) -> bool:
    """Whether `gemm_int8` has a kernel for W."""
    return w.form == "int" and w.bits != 4 and w.zero is None and w.scale.shape[1] == 1


def takes_float8(w: PackedWeight) -> bool:
    """Whether `gemm_float8` has a kernel for W."""
    return w.form == "e4m3" and w.scale.shape[1] == 1 and w.scale.dtype != torch.uint8


def _check(x: torch.Tensor, width: int, w: PackedWeight, op: str) -> None:
    if x.shape[-1] != width:
        raise KaruiError(f"{op}: expected a last dimension of {width} for a weight {w.shape}, got shape {tuple(x.shape)}.")


def _num_experts(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None) -> int:
    if groups is None:
        return 1
    experts, rows = groups.num_experts, groups.order.shape[0]
    if x.shape[:-1] != (rows,) or w.shape[0] % experts or bias is not None:
        raise KaruiError(f"a product of {experts} experts takes x [{rows}, K], a weight of {experts} times as many rows as the "
                         f"output is wide, and no bias; got x {tuple(x.shape)}, weight {w.shape}.")  # fmt: skip
    return experts


def _refused(x: torch.Tensor) -> str:
    return "" if x.dtype in (torch.bfloat16, torch.float16, torch.float32) else f"dtype {x.dtype}"
