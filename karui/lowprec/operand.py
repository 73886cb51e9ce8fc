"""From a matrix and an `Operand` to its codes, or to the values they stand for, by the one oracle in `karui.kernels.quantize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.kernels.pack import transpose_pairs
from karui.kernels.quantize.compat import Compat, has_mantissa, spread
from karui.kernels.quantize.elements import E2M1, E4M3, ELEMENTS, Element, pack_pairs, unpack_pairs
from karui.kernels.quantize.elements import decode as decode_codes
from karui.kernels.quantize.fused import NoiseKey, scaled_codes, scaled_values, tile_amax
from karui.kernels.quantize.microscaling import BLOCK, Microscaled, e8m0_value, multiplier, quantize_mx, scale_exponent
from karui.kernels.quantize.nvfp4 import LARGEST as NVFP4_LARGEST
from karui.kernels.quantize.nvfp4 import TILES as FP4_TILES
from karui.kernels.quantize.nvfp4 import Nvfp4, block_scales, global_scale, quantize_nvfp4, random_hadamard
from karui.kernels.quantize.scaled_float8 import TILES as FP8_TILES
from karui.kernels.quantize.scaled_float8 import ScaledFloat8, quantize_float8, tile_scales
from karui.kernels.train_quantize import Coded as PackedCodes
from karui.kernels.train_quantize import Noise, quantize_both
from karui.kernels.triton_support import obstacle
from karui.lowprec.precision import Operand


@dataclass(frozen=True)
class High:
    """A matrix that stays in its own dtype."""

    value: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.value


@dataclass(frozen=True)
class Values:
    """What emulation multiplies: fp32 `value` [M, K], and what its rows are multiplied by after the GEMM, fp32 [M, 1] or [1, 1].

    exact: every value is a bf16 number. It is for codes times powers of two, and for NVFP4's codes times their E4M3 scales.
    """

    value: torch.Tensor
    scale: torch.Tensor | None = None
    exact: bool = True

    def dequantize(self) -> torch.Tensor:
        return self.value if self.scale is None else self.value * self.scale


Coded = High | Values | ScaledFloat8 | Microscaled | Nvfp4 | PackedCodes
"""`PackedCodes`: MXFP4 and NVFP4 as the kernels give and take them, two codes a byte."""


def encode(
    x: torch.Tensor,
    operand: Operand,
    *,
    compat: Compat = "te",
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    noise: NoiseKey | None = None,
    seen: torch.Tensor | None = None,
) -> Coded:
    """Quantize `x` [M, K] along K.

    Args:
        amax: largest magnitude of `x` (fp32, one element) where the caller has it already.
        scale: the encode scale of delayed scaling; 0 (no history yet) takes the current one.
        noise: where stochastic rounding draws its bits (for [M, K], K padded to 16 under `hadamard`).
        seen: see `quantize_both`; only where `sees` says so.
    """
    if operand.format == "high":
        return High(x)
    if _kernel_codes(x, operand, compat):
        return encode_by_kernel(x, operand, compat=compat, amax=amax, scale=scale, noise=noise, seen=seen)
    assert seen is None
    if operand.hadamard:
        x, amax = random_hadamard(x), None
    if not operand.tensor_scale:
        amax = _no_tensor_scale(x)
    bits = None if noise is None else noise.bits(x.shape, x.device)
    if operand.format in ("e4m3", "e5m2"):
        element = ELEMENTS[operand.format]
        if operand.delayed and scale is not None:
            return quantize_float8(x, element=element, compat=compat, scale=_given(x, element, compat, amax, scale))
        return quantize_float8(x, tile=operand.tile, element=element, compat=compat)
    if operand.format == "nvfp4":
        return quantize_nvfp4(x, tile=operand.tile, compat=compat, amax=amax, noise=bits)  # type: ignore[arg-type]
    # training rounds the scale up whatever the library's default: a clipped peak is a bias no rounding repairs
    return quantize_mx(x, element=E4M3 if operand.format == "mxfp8" else E2M1, mode="rceil", compat=compat, noise=bits)


def _given(x: torch.Tensor, element: Element, compat: Compat, amax: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    """The encode scale of delayed scaling, or the current one where there is no history yet."""
    current, _ = tile_scales(largest(x) if amax is None else amax, element, compat, False)
    return torch.where(scale > 0, scale, current)


def _no_tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """The amax that makes NVFP4's tensor scale 1."""
    return torch.full((), NVFP4_LARGEST, device=x.device)


def _kernel_codes(x: torch.Tensor, operand: Operand, compat: Compat) -> bool:
    """Whether `train_quantize` makes this operand's codes here: on a GPU; NVFP4 as TransformerEngine has it."""
    if not x.is_cuda or obstacle(x.device):
        return False
    return operand.format != "nvfp4" or (compat == "te" and operand.tensor_scale)


def sees(x: torch.Tensor, operand: Operand, compat: Compat) -> bool:
    """Whether coding `x` takes no amax and finds it on its way: on a GPU, where the scale is no older one."""
    return operand.format != "high" and not operand.delayed and _kernel_codes(x, operand, compat)


