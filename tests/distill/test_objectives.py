"""Reference tests: every logit loss against float64 autograd over the whole logits, the papers' numbers, and every split."""

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.distill.divergences import NAMES, divergence
from karui.distill.objectives import head_loss
from karui.distill.objectives.labels import Labels
from karui.distill.objectives.logits import Logits
from karui.distill.objectives.policy_gradient import PolicyGradient
from karui.distill.objectives.sampled import Sampled
from karui.distill.objectives.topk import TopK
from karui.distill.objectives.weighted import Weighted
from karui.distill.teacher_rows import DenseRows, SampledRows, TopKRows
from karui.kernels.linear_loss import reference

T, S = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[0.5, 0.3, 0.2]]).double()
KINDS = [("forward_kl", None), ("reverse_kl", None), ("total_variation", None), ("jsd", 0.0), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 1.0),
         ("skewed_kl", 0.0), ("skewed_kl", 0.1), ("skewed_reverse_kl", 0.1), ("skewed_reverse_kl", 0.0), ("sorted_l1", None)]


def problem(rows=13, hidden=6, vocab=11, teacher_hidden=5, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *s: torch.randn(*s, generator=g, dtype=dtype)  # noqa: E731
    h, w = make(rows, hidden).requires_grad_(), make(vocab, hidden).requires_grad_()
    return h, w, DenseRows(make(rows, teacher_hidden), make(vocab, teacher_hidden))


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def same(ours, theirs, tolerance=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("beta", "value"), [(0.0, 0.085123), (0.1, 0.007695), (0.5, 0.021901), (0.9, 0.008185), (1.0, 0.092033)])
def test_generalised_jsd_has_the_published_values(beta, value):
    assert float(divergence("jsd", beta)(T.log(), S.log())[0]) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("kind", "parameter"), KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_divergence_equals_autograd(kind, parameter, temperature, chunk):
    h, w, teacher = problem()
    ours = head_loss(h, w, {"kd": (1.0, Logits(teacher, divergence(kind, parameter), temperature))}, chunk)
    wanted = reference.loss_sum(h, w, teacher.hidden @ teacher.weight.T,
                                lambda t, s: reference.divergence(kind, t, s, parameter or 0.0), temperature)
    torch.testing.assert_close(ours.loss_sum, wanted)
    same(gradients(ours.loss_sum * 0.3, h, w), gradients(wanted * 0.3, h, w))
    assert ours.count == 13 and ours.terms["kd"] == pytest.approx(wanted.item())


@pytest.mark.parametrize(("kind", "parameter"), [k for k in KINDS if k[0] != "sorted_l1"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k_with_a_tail_equals_autograd_over_buckets(kind, parameter, temperature):
    h, w, teacher = problem()
    logits = teacher.hidden @ teacher.weight.T
    rows = TopKRows.of(logits.clone(), 3, temperature)
    ours = head_loss(h, w, {"kd": (1.0, TopK(rows, divergence(kind, parameter)))}, 4)

    def of(t, s):
        return reference.divergence(kind, reference.buckets(t, rows.ids), reference.buckets(s, rows.ids), parameter or 0.0)

    wanted = reference.loss_sum(h, w, logits, of, temperature)
    torch.testing.assert_close(ours.loss_sum, wanted)
    same(gradients(ours.loss_sum, h, w), gradients(wanted, h, w))


def test_top_one_with_a_tail_has_the_published_value_and_renormalising_does_not():
    rows = TopKRows.of(T.log().clone(), 1)
    value = TopK(rows, divergence("forward_kl"))(0, 1, S.log())[0]
    assert float(value) == pytest.approx(0.082283, abs=1e-6)


def test_top_k_of_the_whole_vocabulary_is_the_dense_loss():
    h, w, teacher = problem()
    rows = TopKRows.of((teacher.hidden @ teacher.weight.T), 11)
    assert torch.isinf(rows.tail).all()
    sparse = head_loss(h, w, {"kd": (1.0, TopK(rows, divergence("forward_kl")))}).loss_sum
    dense = head_loss(h, w, {"kd": (1.0, Logits(teacher, divergence("forward_kl")))}).loss_sum
    torch.testing.assert_close(sparse, dense)
    same(gradients(sparse, h, w), gradients(dense, h, w))


def test_a_sampled_teacher_is_unbiased_and_top_k_without_tail_would_not_be():
    h, w, teacher = problem(rows=4)
    logits = teacher.hidden @ teacher.weight.T
    generator = torch.Generator().manual_seed(1)
    draws = SampledRows.of(logits, 200_000, generator)
    sampled = head_loss(h, w, {"kd": (1.0, Sampled(draws))}).loss_sum
    dense = head_loss(h, w, {"kd": (1.0, Logits(teacher, divergence("forward_kl")))}).loss_sum
    same(gradients(sampled, h, w), gradients(dense, h, w), 0.03)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    assert (sampled - entropy).item() == pytest.approx(dense.item(), rel=0.02)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_sampled_equals_autograd(temperature):
    h, w, _ = problem()
    ids, weights = torch.randint(0, 11, (13, 5)), torch.rand(13, 5, dtype=torch.float64)
    ours = head_loss(h, w, {"kd": (1.0, Sampled(SampledRows(ids, weights, temperature)))}, 4).loss_sum
    wanted = -(weights * (h @ w.T / temperature).log_softmax(-1).gather(1, ids)).sum() * temperature**2
    same(gradients(ours, h, w), gradients(wanted, h, w))


def test_policy_gradient_equals_autograd_and_stops_at_the_ratio_bound():
    h, w, _ = problem()
    target = torch.randint(0, 11, (13,))
    log_p = (h @ w.T).log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    sampler = log_p.detach() + torch.linspace(-3, 1, 13).double()
    teacher = torch.linspace(-4, 0, 13).double()
    ours = head_loss(h, w, {"pg": (1.0, PolicyGradient(target, sampler, teacher, 5.0))}, 4).loss_sum
    ratio = (log_p - sampler).exp().clamp(max=5.0)
    wanted = -(ratio * (teacher - sampler)).sum()
    torch.testing.assert_close(ours, wanted)
    same(gradients(ours, h, w), gradients(wanted, h, w))


def test_the_policy_gradient_averages_to_the_reverse_kl_gradient():
    """Summed over all tokens weighted by the sampler's probability, the estimate is the gradient of KL(student || teacher)."""
    h, w, teacher = problem(rows=1)
    log_p, log_q = (h @ w.T).log_softmax(-1).detach()[0], (teacher.hidden @ teacher.weight.T).log_softmax(-1)[0]
    every = torch.arange(11)
    term = Weighted(PolicyGradient(every, log_p, log_q, 1e9), log_p.exp())
    ours = head_loss(h.expand(11, -1), w, {"pg": (1.0, term)}).loss_sum
    wanted = reference.loss_sum(h, w, teacher.hidden @ teacher.weight.T, lambda t, s: reference.divergence("reverse_kl", t, s))
    same(gradients(ours, h, w), gradients(wanted, h, w))


def test_mixtures_add_up_and_split_anywhere():
    h, w, teacher = problem()
    target = torch.randint(0, 11, (13,))
    terms = {"label": (0.3, Labels(target)), "kd": (0.7, Logits(teacher, divergence("forward_kl"), 2.0)), "off": (0.0, Labels(target))}
    whole = head_loss(h, w, terms, 5)
    label = torch.nn.functional.cross_entropy(h @ w.T, target, reduction="sum")
    kd = reference.loss_sum(h, w, teacher.hidden @ teacher.weight.T, lambda t, s: reference.divergence("forward_kl", t, s), 2.0)
    wanted = 0.3 * label + 0.7 * kd
    same(gradients(whole.loss_sum, h, w), gradients(wanted, h, w))
    assert set(whole.terms) == {"label", "kd"}
    parts = []
    for rows in (slice(0, 2), slice(2, 9), slice(9, 13)):
        part = {"label": (0.3, Labels(target[rows])), "kd": (0.7, Logits(teacher.take(rows), divergence("forward_kl"), 2.0))}
        parts.append(head_loss(h[rows], w, part, 3).loss_sum)
    same(gradients(sum(parts), h, w), gradients(wanted, h, w))


@pytest.mark.parametrize("kind", ["labels", "full", "topk"])
def test_the_logits_are_never_whole(kind):
    """No tensor of a loss and its gradient is as large as [tokens, vocabulary]; the largest is a chunk of it or the head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    n, vocab, chunk = 400, 300, 16
    h, w, teacher = problem(n, 6, vocab, dtype=torch.float32)
    term = {"labels": lambda: Labels(torch.randint(0, vocab, (n,))), "full": lambda: Logits(teacher, divergence("forward_kl")),
            "topk": lambda: TopK(TopKRows.of(teacher.hidden @ teacher.weight.T, 4), divergence("forward_kl"))}[kind]()
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor))
            return out

    with Watch():
        gradients(head_loss(h, w, {"kd": (1.0, term)}, chunk).loss_sum, h, w)
    assert max(sizes) == chunk * vocab  # what 400 rows have is 25 times that


def test_sorted_l1_takes_vocabularies_of_different_size():
    h, w, _ = problem()
    _, _, teacher = problem(vocab=17, seed=3)
    for student, other in ((w, teacher), (w, DenseRows(teacher.hidden, teacher.weight[:5]))):
        ours = head_loss(h, student, {"kd": (1.0, Logits(other, divergence("sorted_l1")))}).loss_sum
        wanted = reference.loss_sum(h, w, other.hidden @ other.weight.T, lambda t, s: reference.divergence("sorted_l1", t, s))
        torch.testing.assert_close(ours, wanted)
        same(gradients(ours, h, w), gradients(wanted, h, w))


def test_no_rows_give_a_zero_that_can_be_differentiated():
    h, w, teacher = problem(rows=0)
    loss = head_loss(h, w, {"kd": (1.0, Logits(teacher, divergence("forward_kl")))})
    assert loss.loss_sum.item() == 0 and loss.count == 0
    assert all(not g.any() for g in gradients(loss.loss_sum, h, w))


def test_float32_stays_finite_when_the_two_disagree_wholly():
    w = torch.eye(4) * 200
    h = torch.tensor([[1.0, 0, 0, 0]]).requires_grad_()
    teacher = DenseRows(torch.tensor([[0.0, 1, 0, 0]]), torch.eye(4) * 200)
    for kind, parameter in KINDS:
        loss = head_loss(h, w, {"kd": (1.0, Logits(teacher, divergence(kind, parameter)))}).loss_sum
        assert torch.isfinite(loss) and torch.isfinite(gradients(loss, h)[0]).all(), kind
    rows = TopKRows.of((teacher.hidden @ teacher.weight.T), 2)
    for kind, parameter in KINDS[:-1]:
        loss = head_loss(h, w, {"kd": (1.0, TopK(rows, divergence(kind, parameter)))}).loss_sum
        assert torch.isfinite(loss) and torch.isfinite(gradients(loss, h)[0]).all(), kind


def test_bad_input_is_named():
    h, w, teacher = problem()
    bad = DenseRows(teacher.hidden.clone().fill_(float("nan")), teacher.weight)
    with pytest.raises(CorruptError, match="teacher's logits are not finite"):
        head_loss(h, w, {"kd": (1.0, Logits(bad, divergence("forward_kl")))})
    with pytest.raises(KaruiError, match="Did you mean 'forward_kl'"):
        divergence("forwardkl")
    with pytest.raises(KaruiError, match="needs beta between 0 and 1"):
        divergence("jsd")
    with pytest.raises(KaruiError, match="has no parameter"):
        divergence("forward_kl", 0.5)
    with pytest.raises(KaruiError, match="keeps 1 to 3 tokens"):
        TopKRows.of(T.log().clone(), 4)
    assert set(NAMES) == {k for k, _ in KINDS}
