"""Reference: RMSNorm, SwiGLU and RoPE kernels, values and gradients, against float64 autograd over the plain form."""

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.rms_norm import reference as rms_reference
from karui.kernels.rms_norm import rms_norm
from karui.kernels.rope import reference as rope_reference
from karui.kernels.rope import rope
from karui.kernels.swiglu import reference as swiglu_reference
from karui.kernels.swiglu import swiglu

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(fast, exact, inputs, grad, bound):
    """Outputs and gradients of `fast` within `bound` of float64's, relative to the largest value; grad_output is scaled by 3."""
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    got, want = fast(*mine), exact(*theirs)
    got.backward((3 * grad).to(got.dtype))
    want.backward(3 * grad.to(got.dtype).double())
    for a, b in [(got, want), *[(m.grad, t.grad) for m, t in zip(mine, theirs)]]:
        assert a.shape == b.shape
        a, b = a.detach(), b.detach()
        assert (a.double() - b).abs().max() <= bound * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(("dtype", "bound"), DTYPES.items(), ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 96), (13, 129)], ids=str)
def test_rms_norm(shape, dtype, bound, device, rng):
    x = torch.randn(shape, generator=rng, device=device).to(dtype)
    w = (1 + 0.1 * torch.randn(shape[-1], generator=rng, device=device)).to(dtype)
    grad = torch.randn(shape, generator=rng, device=device)
    check(lambda x, w: rms_norm(x, w, 1e-5, "triton"), lambda x, w: rms_reference.rms_norm(x, w, 1e-5), [x, w], grad, bound)


def test_rms_norm_with_residual(device, rng):
    from karui.kernels.rms_norm.triton import add_rms_norm

    # in fp32: the interpreter cuts fp32 -> bf16 off where the hardware rounds
    x, r = (torch.randn(5, 33, generator=rng, device=device) for _ in range(2))
    w = torch.randn(33, generator=rng, device=device)
    normed, total, _ = add_rms_norm(x, r, w, 1e-6, torch.float32)
    assert torch.equal(total, x + r)
    torch.testing.assert_close(normed, rms_reference.rms_norm(x + r, w, 1e-6))


def test_swiglu_of_halves(device, rng):
    from karui.kernels.swiglu.triton import of_halves

    both = torch.randn(7, 2 * 1100 + 3, generator=rng, device=device)[:, :-3]  # rows apart
    torch.testing.assert_close(of_halves(both), swiglu_reference.swiglu(*both.chunk(2, -1)))


@pytest.mark.parametrize(("dtype", "bound"), DTYPES.items(), ids=str)
def test_swiglu(dtype, bound, device, rng):
    gate, up, grad = (torch.randn(7, 301, generator=rng, device=device) * 2 for _ in range(3))
    check(lambda a, b: swiglu(a, b, "triton"), swiglu_reference.swiglu, [gate.to(dtype), up.to(dtype)], grad, bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES.items(), ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 24), (17, 64)])
def test_rope(heads, width, dtype, bound, device, rng):
    x, grad = (torch.randn(5, heads, width, generator=rng, device=device) for _ in range(2))
    angle = torch.rand(5, width // 2, generator=rng, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    check(lambda x: rope(x, cos, sin, "triton"), lambda x: rope_reference.rope(x, cos.double(), sin.double()), [x.to(dtype)], grad, bound)


def test_rope_reads_a_slice_of_a_fused_projection(device, rng):
    fused = torch.randn(6, 5, 16, generator=rng, device=device)
    angle = torch.rand(6, 16, generator=rng, device=device)
    cos, sin = angle.cos(), angle.sin()  # [T, D]: only the first half is read
    part = fused[:, 1:3]
    torch.testing.assert_close(rope(part, cos, sin, "triton"), rope(part, cos, sin, "torch"))


def test_refusals(device):
    x = torch.zeros(2, 4, dtype=torch.float64, device=device)
    with pytest.raises(UnsupportedError, match=r"dtype torch.float64"):
        rms_norm(x, torch.ones(4, device=device), 1e-5, "triton")
    with pytest.raises(KaruiError, match="not known"):
        swiglu(x, x, "cuda")
    with pytest.raises(KaruiError, match="rope takes"):
        rope(torch.zeros(2, 1, 3), torch.zeros(2, 1), torch.zeros(2, 1))


@pytest.mark.parametrize(("n", "k", "wide", "fill"), [(37, 21, 16, 16), (4, 130, 65, 2), (64, 32, 16, 16)])
def test_pairs_of_codes_are_turned(n, k, wide, fill, device, rng):
    from karui.kernels.pack import transpose_pairs, unpack

    data = torch.randint(0, 256, (n, wide), generator=rng, device=device, dtype=torch.uint8)
    got, want = (transpose_pairs(data, k, fill, backend) for backend in ("triton", "torch"))
    assert torch.equal(got, want) and got.shape == (k, (n + fill - 1) // fill * fill // 2)
    assert torch.equal(unpack(got, 4, got.shape[1] * 2)[:, :n].t(), unpack(data, 4, wide * 2)[:, :k])
    with pytest.raises(KaruiError, match="do not hold"):
        transpose_pairs(data, 2 * wide + 1)
