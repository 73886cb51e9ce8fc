"""Unit and reference: the chunked head loss against all logits at once, in float64 and by torch's gradient check."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.cross_entropy import linear_cross_entropy
from karui.kernels.cross_entropy.reference import linear_cross_entropy as reference


def _case(rows, width, vocabulary, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=g)


@pytest.mark.parametrize("rows,width,vocabulary,chunk", [(1, 1, 2, 1), (7, 5, 11, 3), (9, 6, 31, 4), (9, 6, 31, 1024)])
def test_gradcheck(rows, width, vocabulary, chunk):
    hidden, weight, targets = _case(rows, width, vocabulary, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, chunk)[0], (hidden, weight))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("chunk", [1, 6, 37, 64])
def test_equals_all_logits_at_once(dtype, tolerance, chunk):
    hidden, weight, targets = _case(37, 19, 203, dtype)
    loss, count = linear_cross_entropy(hidden, weight, targets, chunk)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))  # a scaled upstream gradient
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact = reference(exact_hidden, exact_weight, targets)
    exact_grads = torch.autograd.grad(exact * 0.37, (exact_hidden, exact_weight))
    assert count == 37
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(float(loss) - float(exact)) <= tolerance * float(exact)
    for ours, theirs in zip(grads, exact_grads):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


def test_frozen_weight_gets_no_gradient_and_large_logits_do_not_overflow():
    hidden, weight, targets = _case(5, 4, 9, torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e4, weight.detach(), targets, 2)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    expected = reference(hidden.detach().double() * 1e4, weight.detach().double(), targets)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_no_rows_is_zero_with_a_gradient_of_zeros():
    hidden, weight, targets = _case(0, 4, 9, torch.float32)
    loss, count = linear_cross_entropy(hidden, weight, targets, 2)
    assert count == 0 and float(loss) == 0.0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert not grad.any()


def test_a_nan_in_hidden_reaches_the_loss():
    hidden, weight, targets = _case(5, 4, 9, torch.float32)
    poisoned = hidden.detach().clone()
    poisoned[3, 1] = float("nan")
    assert torch.isnan(linear_cross_entropy(poisoned, weight, targets, 2)[0])


@pytest.mark.parametrize("targets,shape", [([0, 9], (2, 4)), ([-100, 1], (2, 4)), ([1], (2, 4)), ([0, 1], (2, 3))])
def test_bad_input_is_named(targets, shape):
    with pytest.raises(KaruiError, match="targets|takes hidden"):
        linear_cross_entropy(torch.zeros(shape), torch.zeros(9, 4), torch.tensor(targets), 2)


def test_never_allocates_all_logits():
    hidden, weight, targets = _case(64, 4, 50, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        linear_cross_entropy(hidden, weight, targets, 8)[0].backward()
    assert largest <= 8 * 50  # a chunk of logits; all of them would be 64 * 50


def test_capped_logits_against_autograd():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=g, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    targets = torch.randint(0, 11, (7,), generator=g)
    loss, count = linear_cross_entropy(hidden, weight, targets, 3, softcap=1.7)
    exact = torch.nn.functional.cross_entropy(1.7 * torch.tanh(hidden @ weight.T / 1.7), targets, reduction="sum")
    assert count == 7 and torch.allclose(loss, exact, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(2 * loss, (hidden, weight)), torch.autograd.grad(2 * exact, (hidden, weight))):
        assert torch.allclose(mine, theirs, atol=1e-11)
    with pytest.raises(KaruiError, match="softcap must be positive"):
        linear_cross_entropy(hidden, weight, targets, 3, softcap=-1.0)
