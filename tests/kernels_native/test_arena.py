"""Unit: the arena's tensors are zeroed, aligned, disjoint, and outlive it."""

from __future__ import annotations

import pytest
import torch

from karui.kernels.native.arena import HUGE, Arena


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float16, torch.float32))
def test_pieces_are_aligned_zeroed_and_disjoint(dtype):
    arena = Arena()
    pieces = [arena.zeros(n, dtype) for n in (1, 64, 1000, 0, 31)]
    for i, piece in enumerate(pieces):
        assert piece.dtype == dtype and piece.data_ptr() % 64 == 0 and not piece.any()
        piece.fill_(i + 1)
    assert all((piece == i + 1).all() for i, piece in enumerate(pieces))
    assert pieces[0].data_ptr() % HUGE == 0, "the first piece starts on a huge page"
    assert 0 < pieces[1].data_ptr() - pieces[0].data_ptr() <= 64, "pieces lie one after the other"


def test_larger_than_a_mapping_and_after_the_arena_is_gone():
    arena = Arena()
    big = arena.zeros((64 << 20) + 5, torch.uint8)
    x = torch.arange(12.0).view(3, 4).t()
    copy = arena.take(x)
    del arena
    big[-1] = 7
    assert copy.is_contiguous() and torch.equal(copy, x) and big[-1] == 7
