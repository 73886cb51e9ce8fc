"""Unit and reference tests: feature and relation losses, captured states, shared vocabularies, byte alignment."""

import numpy as np
import pytest
import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.distill import alignment, capture
from karui.distill.divergences import divergence
from karui.distill.features import FeatureLoss, layer_map
from karui.distill.objectives import head_loss
from karui.distill.objectives.first_byte import FirstByte, first_bytes
from karui.distill.objectives.logits import Logits
from karui.distill.relations import angle, distance, relation_sum
from karui.distill.teacher_rows import DenseRows
from karui.distill.vocabulary import share

torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_feature_losses_are_sums_over_tokens(kind):
    loss = FeatureLoss([(0, 0), (1, 2)], 4, 6, kind).double()
    student, teacher = {d: torch.randn(7, 4).double() for d in (0, 1)}, {d: torch.randn(7, 6).double() for d in (0, 2)}
    whole = loss(student, teacher)
    parts = [loss({d: v[s] for d, v in student.items()}, {d: v[s] for d, v in teacher.items()}) for s in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(sum(parts), whole)
    by_hand = 0.0
    for (s, t), p in zip(loss.pairs, loss.projections):
        for ours, theirs in zip(student[s] @ p.weight.T, teacher[t]):
            by_hand += (ours - theirs).square().mean() if kind == "mse" else 1 - ours @ theirs / ours.norm() / theirs.norm()
    torch.testing.assert_close(whole, by_hand / 2)
    whole.backward()
    assert all(p.weight.grad.abs().sum() > 0 for p in loss.projections)


def test_equal_widths_need_no_projection_and_the_same_states_cost_nothing():
    loss = FeatureLoss([(1, 1)], 5, 5, "mse")
    assert not list(loss.parameters())
    x = {1: torch.randn(3, 5)}
    assert loss(x, x) == 0
    with pytest.raises(KaruiError, match="needs a projection"):
        FeatureLoss([(1, 1)], 5, 6, project=False)


def test_layer_maps():
    assert layer_map("uniform", 3, 6) == ((1, 2), (2, 4))
    assert layer_map("kept", 3, 6, kept=(0, 3, 5)) == ((1, 3), (2, 5))
    assert layer_map("embedding", 3, 6) == ((0, 0),) and layer_map("last", 3, 6) == ((3, 6),)
    with pytest.raises(KaruiError, match="needs the teacher layer"):
        layer_map("kept", 3, 6)
    with pytest.raises(KaruiError, match="not known"):
        layer_map("diagonal", 3, 6)


def test_relations_ignore_rotation_scale_and_shift_and_nothing_else():
    x = torch.randn(9, 6, dtype=torch.float64)
    q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    for loss in (distance, angle):
        assert loss(3 * x @ q + 2, x) < 1e-20
        assert loss(x @ torch.diag(torch.linspace(0.1, 4, 6).double()), x) > 1e-3


@pytest.mark.parametrize("kind", ["distance", "angle", "value"])
def test_relations_of_documents_do_not_depend_on_packing(kind):
    student, teacher = torch.randn(12, 4).double(), torch.randn(12, 8).double()
    whole = relation_sum(kind, student, teacher, torch.tensor([0, 5, 12]), heads=2)
    alone = [relation_sum(kind, student[a:b], teacher[a:b], torch.tensor([0, b - a]), heads=2) for a, b in ((0, 5), (5, 12))]
    torch.testing.assert_close(whole, sum(alone))


def test_value_relations_by_brute_force():
    s, t = torch.randn(5, 4).double(), torch.randn(5, 8).double()
    total = 0.0
    for head in range(2):
        a, b = s[:, 2 * head : 2 * head + 2], t[:, 4 * head : 4 * head + 4]
        p, q = (b @ b.T / 2).softmax(-1), (a @ a.T / 2**0.5).softmax(-1)
        total += (p * (p / q).log()).sum() / (2 * 5)
    torch.testing.assert_close(relation_sum("value", s, t, torch.tensor([0, 5]), heads=2), total * 5)
    with pytest.raises(KaruiError, match="do not divide into 3 heads"):
        relation_sum("value", s, t, torch.tensor([0, 5]), heads=3)


def test_captured_depths_are_the_residual_stream():
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    x = torch.randn(1, 4, 3)
    with capture.depths(layers, (0, 1, 3)) as found:
        y = x
        for layer in layers:
            y = layer(y)
    torch.testing.assert_close(found[0], x[0])
    torch.testing.assert_close(found[1], layers[0](x)[0])
    torch.testing.assert_close(found[3], y[0])
    assert not layers[0]._forward_pre_hooks
    with pytest.raises(KaruiError, match="does not exist"), capture.depths(layers, (4,)):
        pass


def test_shared_vocabularies():
    a = {"a": 0, "b": 1, "c": 2}
    assert share(a, dict(a), 8, 6).size == 6 and share(a, dict(a), 8, 6).ids is None
    assert share(a, {**a, "x": 3}, 8, 8).size == 3
    holes = share({"a": 0, "b": 1, "mine": 2, "c": 3}, {"a": 0, "b": 1, "yours": 2, "c": 3}, 4, 4)
    assert holes.ids.tolist() == [0, 1, 3]
    weight = torch.randn(4, 2)
    assert torch.equal(holes.rows(weight), weight[[0, 1, 3]])
    assert holes.covers(torch.tensor([0, 2, 3])).tolist() == [True, False, True] and holes.local(torch.tensor([3])).tolist() == [2]
    with pytest.raises(KaruiError, match="different ids in the two vocabularies .*align: bytes"):
        share(a, {"a": 1, "b": 0}, 3, 3)
    with pytest.raises(KaruiError, match="share 1 tokens"):
        share(a, {"a": 0, "x": 1, "y": 2}, 3, 3)


def test_bytes_of_both_conventions():
    assert alignment.token_bytes({"\u0120the": 0, "caf\u00c3\u00a9": 1, "<s>": 2}, special={2}) == [b" the", "café".encode(), None]
    assert alignment.token_bytes({"\u2581the": 0, "<0xC3>": 1, "é": 2}) == [b" the", b"\xc3", "é".encode()]
    with pytest.raises(KaruiError, match="no known bytes"):
        alignment.token_bytes({"日本": 0, "語": 1})


def test_rows_at_common_boundaries():
    table = [b"ab", b"c", b"a", b"bc", b"d", None]
    student, teacher = alignment.boundaries([0, 1, 4], table), alignment.boundaries([5, 2, 3, 4], table)
    assert student.tolist() == [0, 2, 3, 4] and teacher.tolist() == [0, 0, 1, 3, 4]
    ours, theirs = alignment.common_rows(student, teacher)
    assert ours.tolist() == [1] and theirs.tolist() == [2]      # after "abc" both predict "d"
    with pytest.raises(KaruiError, match="not of the same"):
        alignment.common_rows(student, np.array([0, 5]))


def test_the_same_tokenization_aligns_every_row():
    b = alignment.boundaries([0, 1, 4, 4], [b"ab", b"c", b"a", b"bc", b"d"])
    ours, theirs = alignment.common_rows(b, b)
    assert ours.tolist() == theirs.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "total_variation"])
