"""KVQuant's grid for cached keys and values: levels where the values are, fitted beforehand, and a few values kept whole
(arXiv 2401.18079, sections 3.1 to 3.5).

Keys, before RoPE mixes pairs of channels, have channels of very different size: each channel has a range, found on calibration
text, that 1 - outliers of its values lie in. Values have none: each token has a range, that of its own values but the largest
and smallest. Within the range x = mid + half * z, and the code of z is the nearest of 2^bits levels, which a layer's keys, and
its values, share. So a token's codes depend on nothing but the token. What lies outside most is kept in fp16 beside the codes.
The paper keeps all of it, in a sparse matrix; here a token has as many places as it has outliers on average (values), or twice
as many (keys), and what finds none is cut to the range.

A row of C = kv heads * head_dim values is stored as its codes (`karui.kernels.pack`), a value row's low and high in fp16, then
the channels of the outliers in 16 bits and their values in fp16.

Legend: L layers, C channels, B bits, E outliers kept per token.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.kernels.pack import pack, packed_width, unpack

BITS = {"kvquant4": 4, "kvquant3": 3, "kvquant2": 2}
"""Names of the cache formats."""


def file_of(kv_dtype: str) -> str:
    """Name of the file of levels in a bundle's or model's folder."""
    return f"{kv_dtype}.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class KVLevels:
    """What calibration found. Tensors are fp32.

    Attributes:
        key_low, key_high: [L, C] each channel's range.
        key_levels, value_levels: [L, 2^B] ascending.
        outliers: share of values kept whole.
        sinks: first tokens of a text whose keys and values are kept whole.
        target: identity of the model's weights, "" for unknown.
    """

    key_low: torch.Tensor
    key_high: torch.Tensor
    key_levels: torch.Tensor
    value_levels: torch.Tensor
    outliers: float
    sinks: int = 1
    target: str = ""

    def __post_init__(self) -> None:
        layers, channels = self.key_low.shape
        levels = self.key_levels.shape[-1]
        shapes = [tuple(t.shape) for t in (self.key_high, self.key_levels, self.value_levels)]
        if shapes != [(layers, channels), (layers, levels), (layers, levels)] or levels not in {2**b for b in BITS.values()}:
            raise KaruiError(f"levels of a KV cache do not belong together: ranges {(layers, channels)}, {shapes}.")
        if channels > 32767:
            raise KaruiError(f"kvquant takes up to 32,767 channels of keys, got {channels:,}.")
        if not (0 <= self.outliers < 0.2 and self.sinks in (0, 1)):
            raise KaruiError(f"outliers must be from 0 to 0.2 and sinks 0 or 1, got {self.outliers} and {self.sinks}.")

    @property
    def bits(self) -> int:
        return self.key_levels.shape[-1].bit_length() - 1

    @property
    def channels(self) -> int:
        return self.key_low.shape[1]

    @property
    def num_outliers(self) -> tuple[int, int]:
        """Values kept whole per token: of a key, of a value."""
        pairs = math.ceil(self.outliers * self.channels / 2)
        return 4 * pairs, 2 * pairs

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token's key and value in one layer."""
        key, value = (packed_width(self.channels, self.bits) + 4 * n for n in self.num_outliers)
        return key, value + 4

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        from safetensors.torch import save_file

        named = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: t.contiguous() for name, t in named.items() if isinstance(t, torch.Tensor)}
        save_file(tensors, path, {"karui_kv_levels": json.dumps({name: v for name, v in named.items() if name not in tensors})})

    @staticmethod
    def load(path: str | Path) -> KVLevels:
        """The inverse of `save`. Raises `CorruptError` for anything else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["karui_kv_levels"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if any(t.dtype != torch.float32 or not t.isfinite().all() for t in tensors.values()):
                raise ValueError("tensors are not finite fp32")
            return KVLevels(**tensors, **facts)
        except (OSError, SafetensorError, KaruiError, ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{path} does not hold levels written by `KVLevels.save`: {error}") from error

    def to(self, device: torch.device | str) -> KVLevels:
        """The same on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)
                                if isinstance(getattr(self, f.name), torch.Tensor)})

    # -- rows of one layer

    def encode_keys(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [T, C], not rotated, -> uint8 [T, bytes]."""
        mid, half = _middle(self.key_low[layer], self.key_high[layer])
        z = (x.float() - mid) / half
        kept = _largest(z.abs(), self.num_outliers[0])
        return torch.cat([_codes(z, self.key_levels[layer], self.bits), _whole(x, kept)], -1)

    def decode_keys(self, layer: int, data: torch.Tensor) -> torch.Tensor:
        """The inverse: fp32 [T, C]."""
        mid, half = _middle(self.key_low[layer], self.key_high[layer])
        z, rest = self._levels(self.key_levels[layer], data)
        return _with_whole(mid + half * z, rest, self.num_outliers[0])

    def encode_values(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [T, C] -> uint8 [T, bytes]."""
        order, each = x.float().sort(dim=-1, stable=True), self.num_outliers[1] // 2
        kept = torch.cat([order.indices[:, :each], order.indices[:, self.channels - each:]], -1)
        ends = order.values[:, [each, self.channels - 1 - each]].clamp(-65504, 65504).half()
        mid, half = _middle(ends[:, :1].float(), ends[:, 1:].float())
        codes = _codes((x.float() - mid) / half, self.value_levels[layer], self.bits)
        return torch.cat([codes, ends.view(torch.uint8), _whole(x, kept)], -1)

    def decode_values(self, layer: int, data: torch.Tensor) -> torch.Tensor:
        """The inverse: fp32 [T, C]."""
        z, rest = self._levels(self.value_levels[layer], data)
        ends = rest[:, :4].contiguous().view(torch.float16).float()
        mid, half = _middle(ends[:, :1], ends[:, 1:])
        return _with_whole(mid + half * z, rest[:, 4:], self.num_outliers[1])

    def _levels(self, levels: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = packed_width(self.channels, self.bits)
        return levels[unpack(data[:, :width], self.bits, self.channels).int()], data[:, width:]


def _middle(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The range as (mid, half), half not 0."""
    return (low + high) / 2, ((high - low) / 2).clamp_min(1e-12)


def _codes(z: torch.Tensor, levels: torch.Tensor, bits: int) -> torch.Tensor:
    borders = (levels[1:] + levels[:-1]) / 2
    return pack(torch.bucketize(z.contiguous(), borders).to(torch.uint8), bits)


def _largest(size: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [T, count] of each row's largest, the first of equal ones first."""
    return size.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _whole(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    values = x.float().gather(-1, kept).clamp(-65504, 65504).half()
    return torch.cat([kept.to(torch.int16).contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)], -1)


def _with_whole(x: torch.Tensor, data: torch.Tensor, count: int) -> torch.Tensor:
    kept = data[:, :2 * count].contiguous().view(torch.int16).long()
    return x.scatter(-1, kept, data[:, 2 * count:].contiguous().view(torch.float16).float())
