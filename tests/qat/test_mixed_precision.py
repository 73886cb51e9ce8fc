"""Reference and behavioural: the knapsack against every combination, ties, budgets, and sensitivity on a tiny model."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.qat.mixed_precision import Tie, budget_of, choose_plan, measure, stored_bits, tie_groups
from tests.qat.conftest import rows, tiny

SPECS = [QuantSpec.parse(s) for s in ("w2g16", "w3g16", "w4g16", "w8")]


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_is_the_best_of_all_combinations(seed):
    draw = random.Random(seed)
    ties = [Tie(name=f"t{i}", weights=(f"w{i}",), sizes=((draw.choice([8, 16, 24]), draw.choice([16, 32])),)) for i in range(5)]
    gains = {(t.name, str(s)): draw.uniform(-0.1, 1) for t in ties for s in SPECS}
    least, most = (sum(f(t.bits(s) for s in SPECS) for t in ties) for f in (min, max))
    budget = draw.randint(least, most)
    plan = choose_plan(ties, SPECS, gains, budget)
    best = min(
        sum(gains[t.name, str(s)] for t, s in zip(ties, pick))
        for pick in itertools.product(SPECS, repeat=5)
        if sum(t.bits(s) for t, s in zip(ties, pick)) <= budget
    )
    assert plan.increase == pytest.approx(best, abs=1e-12)
    assert plan.bits <= budget and plan.bits == sum(t.bits(plan.specs[t.weights[0]]) for t in ties)


def test_stored_bits_are_those_of_the_tensors():
    from karui.kernels.quantize import quantize

    for text in ("w2g16", "w4g16a", "w8", "w3t", "w4g32:fp32"):
        spec = QuantSpec.parse(text)
        q = quantize(torch.randn(6, 64), spec)
        parts = q.codes.numel() * spec.bits + q.scale.numel() * q.scale.element_size() * 8
        assert stored_bits((6, 64), spec) == parts + (0 if q.zero is None else q.zero.numel() * 8), text


def linears_of(model):
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}


def test_what_a_runtime_fuses_shares_a_grid():
    names = [t.name.partition("layers.0.")[2] for t in tie_groups(linears_of(tiny())) if "layers.0." in t.name]
    assert names == ["self_attn.q+k+v", "self_attn.o_proj", "mlp.gate+up", "mlp.down_proj"]
    experts = {f"model.layers.0.mlp.experts.{i}.{p}.weight": nn.Linear(8, 8) for i in range(3) for p in ("gate_proj", "down_proj")}
    assert [len(t.weights) for t in tie_groups(experts)] == [6]


def test_sensitive_layers_get_more_bits():
    model, ids = tiny(), rows(8)
    linears = linears_of(model)
    ties = tie_groups(linears)
    weights = {n: m.weight.clone() for n, m in linears.items()}
    with torch.no_grad():
        targets = model(ids).logits.softmax(-1)

    def loss(_):
        with torch.no_grad():
            return float(-(targets * model(ids).logits.log_softmax(-1)).sum(-1).mean())

    found = measure(model, ties, SPECS, loss)
    for name, m in linears.items():
        assert torch.equal(m.weight, weights[name])
    order = sorted(ties, key=lambda t: found[t.name, "w2g16"] / t.bits(SPECS[0]))  # by what a bit buys
    plan = choose_plan(ties, SPECS, found, budget_of("3.6", sum(m.weight.numel() for m in linears.values())))
    assert plan.specs[order[-1].weights[0]].bits > plan.specs[order[0].weights[0]].bits
    assert plan.bits_per_weight <= 3.6 and len({s.bits for s in plan.specs.values()}) > 1
    assert f"{plan.bits_per_weight:.3f} bits per weight" in plan.table() and plan.dump()["groups"][0]["spec"]


@pytest.mark.parametrize("text,bits", [("2.5", 250), ("3 bits", 300), ("1kB", 8000), ("0.5MB", 4_000_000)])
def test_budgets(text, bits):
    assert budget_of(text, 100) == bits


@pytest.mark.parametrize("text", ["", "many", "-3", "0", "4 XB", "1.2.3"])
def test_budgets_that_are_none(text):
    with pytest.raises(KaruiError, match="write bits per weight"):
        budget_of(text, 100)


def test_a_budget_below_the_smallest_grids_says_what_they_need():
    ties = [Tie(name="a", weights=("a",), sizes=((16, 32),))]
    with pytest.raises(KaruiError, match="below what the smallest grids take, 3.000"):
        choose_plan(ties, SPECS, {("a", str(s)): 0.0 for s in SPECS}, 16 * 32 * 2)
    with pytest.raises(KaruiError, match="no linears or no grids"):
        choose_plan([], SPECS, {}, 100)


def test_the_loss_without_the_blocks_before_is_the_loss():
    from karui.trainers.mixed import _Loss

    model, ids = tiny(), rows(4)
    loss = _Loss(model, ids)
    for tie in (None, *tie_groups(linears_of(model))):
        for n in tie.weights if tie is not None else ():
            model.get_submodule(n.removesuffix(".weight")).weight.data.mul_(1.3)
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        assert loss(tie) == pytest.approx(float(whole), rel=1e-5)
        for n in tie.weights if tie is not None else ():
            model.get_submodule(n.removesuffix(".weight")).weight.data.div_(1.3)


def test_a_loss_that_is_not_finite_names_the_group():
    model = tiny()
    ties, calls = tie_groups(linears_of(model))[:1], []

    def loss(_):
        calls.append(1)
        return 1.0 if len(calls) == 1 else float("nan")

    with pytest.raises(KaruiError, match="layers.0.self_attn.q\\+k\\+v on w2g16 gives a loss of nan"):
        measure(model, ties, SPECS[:1], loss)
