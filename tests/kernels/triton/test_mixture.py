"""Reference: the experts of a mixture, values and gradients, against float64 autograd token by token."""

import pytest
import torch
import torch.nn.functional as F

from karui.kernels.gemm_grouped import gemm_grouped
from karui.kernels.mixture import mixture
from karui.kernels.swiglu import swiglu


def by_token(x, chosen, share, gate_up, down):
    def one(row, e):
        gate, up = (gate_up[e] @ row).chunk(2)
        return down[e] @ (F.silu(gate) * up)

    return torch.stack([sum(s * one(row, e) for e, s in zip(es.tolist(), ss)) for row, es, ss in zip(x, chosen, share)])


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("tokens", "experts", "each"), [(1, 7, 3), (19, 3, 2)])
def test_values_and_gradients(tokens, experts, each, backend, device, rng):
    dtype, bound = (torch.float32, 2e-5) if device.type == "cpu" else (torch.bfloat16, 3e-2)

    def made(*shape):
        return torch.randn(*shape, generator=rng, device=device).to(dtype).requires_grad_()

    x, gate_up, down, share = made(tokens, 20), made(experts, 34, 20), made(experts, 20, 17), made(tokens, each)
    chosen = torch.rand(tokens, experts - 1, generator=rng, device=device).topk(each).indices  # none for the last
    share64, x64, gate64, down64 = (t.detach().double().requires_grad_() for t in (share, x, gate_up, down))
    got = mixture(x, chosen, share, experts, lambda r, g: gemm_grouped(r, gate_up, g, backend), lambda r: swiglu(*r.chunk(2, -1)),
                  lambda r, g: gemm_grouped(r, down, g, backend), backend)  # fmt: skip
    want = by_token(x64, chosen, share64, gate64, down64)
    grad = torch.randn(got.shape, generator=rng, device=device).to(dtype)
    got.backward(grad)
    want.backward(grad.double())
    pairs = [(got, want), (x.grad, x64.grad), (share.grad, share64.grad), (gate_up.grad, gate64.grad), (down.grad, down64.grad)]
    for a, b in pairs:
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape and (a.double() - b).abs().max() <= bound * b.abs().max()
    assert gate_up.grad[-1].abs().max() == 0 == down.grad[-1].abs().max()
