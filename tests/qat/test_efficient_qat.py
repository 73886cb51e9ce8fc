"""Reference and behavioural: E2E-QP's gradients against autograd in float64, its codes, its effect, its resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.qat.efficient_qat import DistilledLoss, StepLinear
from karui.qat.run import quantize_loaded
from karui.qat.types import Options
from tests.qat.conftest import rows, tiny

SETTINGS = {"epochs": 1, "e2e_epochs": 4, "e2e_lr": 3e-3}


@pytest.mark.parametrize("spec", ["w2g8", "w4g8a", "w8", "w3"])
def test_step_linear_is_its_codes_and_has_autograds_gradient(spec):
    torch.manual_seed(0)
    linear = nn.Linear(16, 5)
    q = quantize(linear.weight, QuantSpec.parse(spec))
    module, x, grad = StepLinear(linear, q), torch.randn(7, 16), torch.randn(7, 5)
    assert torch.equal(module(x), nn.functional.linear(x, q.dequantize(), linear.bias))
    module(x).backward(grad)
    a = torch.ones_like(module.a, dtype=torch.float64, requires_grad=True)
    codes = q.codes.double().reshape(5, a.shape[1], -1) - (0 if q.zero is None else q.zero.double().unsqueeze(-1))
    value = (codes * (q.scale.double() * a).unsqueeze(-1)).reshape(5, 16)
    nn.functional.linear(x.double(), value, linear.bias.double()).backward(grad.double())
    # `a` reaches the loss through the scale, so its gradient is the step's times the starting scale
    torch.testing.assert_close(module.a.grad.double(), a.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        module.a.mul_(1 + 0.1 * torch.rand_like(module.a))
    assert torch.equal(module(x), nn.functional.linear(x, module.qtensor().dequantize(), linear.bias))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_distilled_loss_against_autograd(share, softcap):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 8, generator=g, requires_grad=True)
    head, teacher = torch.randn(31, 8, generator=g), torch.randn(300, 8, generator=g)
    targets = torch.randint(0, 31, (300,), generator=g)
    loss = DistilledLoss.apply(hidden, head, teacher, targets, share, softcap)
    (loss * 3).backward()
    wide = hidden.detach().double().requires_grad_()
    logits, wanted = wide @ head.double().T, teacher.double() @ head.double().T
    if softcap is not None:
        logits, wanted = (softcap * (x / softcap).tanh() for x in (logits, wanted))
    kl = nn.functional.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    reference = share * kl + (1 - share) * nn.functional.cross_entropy(logits, targets)
    (reference * 3).backward()
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-7)


def quantized(model, work=None, **settings):
    return quantize_loaded(
        model, model.config.to_dict(), "efficient_qat", "w2g16", rows(16), Options(settings={**SETTINGS, **settings}, work=work)
    )


def test_the_second_phase_brings_the_distribution_nearer():
    model = tiny(tie_word_embeddings=True)
    result = quantized(model)
    assert result.facts["e2e_loss"] < 0.95 * result.facts["e2e_loss_before"]
    # the model in memory computes with what was returned, the norms that trained included
    own = model.state_dict()
    for name, value in result.weights.items():
        assert torch.equal(own[name], value.dequantize() if isinstance(value, QTensor) else value), name
    assert {r.method for r in result.report if r.spec != "none"} == {"efficient_qat"}


def test_without_norms_only_scales_differ_from_the_first_phase():
    first = quantize_loaded((m := tiny()), m.config.to_dict(), "block_ap", "w2g16", rows(16), Options(settings={"epochs": 1}))
    both = quantized(tiny(), norms=False)
    moved = 0
    for name, value in first.weights.items():
        other = both.weights[name]
        if isinstance(value, QTensor):
            assert torch.equal(value.codes, other.codes), name
            moved += int((value.scale != other.scale).sum())
        else:
            assert torch.equal(value, other), name
    assert moved > 0


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", ["a block", "all blocks", "some steps of the second phase"])
def test_a_killed_run_ends_bit_identically(tmp_path, monkeypatch, after):
    whole = quantized(tiny())
    from karui.qat import efficient_qat

    with monkeypatch.context() as patch:
        real, loss, calls = efficient_qat.quantize_block, efficient_qat.EndToEnd.loss, []

        def block(*args):
            calls.append(1)
            if after == "a block" and len(calls) == 2:
                raise Killed
            real(*args)

        def finish(*args):
            raise Killed

        def step(*args, **named):
            calls.append(1)
            if len(calls) == 20:  # 3 blocks, 8 rows that judge the start, 9 steps
                raise Killed
            return loss(*args, **named)

        patch.setattr(efficient_qat, "quantize_block", block)
        if after == "all blocks":
            patch.setattr(efficient_qat, "finish_model", finish)
        patch.setattr(efficient_qat.EndToEnd, "loss", step)
        with pytest.raises(Killed):
            quantized(tiny(), tmp_path)
    again = quantized(tiny(), tmp_path)
    assert same(whole, again)
    assert same(whole, quantized(tiny(), tmp_path))  # as after a kill between the last phase and the export


def same(a, b):
    pairs = ((v, b.weights[n]) for n, v in a.weights.items())
    return all(torch.equal(*(x.dequantize() if isinstance(x, QTensor) else x for x in pair)) for pair in pairs)