def encode_by_kernel(x: torch.Tensor, operand: Operand, *, compat: Compat, amax: torch.Tensor | None = None,
                     scale: torch.Tensor | None = None, noise: NoiseKey | None = None,
                     seen: torch.Tensor | None = None) -> Coded:  # fmt: skip
    """`encode` in one or two passes over `x` (`train_quantize`), the same bits; the 4-bit formats as `PackedCodes`."""
    given = _tensor_scale(operand, compat, amax)
    if operand.delayed and scale is not None:
        given = _given(x, ELEMENTS[operand.format], compat, amax, scale)
    if operand.hadamard:  # the kernel transforms what it turns
        _, coded = quantize_both(x.t(), _kind(operand), rows=False, compat=compat, hadamard=True, col_noise=_noise(noise),
                                 seen=seen)  # fmt: skip
    else:
        coded, _ = quantize_both(x, _kind(operand), cols=False, compat=compat, scale=given, row_noise=_noise(noise), seen=seen)
    assert coded is not None
    return _of_kernel(coded)


def _tensor_scale(operand: Operand, compat: Compat, amax: torch.Tensor | None) -> torch.Tensor | None:
    """The encode scale of a whole tensor whose amax is known, so that no pass looks for it; None where there is more to it."""
    if amax is None or operand.format not in ELEMENTS or operand.tile != "tensor" or compat == "deepgemm":
        return None
    return tile_scales(amax, ELEMENTS[operand.format], compat, False)[0]


def encode_both(x: torch.Tensor, rows: Operand, cols: Operand, *, compat: tuple[Compat, Compat],
                noise: tuple[NoiseKey | None, NoiseKey | None], amax: torch.Tensor | None = None,
                seen: torch.Tensor | None = None) -> tuple[Coded, Coded] | None:  # fmt: skip
    """`encode` of `x` [M, K] as `rows` and of its transpose as `cols` from one reading (dy of dgrad and wgrad); None where the
    two differ in more than the kernel's columns may, or no kernel serves them."""
    alike = _kind(rows) == _kind(cols) and compat[0] == compat[1] and rows.tensor_scale == cols.tensor_scale
    alike = alike and rows.delayed == cols.delayed
    if not alike or rows.format == "high" or rows.delayed or rows.hadamard or not _kernel_codes(x, rows, compat[0]):
        return None
    given = _tensor_scale(rows, compat[0], amax)
    one, other = quantize_both(x, _kind(rows), compat=compat[0], hadamard=cols.hadamard, scale=given, row_noise=_noise(noise[0]),
                               col_noise=_noise(noise[1]), seen=seen)  # fmt: skip
    assert one is not None and other is not None
    return _of_kernel(one), _of_kernel(other)


def _kind(operand: Operand) -> str:
    """The operand's name in `train_quantize.KINDS`; "high" has none."""
    if operand.format in ELEMENTS:
        return f"{operand.format}-{operand.tile}"
    return "nvfp4-16x16" if (operand.format, operand.tile) == ("nvfp4", "16x16") else operand.format


def _noise(key: NoiseKey | None) -> Noise | None:
    return None if key is None else Noise(key.seed, key.step, key.layer, key.tensor)


def _of_kernel(coded: PackedCodes) -> Coded:
    if coded.packed:
        return coded
    if coded.scale.dtype == torch.uint8:
        return Microscaled(coded.codes, coded.scale, E4M3)
    return ScaledFloat8(coded.codes, coded.scale, coded.tile)


def packed(coded: Microscaled | Nvfp4 | PackedCodes) -> PackedCodes:
    """What `gemm_mx` takes."""
    if isinstance(coded, PackedCodes):
        return coded
    tile = coded.tile if isinstance(coded, Nvfp4) else (1, BLOCK)
    codes = coded.codes.contiguous()
    shape = codes.shape[0], codes.shape[1]
    if codes.dtype == torch.uint8:
        codes = pack_pairs(torch.nn.functional.pad(codes, (0, -codes.shape[1] % tile[1])))
    scale = coded.scale if isinstance(coded, Nvfp4) else coded.exponent
    return PackedCodes(codes, scale.contiguous(), tile, shape, coded.global_scale if isinstance(coded, Nvfp4) else None)


def _unpacked(coded: PackedCodes) -> Nvfp4 | Microscaled:
    codes = unpack_pairs(coded.codes)[:, : coded.shape[1]]
    if coded.global_scale is None:
        return Microscaled(codes, coded.scale, E2M1)
    return Nvfp4(codes, coded.scale, coded.global_scale, coded.tile)


