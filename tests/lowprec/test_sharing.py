"""Behavioural tests: layers that read one tensor quantize it once and keep it once, with the bits of doing so for each."""

import gc

import pytest
import torch
from torch import nn

from karui.lowprec import LayerPolicy, LowPrecision, Precision, sharing
from karui.lowprec import linear as low_linear
from karui.lowprec.precision import RECIPES
from karui.lowprec.sharing import LastInput


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        x = torch.tanh(x)
        return self.o_proj(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))


def prepared(recipe):
    torch.manual_seed(0)
    low = LowPrecision(Precision(recipe=recipe, policy=LayerPolicy(first_blocks=0, last_blocks=0)))
    return low, low.prepare(Attention())


def trained(recipe, *, autocast=False):
    low, model = prepared(recipe)
    out = []
    for step in range(3):
        model.zero_grad()
        x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(step), requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().pow(2).sum().backward()
        out += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        low.finish_step()
    return out


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_every_layer_on_its_own(recipe, autocast, monkeypatch):
    shared = trained(recipe, autocast=autocast)
    monkeypatch.setattr(LastInput, "of", lambda self, x: {})
    assert all(torch.equal(a, b) for a, b in zip(shared, trained(recipe, autocast=autocast)))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_one_input_is_quantized_once_for_q_k_and_v(recipe, monkeypatch):
    """Four layers, two operands a GEMM; q, k and v's input counts once forward and once backward, where fp8 has its codes still."""
    count = []
    real = low_linear._operand
    monkeypatch.setattr(low_linear, "_operand", lambda *args, **how: count.append(args[3]) or real(*args, **how))
    _, model = prepared(recipe)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert count.count("fprop") == 8 - 2 and count.count("dgrad") == 8
    assert count.count("wgrad") == (4 if recipe == "fp8-current" else 8 - 2)


def test_the_codes_are_kept_once_for_the_backward_pass():
    _, model = prepared("fp8-current")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(16, 32, requires_grad=True))
    codes = [t for t in kept if t.dtype == torch.float8_e4m3fn]
    assert len(codes) == 4 and len({t.data_ptr() for t in codes}) == 2  # q, k and v's, and o's


def test_a_changed_or_another_tensor_is_quantized_anew():
    _, model = prepared("mxfp8")
    x = torch.randn(16, 32)
    with torch.no_grad():
        before = model.q_proj(x)
        x.mul_(3.7)
        after = model.q_proj(x)
        assert not torch.equal(before, after) and torch.equal(after, model.q_proj(x.clone()))


def test_nothing_is_kept_beyond_the_tensor_or_the_step():
    low, model = prepared("fp8-current")
    x = torch.randn(16, 32)
    with torch.no_grad():
        model.q_proj(x)
    assert low.state.inputs._made
    del x
    gc.collect()
    assert not low.state.inputs._made
    low, model = prepared("nvfp4")
    model(torch.randn(16, 32)).sum().backward()
    assert low.state.saved_inputs._held is not None
    low.finish_step()
    assert low.state.saved_inputs._held is None and not low.state.saved_inputs._made


def test_delayed_scales_that_differ_are_not_shared():
    low, model = prepared("fp8-delayed")
    x = torch.randn(16, 32)
    model(x)
    low.finish_step()
    alone = [model.q_proj(x.clone()), model.k_proj(x.clone())]
    with torch.no_grad():
        low.state.scale[low.state.names.index("k_proj"), 0] /= 8
    scaled = model.k_proj(x.clone())
    assert torch.equal(model.q_proj(x), alone[0]) and torch.equal(model.k_proj(x), scaled) and not torch.equal(scaled, alone[1])


def test_inference_mode_shares_nothing_and_works():
    _, model = prepared("nvfp4")
    x = torch.randn(16, 32)
    with torch.inference_mode():
        y = model(x)
    assert torch.equal(y, model(x))


def test_the_report_says_who_shares():
    low, _ = prepared("fp8-current")
    assert {r.name: r.input for r in low.report} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "q_proj, k_proj, v_proj"),
        "o_proj": "own",
    }
    assert "q_proj, k_proj, v_proj" in low.table()
    assert sharing.readers("a.up_proj", {"a.up_proj", "b.gate_proj"}) == ["a.up_proj"]
