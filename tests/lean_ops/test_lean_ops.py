"""Reference: RMSNorm, SwiGLU, LoRA linear and document attention against plain torch, values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.kernels.document_attention import document_attention, rotate
from karui.kernels.document_attention.reference import document_attention as attention_reference
from karui.kernels.lora import frozen_linear, lora_linear
from karui.kernels.lora.reference import lora_linear as lora_reference
from karui.kernels.rms_norm import rms_norm
from karui.kernels.rms_norm.reference import rms_norm as norm_reference
from karui.kernels.swiglu import swiglu
from karui.kernels.swiglu.reference import swiglu as swiglu_reference


def _rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 9)])
def test_rms_norm_gradcheck_and_reference(shape):
    x, w = _rand(*shape), _rand(shape[-1], seed=1)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, w))
    assert torch.allclose(rms_norm(x, w, 1e-5), norm_reference(x, w, 1e-5), atol=1e-12)


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 7)])
def test_swiglu_gradcheck_and_reference(shape):
    gate, up = _rand(*shape), _rand(*shape, seed=1)
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    assert torch.allclose(swiglu(gate, up), swiglu_reference(gate, up), atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 3), (7, 5), (2, 3, 5)])
def test_lora_linear_gradcheck_and_reference(shape, bias):
    x, a, b = _rand(*shape), _rand(2, shape[-1], seed=1), _rand(4, 2, seed=2)
    w, c = _rand(4, shape[-1], seed=3).detach(), _rand(4, seed=4).detach() if bias else None

    def ours(x, a, b):
        return lora_linear(x, lambda dtype: w.to(dtype), c, a, b, 1.7)

    assert torch.autograd.gradcheck(ours, (x, a, b))
    assert torch.allclose(ours(x, a, b), lora_reference(x, w, c, a, b, 1.7), atol=1e-12)


def test_lora_linear_skips_the_input_gradient_when_the_input_needs_none():
    calls = []
    w = torch.randn(4, 3)

    def weight(dtype):
        calls.append(1)
        return w

    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    lora_linear(torch.randn(5, 3), weight, None, a, b, 1.0).sum().backward()
    assert len(calls) == 1 and a.grad is not None and b.grad is not None


def test_frozen_linear_keeps_nothing_and_passes_the_gradient():
    w = _rand(4, 3).detach()
    x = _rand(5, 3, seed=1)
    assert torch.autograd.gradcheck(lambda x: frozen_linear(x, lambda d: w, None), (x,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_linear(x, lambda d: w, None)
    assert kept == []


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), groups=st.sampled_from([(2, 2), (4, 2), (6, 2), (3, 1)]),
       seed=st.integers(0, 99))
def test_document_attention_equals_the_dense_mask(lengths, groups, seed):
    heads, kv_heads = groups
    tokens, bounds = sum(lengths), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    q, k, v = (_rand(1, h, tokens, 16, dtype=torch.float32, seed=seed + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    ours = document_attention(q, k, v, bounds, 0.25)
    exact = attention_reference(*(t.detach().double().requires_grad_() for t in (q, k, v)), bounds, 0.25)
    assert ours.shape == (1, tokens, heads, 16)
    assert (ours.double() - exact.transpose(1, 2)).abs().max() < 1e-5
    weight = _rand(*ours.shape, seed=seed + 7).detach()
    grads = torch.autograd.grad((ours * weight.float()).sum(), (q, k, v))
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    loss = (attention_reference(*doubles, bounds, 0.25).transpose(1, 2) * weight).sum()
    for mine, theirs in zip(grads, torch.autograd.grad(loss, doubles)):
        assert (mine.double() - theirs).abs().max() < 2e-5 * max(1.0, float(theirs.abs().max()))


def test_document_attention_in_float64_takes_the_general_path():
    q, k, v = _rand(1, 4, 9, 8), _rand(1, 2, 9, 8, seed=1), _rand(1, 2, 9, 8, seed=2)
    bounds = torch.tensor([0, 4, 9])
    assert torch.allclose(document_attention(q, k, v, bounds, 0.3), attention_reference(q, k, v, bounds, 0.3).transpose(1, 2))


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), window=st.none() | st.integers(1, 12), shared=st.booleans(),
       rotary=st.booleans(), value=st.sampled_from([8, 4]), cap=st.none() | st.floats(0.2, 5), sunk=st.booleans())
def test_windows_caps_and_sinks_equal_the_dense_mask(lengths, window, shared, rotary, value, cap, sunk):
    tokens, bounds = sum(lengths), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    q, k, v = _rand(1, 4, tokens, 8), _rand(1, 2, tokens, 8, seed=1), _rand(1, 2, tokens, value, seed=2)
    angle = torch.cat([_rand(tokens, 4, seed=3).detach()] * 2, -1)
    turn = (angle.cos(), angle.sin())
    leaves = (q, k, v) + ((sinks := _rand(4, seed=4)),) if sunk else (q, k, v)
    extra = {"window": window, "softcap": cap, "sinks": sinks if sunk else None}
    ours = document_attention(q, k, v, bounds, 0.3, shared=shared, rotary=turn if rotary else None, **extra)
    rq, rk = (rotate(x, *turn) for x in (q, k)) if rotary else (q, k)
    exact = attention_reference(rq, rk, v, bounds, 0.3, shared=shared, **extra).transpose(1, 2)
    assert ours.shape == (1, tokens, 4, value) and torch.allclose(ours, exact, atol=1e-12)
    weight = _rand(*ours.shape, seed=7).detach()
    for mine, theirs in zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (ours, exact))):
        assert torch.allclose(mine, theirs, atol=1e-10)


def test_long_documents_go_in_pieces():
    """More queries than exist at one moment, in a dtype that the native kernels refuse."""
    lengths = (300, 5, 150)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    q, k, v = _rand(1, 2, 455, 8), _rand(1, 1, 455, 8, seed=1), _rand(1, 1, 455, 8, seed=2)
    for extra in ({}, {"window": 200}):
        ours = document_attention(q, k, v, bounds, 0.3, shared=True, **extra)
        exact = attention_reference(q, k, v, bounds, 0.3, shared=True, **extra).transpose(1, 2)
        assert torch.allclose(ours, exact, atol=1e-12)
        for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, exact))):
            assert torch.allclose(mine, theirs, atol=1e-10)


@pytest.mark.parametrize(("extra", "said"), [({"window": 0}, "at least the token itself"), ({"softcap": 0.0}, "must be positive"),
                                             ({"sinks": torch.zeros(3)}, r"one sink per head, \[4\]; got \(3,\)")])
def test_attention_that_cannot_be_is_refused(extra, said):
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(KaruiError, match=said):
        document_attention(q, q, q, torch.tensor([0, 3]), 1.0, **extra)


@pytest.mark.parametrize("shared", [False, True])
def test_values_may_be_narrower_than_keys(shared):
    q, k, v = (_rand(1, h, 12, d, dtype=torch.float32, seed=i) for i, (h, d) in enumerate(((4, 16), (4, 16), (4, 10))))
    bounds = torch.tensor([0, 5, 12])
    ours = document_attention(q, k, v, bounds, 0.25, shared=shared)
    exact = attention_reference(q, k, v, bounds, 0.25, shared=shared).transpose(1, 2)
    assert ours.shape == (1, 12, 4, 10) and torch.allclose(ours, exact, atol=1e-6)
    weight = _rand(*ours.shape, seed=7).detach().float()
    for mine, theirs in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (ours, exact))):
        assert torch.allclose(mine, theirs, atol=1e-5)