def values(
    x: torch.Tensor,
    operand: Operand,
    *,
    compat: Compat = "te",
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    noise: NoiseKey | None = None,
    keep: bool = False,
) -> tuple[Values | High, Coded | None]:
    """(what `encode(...)` stands for, without the codes between; the codes too where `keep` asks for them).

    Args as in `encode`. `dequantize()` of the first is that of the codes, bit for bit (NVFP4: but for the last bit, as the
    tensor's scale is multiplied with last). The values lie in memory as `x` does; an operand in high precision is `x` itself.
    """
    if operand.format == "high":
        return High(x), High(x)
    unlike = compat == "ao" if operand.format == "nvfp4" else compat == "deepgemm" and operand.format == "mxfp4"
    if unlike or x.numel() == 0 or (keep and operand.tile != "tensor"):
        coded = encode(x, operand, compat=compat, amax=amax, scale=scale, noise=noise)
        return Values(coded.dequantize(), exact=False), coded
    if operand.hadamard:
        x, amax = random_hadamard(x), None
    if not operand.tensor_scale:
        amax = _no_tensor_scale(x)
    if operand.format in ("e4m3", "e5m2"):
        element = ELEMENTS[operand.format]
        rows, cols = FP8_TILES[operand.tile]
        tile = (rows or x.shape[0], cols or x.shape[1])
        top = amax.reshape(1, 1) if amax is not None and operand.tile == "tensor" else tile_amax(x, *tile)
        powers = compat == "te" and "128" in operand.tile
        enc, dec = tile_scales(top, element, compat, powers)
        if operand.delayed and scale is not None:
            enc = torch.where(scale > 0, scale, enc)
            dec = 1.0 / enc
        if "128" in operand.tile:
            return Values(scaled_values(x, enc, dec, tile, element), exact=powers), None
        one = torch.ones_like(dec)
        if keep:
            codes, out = scaled_codes(x, enc, one, element)
            return Values(out, dec), ScaledFloat8(codes, dec, tile)
        return Values(scaled_values(x, enc, one, tile, element), dec), None
    if operand.format == "nvfp4":
        tile = FP4_TILES[operand.tile]
        top = tile_amax(x, *tile)
        whole = global_scale((top.amax() if amax is None else amax).reshape(1))
        stored, enc = block_scales(top, whole)
        return Values(scaled_values(x, enc, stored.float(), tile, E2M1, noise), (1.0 / whole).view(1, 1)), None
    element = E4M3 if operand.format == "mxfp8" else E2M1
    exponent = scale_exponent(tile_amax(x, 1, BLOCK), element, "rceil", compat)
    enc, dec = multiplier(exponent, "rceil", compat), e8m0_value(exponent)
    return Values(scaled_values(x, enc, dec, (1, BLOCK), element, noise)), None


def as_values(coded: Coded) -> Values:
    """Codes as `values` gives them; a matrix in high precision is not exact."""
    if isinstance(coded, Values):
        return coded
    if isinstance(coded, High):
        return Values(coded.value.float(), exact=False)
    if isinstance(coded, PackedCodes):
        return as_values(_unpacked(coded))
    if isinstance(coded, Nvfp4):
        value = decode_codes(coded.codes, E2M1) * spread(coded.scale.float(), *coded.tile, coded.codes.shape)
        return Values(value, (1.0 / coded.global_scale).view(1, 1))
    if isinstance(coded, ScaledFloat8) and coded.scale.shape in ((1, 1), (coded.codes.shape[0], 1)):
        return Values(coded.codes.float(), coded.scale)
    return Values(coded.dequantize(), exact=isinstance(coded, Microscaled) or not bool(has_mantissa(coded.scale).any()))


def transpose(coded: Coded) -> Coded:
    """The codes of the transpose, for operands whose `symmetric` is true."""
    if isinstance(coded, ScaledFloat8):
        return ScaledFloat8(coded.codes.t(), coded.scale.t(), (coded.tile[1], coded.tile[0]))
    if isinstance(coded, Nvfp4):
        return Nvfp4(coded.codes.t(), coded.scale.t(), coded.global_scale, coded.tile)
    if isinstance(coded, PackedCodes):
        turned = transpose_pairs(coded.codes, coded.shape[1], coded.tile[1])
        return PackedCodes(turned, coded.scale.t().contiguous(), coded.tile, (coded.shape[1], coded.shape[0]), coded.global_scale)
    assert isinstance(coded, High)
    return High(coded.value.t())


def tensors_of(coded: Coded) -> dict[str, torch.Tensor]:
    """The tensors that make up `coded`, by name."""
    if isinstance(coded, (High, Values)):
        return {"value": coded.value}
    if isinstance(coded, Microscaled):
        return {"codes": coded.codes, "exponent": coded.exponent}
    whole = getattr(coded, "global_scale", None)
    return {"codes": coded.codes, "scale": coded.scale, **({} if whole is None else {"global_scale": whole})}


def rebuild(like: Coded, tensors: dict[str, torch.Tensor]) -> Coded:
    """The inverse of `tensors_of`, with the kind and tile of `like`."""
    if isinstance(like, (High, Values)):
        return type(like)(tensors["value"])
    if isinstance(like, Microscaled):
        return Microscaled(tensors["codes"], tensors["exponent"], like.element)
    if isinstance(like, Nvfp4):
        return Nvfp4(tensors["codes"], tensors["scale"], tensors["global_scale"], like.tile)
    if isinstance(like, PackedCodes):
        return PackedCodes(tensors["codes"], tensors["scale"], like.tile, like.shape, tensors.get("global_scale"))
    return ScaledFloat8(tensors["codes"], tensors["scale"], like.tile)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `x`, fp32 scalar; NaN if there is one, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()
