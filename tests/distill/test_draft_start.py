"""Behavioural: a drafting layer that starts as an induction head continues what it has seen before."""

import pytest
import torch

from karui.distill.drafts.start import calibrate, scale_fusion, start_copying
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config

V, H = 60, 128


@pytest.fixture
def world():
    """Tokens whose streams are a linear map of their embedding and noise of very different size by layer."""
    torch.manual_seed(0)
    table, maps = torch.randn(V, H), torch.randn(2, H, H) / H**0.5

    def streams(tokens):
        return torch.cat([5 * table[tokens] @ maps[0] + torch.randn(len(tokens), H), 300 * torch.randn(len(tokens), H) @ maps[1]], -1)

    layer = Eagle3(Eagle3Config(hidden_size=H, intermediate_size=64, num_heads=4, num_kv_heads=4, head_dim=32, vocab_size=V,
                                draft_vocab_size=V, aux_layers=(0, 1), rope_theta=1e5))
    with torch.no_grad():
        layer.lm_head.weight.copy_(table)
    return layer, table, streams


def right(layer, table, tokens, aux):
    """Share of drafts in the second half that are the token which comes."""
    n = len(tokens)
    with torch.no_grad():
        a, _ = layer(table[tokens[1:]], layer.fuse(aux[:-1]), torch.arange(n - 1), layer.empty_kv(), torch.ones(n - 1, n - 1).tril().bool())
    drafted = layer.log_probs(a).argmax(-1)
    return (drafted[n // 2 : n - 2] == tokens[n // 2 + 2 :]).float().mean().item()


def test_it_copies_before_it_is_trained(world):
    layer, table, streams = world
    texts = [torch.randint(0, V, (80,)) for _ in range(20)]
    aux = [streams(t) for t in texts]
    seen = torch.randperm(V)[:40].repeat(2)
    scale_fusion(layer, torch.cat(aux))
    assert right(layer, table, seen, streams(seen)) < 0.2
    assert start_copying(layer, aux, [table[t] for t in texts]) > 0.5
    assert right(layer, table, seen, streams(seen)) > 0.8
    assert right(layer, table, texts[0], aux[0]) < 0.2  # nothing to copy there


def test_fused_streams_have_unit_size_and_equal_parts(world):
    layer, _, streams = world
    aux = streams(torch.randint(0, V, (200,)))
    scale_fusion(layer, aux)
    with torch.no_grad():
        parts = [(aux[:, i : i + H] @ layer.fc.weight[:, i : i + H].T).pow(2).mean().sqrt().item() for i in (0, H)]
        assert layer.fuse(aux).pow(2).mean().sqrt().item() == pytest.approx(1.0, rel=0.3)
    assert parts[0] == pytest.approx(parts[1], rel=0.3)


def test_calibration_finds_the_least_loss(world):
    layer = world[0]
    assert calibrate(layer, lambda: abs(layer.norm.weight[0].item() - 0.35)) == pytest.approx(0.7**3)
    assert torch.all(layer.norm.weight == layer.norm.weight[0]) and layer.norm.weight[0].item() == pytest.approx(0.343)
