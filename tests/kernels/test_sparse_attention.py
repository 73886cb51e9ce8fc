"""Reference: sparse attention in blocks of rows against whole matrices under autograd, in float64."""

import pytest
import torch

from karui.kernels import sparse_attention as module
from karui.kernels.sparse_attention import choose, indexer_loss, scores, sparse_attention
from karui.kernels.sparse_attention.reference import sparse_attention as dense

LENGTHS = (5, 17, 1, 11)


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    t, cu = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)
    q, k, v = (torch.randn(1, 3, t, d, dtype=dtype, requires_grad=True) for d in (8, 8, 6))
    # shifted: where no head is lit scores are exactly zero, and of equal ones any may be chosen
    index = [(torch.randn(*shape, dtype=dtype) + 0.7).requires_grad_() for shape in ((t, 4, 10), (t, 10), (t, 4))]
    return (q, k, v), index, cu, torch.rand(t, dtype=dtype)


@pytest.mark.parametrize("held", [1, 300, 1 << 22])
@pytest.mark.parametrize("top", [None, 2, 4, 16])
def test_output_loss_and_gradients_are_those_of_the_whole_matrices(top, held, monkeypatch):
    monkeypatch.setattr(module, "_HELD", held)
    (q, k, v), index, cu, weight = inputs()
    chosen = choose(*index, cu, top or 100)
    assert [c is None for c in chosen] == [top is None or n <= top for n in LENGTHS]
    out, loss = sparse_attention(q, k, v, cu, 0.4, chosen), indexer_loss(*index, q, k, cu, 0.4, weight, chosen)
    given = torch.randn_like(out)
    got = torch.autograd.grad((out * given).sum() + 3 * loss, (q, k, v, *index))
    wanted_out, wanted_loss = dense(q, k, v, *index, cu, 0.4, weight, top)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(loss, wanted_loss)
    wanted = torch.autograd.grad((wanted_out * given).sum() + 3 * wanted_loss, (q, k, v, *index))
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    assert float(loss.detach()) > 0 and all(float(g.abs().max()) > 0 for g in got[3:])


def test_the_loss_is_zero_where_the_index_says_what_attention_does():
    """One head of both kinds with the same scores, all positive: p is the index's own distribution."""
    q, k = (torch.rand(1, 1, 12, 8, dtype=torch.float64) for _ in range(2))
    index = [q[0].transpose(0, 1).clone(), k[0, 0].clone(), torch.ones(12, 1, dtype=torch.float64)]
    cu = torch.tensor([0, 12])
    for chosen in (None, choose(*index, cu, 3)):
        loss = indexer_loss(*index, q, k, cu, 8**-0.5, torch.ones(12, dtype=torch.float64), chosen)
        assert abs(float(loss)) < 1e-12


def test_documents_do_not_see_one_another():
    (q, k, v), index, cu, weight = inputs()
    whole = sparse_attention(q, k, v, cu, 0.4, choose(*index, cu, 4))
    losses = []
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        part, own = torch.tensor([0, b - a]), [x[a:b] for x in index]
        rows = [x[:, :, a:b] for x in (q, k, v)]
        chosen = choose(*own, part, 4)
        torch.testing.assert_close(sparse_attention(*rows, part, 0.4, chosen), whole[:, a:b])
        losses.append(indexer_loss(*own, *rows[:2], part, 0.4, weight[a:b], chosen))
    torch.testing.assert_close(sum(losses), indexer_loss(*index, q, k, cu, 0.4, weight, choose(*index, cu, 4)))


def test_with_every_key_chosen_it_is_dense_attention_in_training_dtypes():
    from karui.kernels.document_attention import document_attention

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        (q, k, v), _, cu, _ = inputs(dtype)
        every = [torch.arange(n).int().expand(n, n) for n in LENGTHS]
        out = sparse_attention(q, k, v, cu, 0.4, every)
        assert out.dtype == dtype
        torch.testing.assert_close(out, document_attention(q, k, v, cu, 0.4), atol=tolerance, rtol=tolerance)


def test_scores_keep_the_order_of_the_best():
    _, index, cu, _ = inputs(torch.float32)
    keys = choose(*index, cu, 4)[1]
    a, b = int(cu[1]), int(cu[2])
    score = scores(index[0][a:b], index[1][a:b], index[2][a:b]).detach()
    for t in range(b - a):
        picked = score[t, keys[t, : t + 1].long()]
        assert bool((picked.diff() <= 0).all())
        assert t < 4 or float(picked.min()) >= float(score[t, : t + 1].sort(descending=True).values[3])
