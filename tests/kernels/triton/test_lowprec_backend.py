"""Reference: the triton backend of `karui.lowprec` multiplies what emulation multiplies, up to the order of sums."""

import pytest
import torch

from karui.kernels.quantize.fused import NoiseKey
from karui.lowprec.backends import choose, multiply
from karui.lowprec.operand import encode
from karui.lowprec.precision import GEMMS, RECIPES, Precision


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_products_of_codes(recipe, gemm, device, rng):
    precision = Precision(recipe=recipe, backend="triton")
    assert choose(precision, device).backend == "triton"
    left, right = precision.operands(gemm, recipe)
    a, b = (torch.randn(shape, generator=rng, device=device) for shape in ((24, 144), (40, 144)))
    key = NoiseKey(0, torch.tensor(1), 2, 1) if left.stochastic else None
    a, b = encode(a, left, noise=key), encode(b, right)
    expected = multiply(a, b, "emulate", torch.float32)
    got = multiply(a, b, "triton", torch.float32)
    assert (got - expected).abs().max() <= 2e-3 * expected.abs().max()
