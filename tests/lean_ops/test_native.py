"""Reference: the native training kernels against float64 autograd over the written-out form."""

import pytest
import torch

from karui.kernels.document_attention import document_attention
from karui.kernels.document_attention.reference import document_attention as reference
from karui.kernels.lora import gated_lora_linear
from karui.kernels.native import train as native
from karui.kernels.rms_norm import rms_norm
from karui.kernels.rms_norm.reference import rms_norm as norm_reference
from karui.kernels.swiglu import swiglu
from karui.kernels.swiglu.reference import swiglu as swiglu_reference

pytestmark = pytest.mark.skipif(not native.usable(torch.zeros(1, 64)), reason="no compiler, or torch runs on other threads")


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(f, inputs, seed=9):
    """Output and input gradients for one random output gradient."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = f(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, rand(*out.shape, seed=seed).to(out.dtype))


def close(ours, theirs, tolerance=3e-6):
    for a, b in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert float((a.double() - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (2, 37, 576)])
def test_norm_and_gate(shape):
    x, w, u = rand(*shape), rand(shape[-1], seed=1), rand(*shape, seed=2)
    close(gradients(lambda t: rms_norm(t, w.float(), 1e-5), [x.float()]), gradients(lambda t: norm_reference(t, w, 1e-5), [x]))
    close(gradients(swiglu, [5 * x.float(), u.float()]), gradients(swiglu_reference, [5 * x, u]))


def test_the_gate_at_its_ends_stays_finite():
    x = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, -0.0] * 2)
    out, (dgate, dup) = gradients(swiglu, [x, torch.ones(16)])
    assert torch.isfinite(out).all() and torch.isfinite(dgate).all() and torch.isfinite(dup).all()
    assert torch.allclose(out, torch.nn.functional.silu(x))


def test_gated_lora_makes_its_input_again():
    gate, up, w, a, b = rand(2, 7, 32), rand(2, 7, 32, seed=1), rand(16, 32, seed=2), rand(4, 32, seed=3), rand(16, 4, seed=4)

    def ours(g, u, a, b):
        return gated_lora_linear(g, u, lambda dtype: w.to(dtype), None, a, b, 1.7)

    def written_out(g, u, a, b):
        x = swiglu_reference(g, u)
        return x @ w.T + 1.7 * (x @ a.T) @ b.T

    close(gradients(ours, [t.float() for t in (gate, up, a, b)]), gradients(written_out, [gate, up, a, b]), 1e-5)
    assert torch.autograd.gradcheck(ours, [t.requires_grad_() for t in (gate, up, a, b)])


def rotated(x, cosine, sine):
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine


def written_out(q, k, v, bounds, shared, rotary):
    """Every document alone; with `shared` each after a copy of the first, whose rows are then thrown away."""
    if rotary:
        q, k = rotated(q, *rotary), rotated(k, *rotary)
    first = bounds[1] if shared else 0
    outs = []
    for i, (s, e) in enumerate(zip(bounds, bounds[1:])):
        whole = [t[:, :, s:e] if not i or not first else torch.cat((t[:, :, :first], t[:, :, s:e]), 2) for t in (q, k, v)]
        out = reference(*whole, torch.tensor([0, whole[0].shape[2]]), 0.3).transpose(1, 2)
        outs.append(out[:, first if i else 0 :])
    return torch.cat(outs, 1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads, kv_heads, size", [(4, 2, 32), (3, 3, 64), (6, 1, 32)])
@pytest.mark.parametrize("bounds", [[0, 5], [0, 1, 40, 41], [0, 33, 64, 131]])
def test_attention(bounds, heads, kv_heads, size, shared):
    total = bounds[-1]
    angle = torch.outer(torch.arange(total).double(), torch.linspace(1, 0.01, size // 2).double()).repeat(1, 2)
    rotary = (angle.cos(), angle.sin())
    inputs = [rand(1, total, n, size, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    cu = torch.tensor(bounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in (None, rotary):
            single = None if turn is None else tuple(t.float() for t in turn)
            q, k, v = (t.float().transpose(1, 2) for t in inputs)
            assert native.attention_usable(q, k, v, bounds)

            def ours(q, k, v, turn=single):
                return document_attention(*(t.transpose(1, 2) for t in (q, k, v)), cu, 0.3, shared=shared, rotary=turn)

            def theirs(q, k, v, turn=turn):
                return written_out(*(t.transpose(1, 2) for t in (q, k, v)), bounds, shared, turn)

            expected = gradients(theirs, inputs)
            close(gradients(ours, [t.float() for t in inputs]), expected)
            double = gradients(lambda q, k, v, t=turn: document_attention(  # the torch path
                *(x.transpose(1, 2) for x in (q, k, v)), cu, 0.3, shared=shared, rotary=t), inputs)
            close(double, expected, 1e-12)
    finally:
        torch.set_num_threads(threads)


def test_attention_of_bf16_inputs_under_fp32_tables():
    """As autocast hands them over: bf16's rounding of what float64 gives."""
    inputs = [rand(1, 60, n, 64, seed=i).bfloat16() for i, n in enumerate((4, 2, 2))]
    angle = torch.outer(torch.arange(60.0), torch.linspace(1, 0.01, 32)).repeat(1, 2)
    rotary, bounds = (angle.cos(), angle.sin()), [0, 11, 60]
    ours = gradients(lambda *t: document_attention(*(x.transpose(1, 2) for x in t), torch.tensor(bounds), 0.125, rotary=rotary), inputs)
    wide = tuple(t.double() for t in rotary)
    double = gradients(lambda *t: document_attention(*(x.transpose(1, 2) for x in t), torch.tensor(bounds), 0.125, rotary=wide),
                       [t.double() for t in inputs])
    assert ours[0].dtype == torch.bfloat16
    close(ours, double, 0.02)


def test_threads_change_no_bit():
    inputs = [rand(1, 150, n, 64, seed=i).float() for i, n in enumerate((6, 2, 2))]
    cu, found = torch.tensor([0, 20, 77, 150]), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(gradients(lambda *t: document_attention(*(x.transpose(1, 2) for x in t), cu, 0.125, shared=True), inputs))
    finally:
        torch.set_num_threads(threads)
    for out, grads in found[1:]:
        assert torch.equal(out, found[0][0]) and all(torch.equal(a, b) for a, b in zip(grads, found[0][1]))
