"""A frozen linear whose weight stays packed: dequantized in the forward pass, again in the backward pass, and never kept.

This is the base of QLoRA (arXiv 2305.14314, eq. 5). Memory is that of the codes and scales (NF4 with double quantization:
4.127 bits per weight) plus one dequantized matrix at a time. 4-bit codes are packed as bitsandbytes packs them, the first of a
pair in the high half of the byte; other widths as `karui.kernels.pack` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.gemm_weight import PackedWeight, dequantize_weight, takes_group
from karui.kernels.lora import frozen_linear
from karui.kernels.pack import pack, unpack
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.kernels.quantize.nf4 import CODEBOOK, block_absmax
from karui.kernels.triton_support import obstacle

NOT_QUANTIZED = "indexer.weights_proj"  # small, and the choice of keys is sensitive to its rounding: exports leave it, too


class QuantizedLinear(nn.Module):
    """y = x dequantize(W)^T + bias, W a `QTensor` [out, in] held packed in buffers; x [..., in] in any float dtype.

    Buffers: `qweight` uint8, packed codes; `scale`, `zero` and the spec's extra tensors as in `QTensor`.
    """

    qweight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bias: torch.Tensor | None
    _table: torch.Tensor | None

    def __init__(self, weight: QTensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.spec = weight.spec
        self._extra_names = tuple(weight.extra or ())
        self.register_buffer("qweight", _pack(weight))
        self.register_buffer("scale", weight.scale)
        self.register_buffer("zero", weight.zero)
        for name, value in (weight.extra or {}).items():
            self.register_buffer(name, value)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("_table", _pair_table(weight.spec), persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, spec: QuantSpec, name: str = "linear") -> QuantizedLinear:
        """Quantize a linear's weight; raises what `quantize` raises, with `name` in the message."""
        return cls(quantize(linear.weight.detach(), spec, name=name), linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_linear(x, BaseWeight(self), self.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """A cast (`to(dtype)`, `half()`) reaches the bias alone: codes and scales keep the dtypes of their grid."""
        stored = {name: value for name, value in self.named_buffers(recurse=False) if name != "bias"}
        super()._apply(fn, recurse)
        for name, value in stored.items():
            moved = getattr(self, name)
            if moved.dtype != value.dtype:
                setattr(self, name, value.to(moved.device))
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [out, in], bit-equal to `self.qtensor().dequantize(dtype)`."""
        if self._table is None:
            return self.qtensor().dequantize(dtype)
        if self.qweight.is_cuda and not obstacle(self.qweight.device) and (packed := self.packed()) is not None:
            return dequantize_weight(packed, dtype)
        # two codes per look-up: the byte is the index, the entry a pair of values
        pairs = self._table.index_select(0, self.qweight.reshape(-1).int()).view(torch.float32)
        scale = self._scales()
        return pairs.view(*scale.shape, -1).mul_(scale.unsqueeze(-1)).view(self.out_features, self.in_features).to(dtype)

    def packed(self) -> PackedWeight | None:
        """The 4-bit weight as `gemm_weight`'s kernels read it: the same bytes. None for other grids and for short groups."""
        group = self.spec.group_size
        if self._table is None or self.in_features % 2 or not (group is None or takes_group(group)):
            return None
        nf4 = self.spec.format == "nf4"
        data = self.qweight.view(self.out_features, -1)
        scale = self._scales() if nf4 else self.scale
        scale = scale.reshape(-1, scale.shape[-1]).expand(self.out_features, -1).contiguous()
        shape = self.out_features, self.in_features
        return PackedWeight(data, scale, None, 4, 0 if nf4 else 8, shape, high_first=True, form="nf4" if nf4 else "int")

    def qtensor(self) -> QTensor:
        """The weight as a `QTensor` (codes unpacked)."""
        extra = {name: getattr(self, name) for name in self._extra_names} or None
        return QTensor(
            codes=_unpack(self.qweight, self.spec, self.in_features),
            scale=self.scale,
            zero=self.zero,
            spec=self.spec,
            shape=(self.out_features, self.in_features),
            extra=extra,
        )

    def _scales(self) -> torch.Tensor:
        if self.spec.format != "nf4":
            return self.scale.float()
        shell = QTensor(self.qweight, self.scale, None, self.spec, (self.out_features, self.in_features),
                        {name: getattr(self, name) for name in self._extra_names})
        return block_absmax(shell)

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, spec={self.spec}"


class BaseWeight:
    """The weight of a frozen base, made in a dtype when called; `packed` for the kernels that decode it themselves."""

    __slots__ = ("base",)

    def __init__(self, base: QuantizedLinear | nn.Linear) -> None:
        self.base = base

    def __call__(self, dtype: torch.dtype) -> torch.Tensor:
        return self.base.dequantize(dtype) if isinstance(self.base, QuantizedLinear) else self.base.weight.to(dtype)

    def packed(self) -> PackedWeight | None:
        return self.base.packed() if isinstance(self.base, QuantizedLinear) else None


def quantize_linears(model: nn.Module, spec: QuantSpec, skip: set[str]) -> dict[str, QuantizedLinear]:
    """Replace every `nn.Linear` of `model` (by full name, except `skip`) in place, one at a time; returns the new modules.

    Raises:
        KaruiError: a weight that does not fit the grid (named), or nothing to replace.
    """
    done: dict[str, QuantizedLinear] = {}
    for name, module in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n not in skip]:
        if name.endswith(NOT_QUANTIZED):
            continue
        parent, _, leaf = name.rpartition(".")
        done[name] = QuantizedLinear.from_linear(module, spec, name)
        setattr(model.get_submodule(parent), leaf, done[name])
    if not done:
        raise KaruiError(f"no linear layer to quantize to {spec} in {type(model).__name__}.")
    return done


def _four_bit(spec: QuantSpec) -> bool:
    return spec.bits == 4 and spec.format in ("nf4", "int") and spec.symmetric


def _pair_table(spec: QuantSpec) -> torch.Tensor | None:
    """[256] of 8-byte entries: the two fp32 values, before scaling, that a packed byte stands for."""
    if not _four_bit(spec):
        return None
    values = torch.tensor(CODEBOOK) if spec.format == "nf4" else torch.arange(16, dtype=torch.float32) + spec.code_range[0]
    byte = torch.arange(256)
    return torch.stack([values[byte >> 4], values[byte & 15]], -1).view(torch.float64).view(-1)


def _bits(spec: QuantSpec) -> int:
    """Bits a stored code takes: those of the grid where they hold its codes, counted from 0; two for -1, 0, 1."""
    if spec.format in ("ternary", "binary"):
        return 2
    return spec.bits if spec.format in ("int", "nvfp4", "mxfp4") else 8


def _pack(q: QTensor) -> torch.Tensor:
    if q.codes.dtype not in (torch.int8, torch.uint8):
        return q.codes
    low = q.spec.code_range[0]
    codes = (q.codes.to(torch.int16) - low).to(torch.uint8)
    if _four_bit(q.spec) and codes.shape[-1] % 2 == 0:
        return (codes[..., ::2] << 4) | codes[..., 1::2]
    return pack(codes, _bits(q.spec))


def _unpack(packed: torch.Tensor, spec: QuantSpec, width: int) -> torch.Tensor:
    if packed.dtype != torch.uint8:
        return packed
    low = spec.code_range[0]
    if _four_bit(spec) and width % 2 == 0:
        codes = torch.stack([packed >> 4, packed & 15], -1).view(packed.shape[0], -1)
    else:
        codes = unpack(packed, _bits(spec), width)
    return (codes.to(torch.int16) + low).to(torch.int8) if low < 0 else codes
