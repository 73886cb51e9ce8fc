"""The bytes of the KV cache for the torch and Triton runners: one slot per token and layer, in fp32, fp16, bf16, int8 or fp8.

Legend: N slots, T tokens, G kv heads, D head_dim.
int8 and fp8 (E4M3) keep one scale per token and head, absmax / 127 and absmax / 448, as codes never move once written.
"""

from __future__ import annotations

import torch

from karui.configs.errors import UnsupportedError, nearest

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8,
          "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
SCALED = frozenset(_LARGEST)
"""The formats that keep scales."""


def check_dtype(kv_dtype: str) -> str:
    """`kv_dtype` when it is one of `DTYPES`. Raises `UnsupportedError` otherwise."""
    if kv_dtype not in DTYPES:
        raise UnsupportedError(
            f"kv_dtype {kv_dtype!r} is not supported; use one of {', '.join(DTYPES)}.{nearest(kv_dtype, DTYPES)}")
    return kv_dtype


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes for keys and values of one token over all layers, scales included."""
    item = torch.empty(0, dtype=DTYPES[check_dtype(kv_dtype)]).element_size()
    return 2 * num_layers * num_kv_heads * (head_dim * item + (4 if kv_dtype in _LARGEST else 0))


class KVStore:
    """Keys and values of `num_slots` tokens in every layer: data [2, layers, N, G, D]; int8 and fp8: scale [2, layers, N, G]."""

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, kv_dtype: str,
                 device: torch.device | str) -> None:
        shape = (2, num_layers, num_slots, num_kv_heads)
        self.data = torch.zeros(*shape, head_dim, dtype=DTYPES[check_dtype(kv_dtype)], device=device)
        self._largest = _LARGEST.get(kv_dtype, 0.0)
        self.scale = torch.zeros(shape, device=device) if self._largest else None

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, G, D] at `slots` [T] int64."""
        for side, x in enumerate((k, v)):
            if self.scale is None:
                self.data[side, layer, slots] = x.to(self.data.dtype)
                continue
            scale = x.float().abs().amax(-1).clamp_min(1e-12) / self._largest
            self.scale[side, layer, slots] = scale
            codes = x.float() / scale[..., None]
            codes = codes.round() if self.data.dtype == torch.int8 else codes
            self._bytes[side, layer, slots] = codes.to(self.data.dtype).view(self._bytes.dtype)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [*slots.shape, G, D] at `slots` in `dtype`."""
        k, v = (self._bytes[side, layer, slots].view(self.data.dtype).to(dtype) for side in (0, 1))
        if self.scale is None:
            return k, v
        ks, vs = (self.scale[side, layer, slots].to(dtype)[..., None] for side in (0, 1))
        return k * ks, v * vs

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slot source[i] to target[i] in every layer; all are read before any is written."""
        self._bytes[:, :, target] = self._bytes[:, :, source]
        if self.scale is not None:
            self.scale[:, :, target] = self.scale[:, :, source]

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What lies at `slots` [T] int64: data [2, layers, T, G, D], and scale [2, layers, T, G] or None; on the CPU."""
        data = self._bytes[:, :, slots].view(self.data.dtype).cpu()
        return data, None if self.scale is None else self.scale[:, :, slots].cpu()

    def put(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        """The inverse of `take`."""
        self._bytes[:, :, slots] = data.to(self.data.device).view(self._bytes.dtype)
        if self.scale is not None:
            assert scale is not None
            self.scale[:, :, slots] = scale.to(self.scale.device)

    @property
    def _bytes(self) -> torch.Tensor:
        """The same memory in a dtype that torch can index on every device."""
        return self.data.view(torch.uint8) if self.data.dtype == torch.float8_e4m3fn else self.data
