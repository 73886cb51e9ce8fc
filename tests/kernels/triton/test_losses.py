"""Reference: row kernels of cross entropy and distillation losses, values and gradients, against float64 autograd."""

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.cross_entropy import linear_cross_entropy
from karui.kernels.cross_entropy import reference as ce_reference
from karui.kernels.linear_loss import linear_loss
from karui.kernels.linear_loss import reference as loss_reference


def close(got, want, bound):
    assert got.shape == want.shape
    assert (got.double() - want).abs().max() <= bound * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
@pytest.mark.parametrize(("n", "v"), [(1, 3), (7, 97), (5, 8200)])
def test_cross_entropy(n, v, dtype, bound, device, rng):
    hidden = torch.randn(n, 13, generator=rng, device=device).to(dtype).requires_grad_()
    weight = torch.randn(v, 13, generator=rng, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=rng, device=device)
    targets[0] = v - 1
    loss, count = linear_cross_entropy(hidden, weight, targets, chunk=3, backend="triton")
    (loss * 0.5).backward()
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    want = ce_reference.linear_cross_entropy(h, w, targets)
    (want * 0.5).backward()
    assert count == n
    for a, b in [(loss, want), (hidden.grad, h.grad), (weight.grad, w.grad)]:
        close(a.detach(), b.detach(), bound)


def test_cross_entropy_under_autocast(device, rng):
    """The products in its dtype; the gradients of fp32 tensors are in fp32."""
    hidden = torch.randn(7, 16, generator=rng, device=device, requires_grad=True)
    weight = torch.randn(97, 16, generator=rng, device=device, requires_grad=True)
    targets = torch.randint(0, 97, (7,), generator=rng, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets, chunk=3, backend="triton")
    loss.backward()
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    want = ce_reference.linear_cross_entropy(h, w, targets)
    want.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    for a, b in [(loss, want), (hidden.grad, h.grad), (weight.grad, w.grad)]:
        close(a.detach(), b.detach(), 3e-2)


def test_cross_entropy_of_no_rows(device):
    hidden = torch.zeros(0, 4, device=device, requires_grad=True)
    loss, count = linear_cross_entropy(hidden, torch.ones(3, 4, device=device), torch.zeros(0, dtype=torch.long), backend="triton")
    loss.backward()
    assert (float(loss), count) == (0.0, 0)


def test_masked_logits_do_not_make_nan(device):
    from karui.kernels.cross_entropy.triton import rows

    logits = torch.full((1, 9000), float("-inf"), device=device)
    logits[0, [3, 8500]] = 1.0
    losses = rows(logits, torch.tensor([3], device=device))
    close(losses, torch.tensor([2.0], dtype=torch.float64, device=device).log(), 1e-6)
    assert float(logits[0, 3]) == -0.5 and float(logits[0, 8500]) == 0.5 and torch.isfinite(logits).all()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_divergences(kind, temperature, device, rng):
    from karui.kernels.linear_loss.triton import divergence_rows

    hidden = torch.randn(5, 11, generator=rng, device=device)
    weight, teacher = torch.randn(301, 11, generator=rng, device=device), torch.randn(5, 301, generator=rng, device=device) * 3
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    loss, per_row = linear_loss(*mine, divergence_rows(kind, teacher, temperature=temperature, beta=0.3), chunk=2)
    (2 * loss).backward()
    theirs = [t.double().requires_grad_() for t in (hidden, weight)]
    want = loss_reference.loss_sum(*theirs, teacher.double(), lambda t, s: loss_reference.divergence(kind, t, s, 0.3), temperature)
    (2 * want).backward()
    close(loss.detach(), want.detach(), 1e-5)
    close(per_row.sum(), want.detach(), 1e-5)
    for a, b in zip(mine, theirs):
        close(a.grad, b.grad, 1e-5)


@pytest.mark.parametrize(("kind", "parameter"), [("forward_kl", None), ("reverse_kl", None), ("jsd", 0.3), ("jsd", 0.0), ("jsd", 1.0)])
def test_the_distillation_term(kind, parameter, device, rng):
    """`distill`'s term by kernel against its torch form; the logits it is given stay as they are."""
    from karui.distill.divergences import divergence
    from karui.distill.objectives.logits import Logits
    from karui.distill.teacher_rows import DenseRows

    teacher = DenseRows(torch.randn(6, 9, generator=rng, device=device), torch.randn(130, 9, generator=rng, device=device))
    logits = torch.randn(4, 130, generator=rng, device=device) * 2
    before = logits.clone()
    fast, slow = (Logits(teacher, divergence(kind, parameter), 1.7, backend)(1, 5, logits) for backend in ("triton", "torch"))
    for got, want in zip(fast, slow):
        close(got, want.double(), 1e-5)
    assert torch.equal(logits, before)


def test_a_divergence_without_a_kernel(device):
    from karui.distill.divergences import divergence
    from karui.distill.objectives.logits import Logits

    with pytest.raises(UnsupportedError, match="no kernel for this divergence"):
        Logits(None, divergence("total_variation"), backend="triton")(0, 1, torch.zeros(1, 3, device=device))


def test_divergence_refusals():
    from karui.kernels.linear_loss.triton import divergence_rows

    with pytest.raises(KaruiError, match="is not known"):
        divergence_rows("kl", torch.zeros(1, 2))
    with pytest.raises(KaruiError, match="beta"):
        divergence_rows("jsd", torch.zeros(1, 2), beta=1.0)
