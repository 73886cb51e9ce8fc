"""Reference: operands of the low-precision linears coded by kernel, bit for bit what the oracles give."""

from unittest.mock import patch

import pytest
import torch

from karui.kernels.quantize.fused import NoiseKey
from karui.lowprec import operand as module
from karui.lowprec.operand import (
    as_values,
    encode,
    encode_both,
    encode_by_kernel,
    largest,
    packed,
    rebuild,
    tensors_of,
    transpose,
)
from karui.lowprec.precision import Operand, Precision


@pytest.fixture
def kernels(monkeypatch):
    """On a CPU "auto" takes the oracle: the kernel is forced by name, and told that it serves."""
    real = module.quantize_both
    monkeypatch.setattr(module, "quantize_both", lambda *a, **k: real(*a, **k, backend="triton"))
    return lambda: monkeypatch.setattr(module, "_kernel_codes", lambda x, operand, compat: True)


def same(got, want):
    """Equal bytes; 4-bit codes are compared as the kernels hold them."""
    want = packed(want) if isinstance(got, module.PackedCodes) else want
    assert type(got) is type(want)
    a, b = tensors_of(got), tensors_of(want)
    assert a.keys() == b.keys() and got.dequantize().shape == want.dequantize().shape
    for name in a:
        x, y = (t[name].cpu().view(torch.uint8) if t[name].element_size() == 1 else t[name].cpu() for t in (a, b))
        assert torch.equal(x, y), name


@pytest.mark.parametrize("fields", [
    {"format": "e4m3", "tile": "1x128"}, {"format": "e4m3", "tile": "128x128"}, {"format": "mxfp8", "tile": "1x32"},
    {"format": "e5m2", "tile": "tensor", "delayed": True}, {"format": "mxfp4", "tile": "1x32", "stochastic": True},
    {"format": "nvfp4", "tile": "1x16"}, {"format": "nvfp4", "tile": "16x16"},
    {"format": "nvfp4", "tile": "1x16", "hadamard": True, "stochastic": True}], ids=str)  # fmt: skip
def test_the_same_bits(fields, kernels, device, rng):
    operand = Operand(**fields)
    # small whole numbers: sums of the Hadamard transform are exact in any order
    x = torch.randint(-60, 60, (36, 160), generator=rng, device=device).float()
    scale = torch.tensor([3.0], device=device) if operand.delayed else None
    noise = NoiseKey(5, torch.tensor(3), 2, 1) if operand.stochastic else None
    got = encode_by_kernel(x, operand, compat="te", scale=scale, noise=noise)
    want = encode(x.cpu(), operand, compat="te", scale=None if scale is None else scale.cpu(), noise=noise)
    same(got, want)
    torch.testing.assert_close(as_values(got).dequantize().cpu(), as_values(want).dequantize(), rtol=0, atol=0)
    same(rebuild(got, tensors_of(got)), want)
    if operand.symmetric:
        same(transpose(got), transpose(want))


@pytest.mark.parametrize("compat", ["te", "ao"])
def test_an_amax_that_is_known_is_not_looked_for(compat, kernels, device, rng, monkeypatch):
    from karui.kernels.train_quantize import triton as kernel

    kernels()
    operand = Operand(format="e5m2")
    for x in (torch.randn(20, 48, generator=rng, device=device), torch.zeros(4, 16, device=device)):
        want = encode_by_kernel(x, operand, compat=compat)
        both = encode_both(x, operand, operand, compat=(compat, compat), noise=(None, None))
        with monkeypatch.context() as forbidden:
            forbidden.setattr(kernel, "_amax", None)
            same(encode_by_kernel(x, operand, compat=compat, amax=largest(x)), want)
            for got, expected in zip(encode_both(x, operand, operand, compat=(compat, compat), noise=(None, None), amax=largest(x)), both):
                same(got, expected)


@pytest.mark.parametrize("recipe", ["fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4"])
def test_both_sides_of_dy_from_one_reading(recipe, kernels, device, rng):
    precision = Precision(recipe=recipe)
    (rows, _), (cols, _) = precision.operands("dgrad", recipe), precision.operands("wgrad", recipe)
    dy = torch.randint(-60, 60, (68, 96), generator=rng, device=device).float()
    noise = tuple(NoiseKey(1, torch.tensor(7), 4, i) if o.stochastic else None for i, o in enumerate((rows, cols)))
    library = precision.library(recipe)
    assert encode_both(dy.cpu(), rows, cols, compat=(library, library), noise=noise) is None
    kernels()
    made = encode_both(dy, rows, cols, compat=(library, library), noise=noise)
    for got, x, operand, key in zip(made, (dy, dy.t()), (rows, cols), noise):
        with patch.object(module, "_kernel_codes", lambda *a: False):
            same(got, encode(x.cpu(), operand, compat=library, noise=key))


def test_one_reading_needs_the_same_kind(kernels, device):
    kernels()
    row, tile, high = Operand(format="e4m3", tile="row"), Operand(format="e4m3", tile="1x128"), Operand(format="high")
    delayed = Operand(format="e5m2", delayed=True)
    for pair in ((row, tile), (delayed, delayed), (row, high), (high, high)):
        assert encode_both(torch.ones(4, 4, device=device), *pair, compat=("te", "te"), noise=(None, None)) is None
