"""Reference: grouped products, values and gradients, against float64 autograd over one product per expert."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_grouped import gemm_grouped, reference


@pytest.mark.parametrize(("counts", "n", "k"), [((3, 0, 70), 17, 24), ((0, 1), 130, 65)])
def test_values_and_gradients(counts, n, k, device, rng):
    dtype, bound = (torch.float32, 1e-5) if device.type == "cpu" else (torch.bfloat16, 2e-2)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], device=device)
    x = torch.randn(sum(counts), k, generator=rng, device=device).to(dtype).requires_grad_()
    w = torch.randn(len(counts), n, k, generator=rng, device=device).to(dtype).requires_grad_()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    y, want = gemm_grouped(x, w, offsets, "triton"), reference.gemm_grouped(x64, w64, offsets)
    grad = torch.randn(y.shape, generator=rng, device=device).to(dtype)
    y.backward(grad)
    want.backward(grad.double())
    for a, b in ((y, want), (x.grad, x64.grad), (w.grad, w64.grad)):
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape and (a.double() - b).abs().max() <= bound * b.abs().max()


def test_refusals():
    with pytest.raises(KaruiError, match="offsets"):
        gemm_grouped(torch.ones(2, 3), torch.ones(2, 4, 3), torch.tensor([0, 2]))
    with pytest.raises(KaruiError, match="cast one"):
        gemm_grouped(torch.ones(2, 3), torch.ones(1, 4, 3).half(), torch.tensor([0, 2]))
