"""`QTensor`: codes + scale + zero + spec + logical shape. What exporters write and the runtime reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from karui.configs.quantspec import QuantSpec


@dataclass(frozen=True)
class QTensor:
    """One quantized tensor, codes unpacked.

    Shapes, for a weight [out, in] and G = in / group_size (channel: G = 1; tensor: one scale for all):
        codes: [out, in], int8 for signed grids, uint8 for affine, nf4 and 4-bit float grids, float8_e4m3fn for fp8.
        scale: [out, G] (group, channel) or [1, 1] (tensor), in the spec's scale dtype
            (nf4dq: uint8 codes of absmax - mean, see `double`).
        zero: [out, G] uint8 for affine grids, else None.  value = (code - zero) * scale
        extra: further stored tensors by name: `global_scale` fp32 [1] (nvfp4); `absmax_scale` fp32 [blocks],
            `absmax_mean` fp32 [1] (nf4dq).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    spec: QuantSpec
    shape: tuple[int, ...]
    extra: dict[str, torch.Tensor] | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values the codes stand for, computed in fp32 and cast to `dtype`; shape `self.shape`."""
        from karui.kernels.quantize import dequantize

        return dequantize(self, dtype)

    def to(self, device: torch.device | str) -> QTensor:
        moved = {k: v.to(device) for k, v in self.extra.items()} if self.extra else None
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
            extra=moved,
        )
