"""Reference: DoRA's norm and scaling against the written-out formula in float64, by gradient check, and rows of zeros."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.kernels.dora import row_norms, scale_rows, squared_row_norms
from karui.kernels.dora.reference import dora_linear
from karui.kernels.lora import lora_linear


def parts(seed, out=7, width=9, rank=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=g, dtype=dtype) for s in [(out, width), (rank, width), (out, rank), (out,)]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), out=st.integers(1, 12), width=st.integers(1, 12), rank=st.integers(1, 5), s=st.floats(-3, 3))
def test_norm_is_that_of_the_formed_matrix(seed, out, width, rank, s):
    w, a, b, _ = parts(seed, out, width, rank)
    formed = (w + s * (b @ a)).norm(dim=1)
    assert torch.allclose(row_norms(w, squared_row_norms(w), a, b, s), formed, rtol=1e-6, atol=1e-7)


def test_norm_in_float64_is_exact_to_rounding():
    w, a, b, _ = parts(0, 64, 96, 8)
    formed = (w + 2 * (b @ a)).norm(dim=1)
    assert float(((row_norms(w, squared_row_norms(w), a, b, 2.0) - formed) / formed).abs().max()) < 1e-14


@pytest.mark.parametrize("bias", [False, True])
def test_layer_and_gradients_are_those_of_the_paper(bias):
    w, a, b, m = parts(1)
    c = torch.randn(7, dtype=torch.float64) if bias else None
    x = torch.randn(2, 5, 9, dtype=torch.float64, requires_grad=True)
    leaves = [t.clone().requires_grad_() for t in (a, b, m)]
    other = [t.clone().requires_grad_() for t in (a, b, m)]
    dy = torch.randn(2, 5, 7, dtype=torch.float64)
    norm = row_norms(w, squared_row_norms(w), leaves[0], leaves[1], 1.5)
    ours = scale_rows(lora_linear(x, lambda dtype: w.to(dtype), None, leaves[0], leaves[1], 1.5), leaves[2], norm)
    ours = ours if c is None else ours + c
    dx, = torch.autograd.grad(ours, x, dy, retain_graph=True)
    ours.backward(dy)
    x2 = x.detach().clone().requires_grad_()
    theirs = dora_linear(x2, w, c, *other, 1.5)
    theirs.backward(dy)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12) and torch.allclose(dx, x2.grad, rtol=1e-11, atol=1e-12)
    for p, q in zip(leaves, other):
        assert torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-11)


def test_gradients_where_the_magnitude_or_the_row_is_zero():
    y = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    norm = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
    m = torch.tensor([1.0, 0.0, -2.0, 0.3, 0.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, m: scale_rows(y, m, norm), (y, m))
    out = scale_rows(y.detach(), m, norm * 0)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(m.grad, torch.zeros_like(m))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_magnitude_of_zero_learns_in_every_dtype(dtype):
    y, dy = torch.randn(6, 5).to(dtype), torch.randn(6, 5).to(dtype)
    norm, m = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]), torch.tensor([1.0, 0.0, -2.0, 0.3, 0.0], requires_grad=True)
    out = scale_rows(y, m, norm)
    out.backward(dy)
    expected = (dy.double() * y.double()).sum(0) / norm
    coarse = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-2}[dtype]
    assert out[:, [1, 4]].abs().max().float() < 1e-19 and (m.grad - expected).abs().max() < coarse * expected.abs().max()
