"""Reference: block-scaled GEMMs against the float64 product of the dequantized operands.

The interpreter reads NVFP4's scales wrongly in `dot_scaled`; there NVFP4 runs on the decoding path, which decodes in integers.
The `dot_scaled` of NVFP4 is checked by compilation (test_offline) and on hardware by the same tests.
"""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_mx import gemm_mx
from karui.kernels.train_quantize import quantize_both


@pytest.mark.parametrize(("m", "n", "k"), [(1, 2, 32), (67, 70, 150), (5, 130, 257)])
@pytest.mark.parametrize("path", ["scaled", "decoded"])
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4", "nvfp4-16x16"])
def test_values(kind, path, m, n, k, device, rng):
    from karui.kernels.gemm_mx import triton

    form = kind.split("-")[0]
    if path == "scaled" and not triton.native(device, form):
        pytest.skip("no block-scaled product for this format here")
    a, _ = quantize_both(torch.randn(m, k, generator=rng, device=device) * 3, form, cols=False)
    b, _ = quantize_both(torch.randn(n, k, generator=rng, device=device), kind, cols=False)
    got = triton.gemm_mx(a, b, torch.float32, form, path == "scaled")
    want = a.dequantize().double() @ b.dequantize().double().t()
    assert got.shape == (m, n)
    bound = 1e-5 if device.type == "cpu" else 1e-3
    assert (got.double() - want).abs().max() <= bound * want.abs().max()


def test_dispatch_and_refusals(device, rng):
    x = torch.randn(4, 64, generator=rng, device=device)
    mx, nv = (quantize_both(x, kind, cols=False)[0] for kind in ("mxfp4", "nvfp4"))
    got = gemm_mx(nv, nv, torch.bfloat16, backend="triton")
    torch.testing.assert_close(got.float(), gemm_mx(nv, nv, torch.float32, backend="torch"), rtol=1e-2, atol=1e-2)
    with pytest.raises(KaruiError, match="of one format"):
        gemm_mx(mx, nv)
    with pytest.raises(KaruiError, match="no MX or NVFP4"):
        gemm_mx(*[quantize_both(x, "e4m3-tensor", cols=False)[0]] * 2)
