"""Who multiplies: one dispatcher, decided per layer before training and reported with its reason.

    emulate    any device: one GEMM of what the codes stand for, summed in fp32. The reference.
    scaled_mm  torch._scaled_mm on FP8 codes, one scale per tensor or row; the operands are zero-padded to 16.
    triton     karui's own GEMMs on codes, `kernels.gemm_fp8` and `kernels.gemm_mx`; on a CPU in Triton's interpreter only.
    te         TransformerEngine's modules, which replace the layer instead of its GEMMs: see `transformer_engine.py`.

An explicit backend that cannot serve a layer is an error; `auto` names what it took and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import UnsupportedError
from karui.kernels.gemm_fp8 import gemm_fp8
from karui.kernels.gemm_mx import gemm_mx
from karui.kernels.quantize.fused import exact_product
from karui.kernels.quantize.microscaling import Microscaled
from karui.kernels.quantize.nvfp4 import Nvfp4
from karui.kernels.quantize.scaled_float8 import ScaledFloat8
from karui.kernels.train_quantize import Coded as PackedCodes
from karui.kernels.triton_support import obstacle as triton_obstacle
from karui.lowprec.operand import Coded, High, Values, as_values, packed
from karui.lowprec.precision import Precision


@dataclass(frozen=True)
class Choice:
    """A backend and why."""

    backend: str
    reason: str


def choose(precision: Precision, device: torch.device) -> Choice:
    """The backend of a layer on `device`.

    Raises:
        UnsupportedError: an explicit backend that cannot serve the recipe here.
    """
    wanted = precision.backend
    if wanted == "emulate":
        return Choice("emulate", "asked for")
    if wanted == "triton":
        eight = any(f.startswith("fp8") for f in precision._formats())
        if reason := triton_obstacle(device, 89 if eight else 80):
            raise UnsupportedError(f"backend triton: {reason}; use backend emulate (or auto, which falls back and says so).")
        return Choice("triton", "asked for")
    if wanted == "te":
        raise UnsupportedError(
            "backend te replaces whole modules and is not a GEMM of this converter; use it in a recipe, or "
            "karui.lowprec.transformer_engine.TransformerEngineModel; or take backend emulate or scaled_mm."
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    obstacle = _scaled_mm_obstacle(precision, device.type, capability)
    if wanted == "scaled_mm":
        if obstacle:
            raise UnsupportedError(f"backend scaled_mm: {obstacle}; use backend emulate (or auto, which falls back and says so).")
        return Choice("scaled_mm", "asked for")
    if capability is not None:
        found = auto_on(precision, capability)
        return Choice("emulate", obstacle) if found.backend == "triton" and triton_obstacle(device, 89) else found
    return Choice("emulate", obstacle or "torch's FP8 GEMM on a CPU is slower than fp32")


def auto_on(precision: Precision, capability: tuple[int, int]) -> Choice:
    """What `auto` takes on an NVIDIA GPU of that compute capability where Triton is installed."""
    obstacle = _scaled_mm_obstacle(precision, "cuda", capability)
    if not obstacle:
        return Choice("scaled_mm", "FP8 tensor cores")
    if capability >= (8, 9):
        return Choice("triton", f"karui's kernels: {obstacle}")
    return Choice("emulate", obstacle)


def multiply(a: Coded, b: Coded, backend: str, dtype: torch.dtype) -> torch.Tensor:
    """A [M, K] times B [N, K] transposed -> [M, N] in `dtype`; products of codes are summed in fp32."""
    if isinstance(a, High) and isinstance(b, High):
        return a.value.to(dtype) @ b.value.to(dtype).t()
    if backend == "scaled_mm" and isinstance(a, ScaledFloat8) and isinstance(b, ScaledFloat8):
        return _scaled_mm(a, b, dtype)
    if backend == "triton" and isinstance(a, ScaledFloat8) and isinstance(b, ScaledFloat8):
        return gemm_fp8(a, b, dtype, backend="triton")
    blocks = (Microscaled, Nvfp4, PackedCodes)
    if backend == "triton" and isinstance(a, blocks) and isinstance(b, blocks):
        return gemm_mx(packed(a), packed(b), dtype, backend="triton")
    return _emulate(as_values(a), as_values(b)).to(dtype)


def _emulate(a: Values, b: Values) -> torch.Tensor:
    if not (a.exact and b.exact):
        return a.dequantize() @ b.dequantize().t()
    out = exact_product(a.value, b.value)
    scales = [s for s in (a.scale, None if b.scale is None else b.scale.t()) if s is not None]
    if len(scales) == 2 and scales[0].numel() == scales[1].numel() == 1:
        scales = [scales[0] * scales[1]]
    for scale in scales:
        out *= scale
    return out


def _scaled_mm(a: ScaledFloat8, b: ScaledFloat8, dtype: torch.dtype) -> torch.Tensor:
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    deep, wide = -a.codes.shape[1] % 16, -cols % 16
    # row-major times column-major, K and N multiples of 16, as sm_89 and sm_90 want it
    left = _pad(a.codes.contiguous(), 0, deep)
    right = _pad(b.codes.contiguous(), wide, deep)
    if a.scale.numel() == 1 and b.scale.numel() == 1:
        scale_a, scale_b = a.scale.reshape(()), b.scale.reshape(())
    else:
        scale_a = a.scale.expand(rows, 1).contiguous()
        scale_b = torch.nn.functional.pad(b.scale.expand(cols, 1), (0, 0, 0, wide), value=1.0).contiguous().t()
        if left.is_cuda:  # rowwise kernels on CUDA write bf16 only
            product = torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
            return product[:, :cols].to(dtype)
    return torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)[:, :cols]


def _pad(codes: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    if not rows and not cols:
        return codes
    # padding is not implemented for float8; its zero is the byte 0
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def _scaled_mm_obstacle(precision: Precision, kind: str, capability: tuple[int, int] | None) -> str:
    formats = precision._formats() - {"high"}
    for form in sorted(formats):
        if form not in ("fp8-delayed", "fp8-current", "fp8-rowwise"):
            return f"no scaled_mm path for {form} here"
    if capability is not None:
        if capability < (8, 9):
            return f"FP8 tensor cores begin with sm_89, this GPU is sm_{capability[0]}{capability[1]}"
    elif kind not in ("cpu", "meta"):
        return f"no FP8 GEMM on {kind}"
    return ""
