"""Reference tests of the losses that balance a mixture, and of how routers are found: against transformers' and plain loops."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from karui.distill import balance
from karui.distill.routers import find_routers, watching
from karui.inference.models.config import from_hf
from tests.trainers.test_architectures import KINDS

T, E, K = 37, 6, 2
MIXTURES = ("mixtral", "deepseek_v2", "deepseek_v3", "granitemoe", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "dots1",
            "exaone_moe", "solar_open", "gpt_oss", "glm4_moe_lite")


def logits_of(seed=0):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)).mul_(2).requires_grad_()


def tiny(kind, **more):
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**dict(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2), **KINDS[kind], **more})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim >= 2 or name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
    return model


def test_the_batch_wise_loss_is_transformers():
    ours, theirs = logits_of(), logits_of()
    share = balance.shares(ours, sigmoid=False)
    load = balance.counts(share.topk(K).indices, E) / T
    loss = balance.switch_sum(share, load) / T
    expected = load_balancing_loss_func((theirs,), E, K)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6) and float(load.sum()) == pytest.approx(K)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_even_load_gives_the_least_batch_wise_loss():
    logits = torch.eye(E).repeat(4, 1) * 9
    share = balance.shares(logits, sigmoid=False)
    assert float(balance.switch_sum(share, balance.counts(share.topk(1).indices, E) / len(logits)) / len(logits)) == pytest.approx(1)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_document_wise_loss_is_the_papers_sums(sigmoid):
    """Equations 17 to 20 of DeepSeek-V3, token by token in numpy."""
    logits = logits_of(1)
    sizes = [5, 1, 20, 11]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    ours = balance.sequence_sum(balance.shares(logits, sigmoid), K, documents, 4)
    x = logits.detach().double().numpy()
    expected, at = 0.0, 0
    for size in sizes:
        s = 1 / (1 + np.exp(-x[at : at + size])) if sigmoid else np.exp(x[at : at + size])
        loss = 0.0
        for i in range(E):
            f = E / (K * size) * sum(i in np.argsort(-s[t])[:K] for t in range(size))
            p = sum(s[t, i] / s[t].sum() for t in range(size)) / size
            loss += f * p
        expected, at = expected + size * loss, at + size
    assert float(ours.detach()) == pytest.approx(expected, rel=1e-6)


def test_documents_without_tokens_add_nothing():
    share, documents = balance.shares(logits_of(2).detach(), False), torch.zeros(T, dtype=torch.long)
    assert torch.equal(balance.sequence_sum(share, K, documents, 1), balance.sequence_sum(share, K, documents + 1, 3))
    assert float(balance.sequence_sum(share[:0], K, documents[:0], 2)) == 0


def test_the_z_loss_is_transformers():
    logits = logits_of(3)
    logits = logits.detach()
    assert float(balance.z_sum(logits)) / T == pytest.approx(float(router_z_loss_func(logits[None])), rel=1e-6)


def test_the_bias_goes_against_the_load():
    bias = torch.tensor([[0.5, -0.25, 0.0, 0.0]])
    moved = balance.moved(bias, torch.tensor([9, 1, 4, 6]).double(), 0.125)
    assert torch.equal(moved, torch.tensor([[0.375, -0.125, 0.125, -0.125]]))
    assert torch.equal(balance.moved(bias, torch.full((4,), 7.0), 0.125), bias)


def test_figures_of_even_and_of_collapsed_experts():
    even, one = torch.full((4,), 5.0), torch.tensor([0.0, 20.0, 0.0, 0.0])
    assert balance.figures([even], 1.0) == {"moe_max_load": 1.0, "moe_unused": 0.0, "moe_entropy": 1.0}
    assert balance.figures([even, one], 0.5) == {"moe_max_load": 2.5, "moe_unused": 3 / 8, "moe_entropy": 0.5}


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_are_found_and_their_scores_known(kind):
    """Which scores they are is known to the engine by another way, the configuration."""
    model = tiny(kind)
    routers = find_routers(model)
    expected = from_hf(model.config.to_dict()).mixture
    assert len(routers) == sum(expected.layers) and {r.sigmoid for r in routers} == {expected.sigmoid}
    assert {r.experts for r in routers} == {expected.experts} and all((r.bias is not None) == expected.corrected for r in routers)
    seen = [[] for _ in routers]
    with watching(routers, seen):
        model(torch.arange(9)[None])
    ((logits, indices),) = seen[0]
    assert logits.shape == (9, expected.experts) and indices.shape == (9, expected.per_token) and logits.requires_grad
    with torch.no_grad():
        model(torch.arange(9)[None])
    assert len(seen[0]) == 1


def test_one_expert_a_token_tells_nothing_of_scores():
    assert find_routers(tiny("mixtral", num_experts_per_tok=1))[0].sigmoid is False
    assert find_routers(tiny("minimax_m2", num_experts_per_tok=1))[0].sigmoid is True


def test_a_dense_model_has_no_routers():
    from transformers import LlamaConfig, LlamaForCausalLM

    assert find_routers(LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                                     num_attention_heads=2))) == []


def test_the_entropy_of_even_scores_is_all_there_is():
    share = balance.shares(torch.zeros(3, 5), True)
    assert float(torch.special.entr(share).sum() / 3 / math.log(5)) == pytest.approx(1)
