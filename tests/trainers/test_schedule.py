"""Unit: learning rates against their definitions."""

import math

import pytest

from karui.configs.recipe import OptimSection
from karui.trainers.schedule import learning_rate, warmup_steps


@pytest.mark.parametrize("warmup,total,expected", [(0.1, 50, 5), (0.03, 10, 0), (7, 50, 7), (80, 50, 50), (0, 5, 0)])
def test_warmup_is_a_share_or_a_number(warmup, total, expected):
    assert warmup_steps(OptimSection(warmup=warmup), total) == expected


def test_cosine_and_linear_begin_at_lr_and_fall_to_the_final_share():
    for schedule, middle in (("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)):
        optim = OptimSection(lr=1.0, schedule=schedule, warmup=0, final_lr=0.1)
        rates = [learning_rate(optim, s, 100) for s in range(100)]
        assert rates[0] == 1.0 and rates[50] == pytest.approx(middle)
        assert all(a >= b for a, b in zip(rates, rates[1:]))
    assert learning_rate(OptimSection(lr=1.0, warmup=0), 25, 100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_warmup_rises_and_never_starts_at_zero():
    rates = [learning_rate(OptimSection(lr=1.0, warmup=4), s, 20) for s in range(6)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