def test_first_byte_equals_autograd_and_refines_to_the_plain_divergence(kind):
    g = torch.Generator().manual_seed(1)
    h, w = torch.randn(5, 4, generator=g).double().requires_grad_(), torch.randn(7, 4, generator=g).double().requires_grad_()
    teacher = DenseRows(torch.randn(5, 3, generator=g).double(), torch.randn(9, 3, generator=g).double())
    bs, bt = first_bytes([b"a", b"ab", b"b", None, b"c", b"bc", b"a"]), first_bytes([b"a", b"b", b"bb", b"c", b"ca", b"", b"b", b"a", b"a"])
    ours = head_loss(h, w, {"kd": (1.0, FirstByte(teacher, divergence(kind), bs, bt))}, 2).loss_sum
    used = [97, 98, 99, 256]
    s = torch.stack([(h @ w.T).softmax(-1)[:, bs == b].sum(-1) for b in used], -1)
    t = torch.stack([(teacher.hidden @ teacher.weight.T).softmax(-1)[:, bt == b].sum(-1) for b in used], -1)
    from karui.kernels.linear_loss.reference import divergence as plain

    wanted = plain(kind, t, s).sum()
    torch.testing.assert_close(ours, wanted)
    for a, b in zip(torch.autograd.grad(ours, (h, w)), torch.autograd.grad(wanted, (h, w))):
        torch.testing.assert_close(a, b)
    alone = torch.arange(7)
    same = head_loss(h, w, {"kd": (1.0, FirstByte(DenseRows(teacher.hidden, teacher.weight[:7]), divergence(kind), alone, alone))})
    dense = head_loss(h, w, {"kd": (1.0, Logits(DenseRows(teacher.hidden, teacher.weight[:7]), divergence(kind)))})
    torch.testing.assert_close(same.loss_sum, dense.loss_sum)
