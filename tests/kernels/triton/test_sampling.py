"""Reference: the sampling kernel draws what the plain form draws, from the same Philox numbers, and greedy is argmax."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.sampling import Settings, sample


def settings(rows, device, **values):
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, "position": 0} | values
    made = {n: torch.as_tensor(v, device=device).expand(rows) if not torch.is_tensor(v) else v.to(device) for n, v in base.items()}
    return Settings(**made)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5, "temperature": 1.7}], ids=str)
def test_draws(how, device, rng):
    logits = torch.randn(4, 203, generator=rng, device=device) * 2
    given = settings(4, device, seed=torch.arange(4) + (1 << 33), position=torch.arange(4, dtype=torch.int32) * 7, **how)
    got, chances, logprobs = sample(logits, given, "triton")
    tokens, *want = sample(logits, given, "torch")
    assert got.tolist() == tokens.tolist()
    for a, b in zip((chances, logprobs), want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if how.get("temperature") == 0.0:
        assert got.tolist() == logits.argmax(-1).tolist() and chances.tolist() == [1.0] * 4


def test_frequencies_follow_the_distribution(device):
    """The plain form, which the kernel equals draw by draw: 1,500 positions of one seed."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = sample(p.log().repeat(1500, 1), settings(1500, "cpu", position=torch.arange(1500, dtype=torch.int32)), "torch")[0]
    assert (drawn.bincount(minlength=4) / 1500 - p).abs().max() < 0.05


def test_refusals():
    with pytest.raises(KaruiError, match="length L"):
        sample(torch.zeros(2, 3), settings(1, "cpu"))
