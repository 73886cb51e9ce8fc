"""Reference: attention over gathered keys and values, rank by rank, against the dense masked reference, with gradients in float64."""

import pytest
import torch

from karui.kernels.document_attention.reference import document_attention
from karui.trainers import context
from karui.trainers.data import IGNORE
from tests.kernels.triton.pretend import PretendGpu


def group(rank, size):
    return context.ContextGroup(group=None, rank=rank, size=size)


@pytest.mark.parametrize("lengths", [[12], [5, 7], [1, 1, 9, 2], [3, 14, 2]])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("width", [8, 5])
def test_the_ranks_rows_are_those_of_the_whole(monkeypatch, lengths, size, width):
    """`_Gather` without processes: every rank is given the whole keys and values; values as wide as keys, or narrower (MLA)."""
    monkeypatch.setattr(context, "QUERY_ROWS", 4)
    total = sum(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    row = torch.arange(total)
    pieces = [context.split(group(r, size), row, row, cu, row) for r in range(size)]
    bounds, padded = pieces[0][2], int(pieces[0][2][-1])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, padded, n, dtype=torch.float64, requires_grad=True) for heads, n in ((4, 8), (2, 8), (2, width)))
    wanted = document_attention(q, k, v, bounds, 0.3).transpose(1, 2)
    monkeypatch.setattr(context._Gather, "apply", lambda part, ranks: torch.cat((k, torch.nn.functional.pad(v, (0, 8 - width))), 1))
    parts = [context.context_attention(q[:, :, p[4].begin : p[4].end], k, v, bounds, 0.3, p[4]) for p in pieces]
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v), retain_graph=True) for x in (found, wanted))):
        torch.testing.assert_close(a, b)


def test_on_a_gpu_every_query_head_has_its_keys(monkeypatch):
    """Grouped heads and a mask together leave torch there with its kernel that holds all scores."""
    q, k, v = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    rows, cu = context.ContextRows(ranks=group(0, 1), begin=0, end=6), torch.tensor([0, 2, 6])
    monkeypatch.setattr(context._Gather, "apply", lambda part, ranks: part)
    wanted, asked = context.context_attention(q, k, v, cu, 0.3, rows), []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, k, v, **how: asked.append((q.shape[1], k.shape[1], how["enable_gqa"])) or real(q, k, v, **how))
    with PretendGpu():
        found = context.context_attention(*(x.to("cuda") for x in (q, k, v, cu)), 0.3, rows).cpu()
    assert asked == [(4, 4, False)] * 2
    torch.testing.assert_close(found, wanted)


def test_a_row_is_filled_up_with_a_document_without_loss():
    tokens, targets, cu = torch.arange(1, 6), torch.arange(5), torch.tensor([0, 2, 5], dtype=torch.int32)
    parts = [context.split(group(r, 4), tokens, tokens, cu, targets) for r in range(4)]
    assert torch.cat([p[0] for p in parts]).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert torch.cat([p[1] for p in parts]).tolist() == [1, 2, 3, 4, 5, 0, 1, 2]
    assert torch.cat([p[3] for p in parts]).tolist() == [0, 1, 2, 3, 4] + [IGNORE] * 3
    assert all(p[2].tolist() == [0, 2, 5, 8] for p in parts)
