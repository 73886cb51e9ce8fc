"""Reference: FP8 GEMMs against the float64 product of the dequantized operands. Codes come from the oracles (torch's casts), and
products of FP8 values are exact in fp32, so nothing rests on the interpreter's conversions."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_fp8 import gemm_fp8
from karui.kernels.quantize.elements import E4M3, E5M2
from karui.kernels.quantize.scaled_float8 import quantize_float8


@pytest.mark.parametrize(("m", "n", "k"), [(1, 3, 5), (70, 130, 300), (65, 64, 256)])
@pytest.mark.parametrize("tiles", [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("1x128", "128x128"), ("1x128", "1x128")], ids="-".join)
def test_values(tiles, m, n, k, device, rng):
    a = quantize_float8(torch.randn(m, k, generator=rng, device=device), tile=tiles[0])
    b = quantize_float8(torch.randn(n, k, generator=rng, device=device), tile=tiles[1])
    got = gemm_fp8(a, b, torch.float32, backend="triton")
    want = a.dequantize().double() @ b.dequantize().double().t()
    assert got.shape == (m, n)
    # hardware sums FP8 products in fewer bits than fp32; the interpreter does not
    bound = 1e-5 if device.type == "cpu" else 2e-3
    assert (got.double() - want).abs().max() <= bound * want.abs().max()


def test_mixed_elements_and_half_outputs(device, rng):
    a = quantize_float8(torch.randn(20, 48, generator=rng, device=device), element=E5M2)
    b = quantize_float8(torch.randn(30, 48, generator=rng, device=device), element=E4M3)
    want = a.dequantize().double() @ b.dequantize().double().t()
    for dtype, bound in [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)]:
        got = gemm_fp8(a, b, dtype, backend="triton")
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() <= bound * want.abs().max()


def test_small_tiles_share_a_multiprocessor():
    from karui.kernels.gemm_fp8 import triton as kernel

    # as compiled for sm_90: 163,872, 65,568 and 114,720 bytes, and 1,024 for each program, of 233,472
    assert [kernel.together(c, 2, True) for c in kernel.TILED] == [1, 3, 2]
    assert [kernel.together(c, 2, True) for c in kernel.WHOLE] == [1, 1, 2]
    assert {kernel.together(c, 2, False) for c in (*kernel.TILED_99K, *kernel.WHOLE_99K)} == {1}


def test_refusals(device):
    x = torch.ones(4, 128, device=device)
    with pytest.raises(KaruiError, match="do not go together"):
        gemm_fp8(quantize_float8(x, tile="128x128"), quantize_float8(x, tile="128x128"))
    with pytest.raises(KaruiError, match="takes FP8 codes"):
        gemm_fp8(quantize_float8(x), quantize_float8(x[:, :64]))
    with pytest.raises(KaruiError, match="not torch.float64"):
        gemm_fp8(quantize_float8(x), quantize_float8(x), torch.float64)
