"""Reference: every weight kind on odd shapes against float64 products of the dequantized weights, on every ISA here."""

from __future__ import annotations

import ctypes

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.native import available, isas, linear, load, pack
from karui.kernels.native.library import address
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")

INTEGER = ("w4g32", "w4g16", "w4g64", "w4g96a", "w4g32a", "w4g32:fp32", "w4g32a8", "w4g64a8", "w4", "w4t", "w8", "w8g32", "w8a8",
           "w8g64a", "w8t", "w3g32", "w3g64a", "w3g16", "w2g32", "w2g64a", "w5g32", "w6a", "w1.58", "w1.58a8", "w1.58g64", "w1",
           "w4g32:bf16", "mxfp4", "nvfp4")
FLOAT = ("nf4", "nf4dq", "fp8", "fp32", "fp16", "bf16", "w4g8")
DENSE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = ((1, 33, 192), (2, 16, 96), (3, 7, 192), (5, 50, 576), (9, 40, 192), (31, 24, 384))  # rows, out, in


def weight(kind: str, n: int, k: int) -> QTensor | torch.Tensor:
    w = torch.randn(n, k) * 0.1 + 0.02
    return w.to(DENSE[kind]) if kind in DENSE else quantize(w, QuantSpec.parse(kind))


def values(w: QTensor | torch.Tensor) -> torch.Tensor:
    return (w.dequantize() if isinstance(w, QTensor) else w).double()


def int8_activations(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """What A8 multiplies with, from its definition: per block of inputs, or per token when None."""
    parts = x.unflatten(-1, (-1, block)) if block else x[..., None, :]
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / torch.where(scale > 0, scale, 1)).round() * scale).flatten(-2).double()


def fits(kind: str, k: int) -> bool:
    group = QuantSpec.parse(kind).group_size if kind not in DENSE else None
    return group is None or k % group == 0


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", INTEGER)
def test_integer_products(kind, isa):
    torch.manual_seed(1)
    spec = QuantSpec.parse(kind)
    for rows, n, k in SHAPES:
        if not fits(kind, k):
            continue
        w, bias, x = weight(kind, n, k), torch.randn(n), torch.randn(rows, k) * torch.rand(k).exp()
        got = linear(load(isa), pack(load(isa), "w", w, bias), x)
        block = None if spec.activation_bits == 8 else 16 if spec.group_size == 16 else 32
        want = int8_activations(x, block) @ values(w).T + bias
        assert (got - want).abs().max() < 2e-5 * want.abs().max(), (rows, n, k)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", INTEGER + FLOAT)
def test_float_products(kind, isa):
    torch.manual_seed(2)
    for rows, n, k in (*SHAPES, (4, 5, 40), (12, 3, 8)):
        if not fits(kind, k):
            continue
        w, x = weight(kind, n, k), torch.randn(rows, k)
        got = linear(load(isa), pack(load(isa), "w", w, activation_bits=16), x)
        want = x.double() @ values(w).T
        assert (got - want).abs().max() < 2e-6 * (x.abs().double() @ values(w).abs().T).max() + 1e-6, (rows, n, k)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", INTEGER + FLOAT)
@pytest.mark.parametrize("activation_bits", (8, 16))
def test_a_row_has_the_same_bits_in_every_batch(kind, activation_bits, isa):
    torch.manual_seed(3)
    w, x = pack(load(isa), "w", weight(kind, 40, 192), activation_bits=activation_bits), torch.randn(43, 192)
    whole = linear(load(isa), w, x)
    for first, rows in ((0, 1), (3, 2), (5, 3), (8, 4), (7, 8), (1, 15), (4, 17), (3, 25), (42, 1)):
        assert torch.equal(linear(load(isa), w, x[first:first + rows]), whole[first:first + rows])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", ("w4g32", "w4g96a", "w8", "w3g32", "w2g64a", "w1.58", "nf4", "mxfp4", "nvfp4", "fp32", "fp16", "bf16"))
def test_rows_decode_to_the_dequantized_values_exactly(kind, isa):
    """The packed codes and scales are the given ones: nothing was quantized again."""
    torch.manual_seed(4)
    w, lib = weight(kind, 37, 192), load(isa)
    rows, out = torch.tensor([0, 36, 15, 16], dtype=torch.int32), torch.empty(4, 192)
    packed = pack(lib, "w", w)
    lib.decode_rows(ctypes.byref(packed.linear), address(rows), 4, address(out))
    assert torch.equal(out, values(w).float()[rows.long()])


@pytest.mark.parametrize("isa", isas())
def test_largest_codes_do_not_overflow(isa):
    """Every code at its extreme against activations at theirs: the sums that would saturate 16 bits."""
    for kind, code, zero_point in (("w8", 127, None), ("w8a8", -127, None), ("w4g64a8", 7, None), ("w3", 3, None),
                                   ("w8a", 255, 0), ("w8a", 0, 255), ("w4a", 15, 0), ("w2a", 0, 3)):
        spec = QuantSpec.parse(kind)
        codes = torch.full((16, 1536), code, dtype=torch.int8 if spec.symmetric else torch.uint8)
        groups = 1536 // spec.group_size if spec.group_size else 1
        zero = None if zero_point is None else torch.full((16, groups), zero_point, dtype=torch.uint8)
        q = QTensor(codes, torch.ones(16, groups, dtype=torch.float16), zero, spec, (16, 1536))
        x = torch.full((9, 1536), -3.0)
        want = x.double() @ values(q).T
        assert torch.allclose(linear(load(isa), pack(load(isa), "w", q), x).double(), want, rtol=1e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("code", (7, 15))  # 6 and -6
def test_largest_fp4_numbers_do_not_overflow(code, isa):
    q = quantize(torch.full((16, 1536), 6.0), QuantSpec.parse("mxfp4"))
    q = QTensor(torch.full_like(q.codes, code), q.scale, None, q.spec, q.shape)
    x = torch.full((9, 1536), -3.0)
    assert torch.allclose(linear(load(isa), pack(load(isa), "w", q), x).double(), x.double() @ values(q).T, rtol=1e-6)


def test_bad_scales_and_values_are_refused_by_name():
    q = weight("w4g32", 16, 64)
    assert isinstance(q, QTensor)
    q.scale[3, 1] = float("nan")
    with pytest.raises(CorruptError, match="layers.7.mlp"):
        pack(load(), "layers.7.mlp", q)
    with pytest.raises(CorruptError, match="norm.x"):
        pack(load(), "norm.x", torch.full((16, 32), float("inf")))
    with pytest.raises(KaruiError, match="8 or 16"):
        pack(load(), "w", torch.ones(16, 32), activation_bits=4)
