"""Low-rank updates of many adapters in one step, each row with its own (as in Punica, arXiv 2310.18547, and S-LoRA, 2311.03285).

    y_t <- gain_s (y_t + B_s A_s x_t) for the adapter s of row t; rows without one stay as they are

Which adapter a row has is a number on the device, so that a recorded step serves any mixture of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError
from karui.kernels.lora_rows import reference
from karui.kernels.triton_support import Backend, use_triton


@dataclass(frozen=True)
class Stack:
    """All adapters of one product, which may be several linears on the same input, one after the other ("parts").

    a: [S, P * R, K], the parts' A one after the other, smaller ranks filled with zeros.  b: [S, N, R], scales included.
    part: int32 [N], the part that an output belongs to.  gain: fp32 [S, N] (DoRA's m / ||W + B A||, else 1), or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    part: torch.Tensor
    gain: torch.Tensor | None


def lora_rows(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, stack: Stack, backend: Backend = "auto") -> None:
    """Update y [T, N] in place for inputs x [T, K] (bf16, fp16, fp32, as y and the stack).

    Args:
        slots: int32 [T], each row's adapter, -1 for none.

    Raises:
        KaruiError: shapes that do not belong together.
    """
    s, width, k = stack.a.shape
    rank, n = stack.b.shape[2], y.shape[1]
    if x.shape != (y.shape[0], k) or stack.b.shape[:2] != (s, n) or width % rank or slots.shape != y.shape[:1]:
        raise KaruiError(f"lora_rows: y {tuple(y.shape)}, x {tuple(x.shape)}, slots {tuple(slots.shape)} do not belong to a "
                         f"{tuple(stack.a.shape)} and b {tuple(stack.b.shape)}.")
    if use_triton(backend, y.device, "lora_rows", refused=_refused(y, x, stack)):
        from karui.kernels.lora_rows import triton

        triton.lora_rows(y, x, slots, stack)
    else:
        reference.lora_rows(y, x, slots, stack)


def _refused(y: torch.Tensor, x: torch.Tensor, stack: Stack) -> str:
    kinds = {t.dtype for t in (y, x, stack.a, stack.b)}
    one = len(kinds) == 1 and kinds <= {torch.bfloat16, torch.float16, torch.float32}
    return "" if one else f"dtypes {', '.join(sorted(map(str, kinds)))}"
