"""Reference and behavioural: the knapsack against every combination, ties, budgets, and sensitivity on a tiny model."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.qat.mixed_precision import Tie, budget_of, choose_plan, measure, stored_bits, tie_groups
from karui.trainers.mixed import _Divergence, plan_for
from tests.qat.conftest import rows, tiny
from tests.qat.test_experts import moe

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
    found = measure(model, ties, SPECS, _Divergence(model, ids))
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


def test_the_divergence_without_the_blocks_before_is_the_divergence():
    model, ids = tiny(), rows(4)
    with torch.no_grad():
        wanted = model(ids).logits.double().log_softmax(-1)
    increase = _Divergence(model, ids)
    for tie in tie_groups(linears_of(model)):
        assert abs(increase(tie)) < 1e-7
        for n in tie.weights:
            model.get_submodule(n.removesuffix(".weight")).weight.data.mul_(1.3)
        with torch.no_grad():
            found = model(ids).logits.double().log_softmax(-1)
        assert increase(tie) == pytest.approx(float((wanted.exp() * (wanted - found)).sum(-1).mean()), rel=1e-4)
        for n in tie.weights:
            model.get_submodule(n.removesuffix(".weight")).weight.data.div_(1.3)


def test_an_increase_that_is_not_finite_names_the_group():
    model = tiny()
    with pytest.raises(KaruiError, match="layers.0.self_attn.q\\+k\\+v on w2g16 raises the loss by nan"):
        measure(model, tie_groups(linears_of(model))[:1], SPECS[:1], lambda _: float("nan"))


GRIDS = ["w2g16", "w3g16", "w4g16"]


def test_a_killed_measurement_goes_on_and_ends_alike(tmp_path):
    """Killed in the third group: what was kept is not measured again, and the plan is the whole run's."""
    tiny().save_pretrained(tmp_path / "model")
    whole = plan_for(tmp_path / "model", rows(4), GRIDS, "3.5")

    class Killed(Exception):
        pass

    def kill(done, _):
        if done == 8:
            raise Killed

    with pytest.raises(Killed):
        plan_for(tmp_path / "model", rows(4), GRIDS, "3.5", work=tmp_path / "work", progress=kill)
    kept = json.loads((tmp_path / "work" / "sensitivity.json").read_text())["increases"]
    assert len(kept) == 6
    kept[0][2] += 7.0  # seen again, so it was not measured again
    file = tmp_path / "work" / "sensitivity.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "increases": kept}))
    assert plan_for(tmp_path / "model", rows(4), GRIDS, "100", work=tmp_path / "work").increase == pytest.approx(
        plan_for(tmp_path / "model", rows(4), GRIDS, "100").increase, abs=1e-12
    )  # all at w4: the first group's w2 does not count
    assert json.loads(file.read_text())["increases"][0][2] == kept[0][2]
    kept[0][2] -= 7.0
    file.write_text(json.dumps({**json.loads(file.read_text()), "increases": kept}))
    assert plan_for(tmp_path / "model", rows(4), GRIDS, "3.5", work=tmp_path / "work") == whole
    with pytest.raises(KaruiError, match="measured on another model, rows or grids"):
        plan_for(tmp_path / "model", rows(5), GRIDS, "3.5", work=tmp_path / "work")
    file.write_text("{")
    with pytest.raises(KaruiError, match="not readable; delete it"):
        plan_for(tmp_path / "model", rows(4), GRIDS, "3.5", work=tmp_path / "work")


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_are_in_the_plan_and_share_a_grid(kind, tmp_path):
    moe(kind).save_pretrained(tmp_path)
    plan = plan_for(tmp_path, rows(4), ["w2g16", "w4g16"], "3.2")
    for i in range(2):
        experts = {n: str(s) for n, s in plan.specs.items() if f"layers.{i}.mlp.experts." in n}
        assert len(experts) == 6 * 3 and len(set(experts.values())) == 1
        assert f"model.layers.{i}.mlp.experts" in {r[0] for r in plan.rows}
    assert plan.bits_per_weight <= 3.2 and not any("gate.weight" in n for n in plan.specs)
    assert all(increase > -1e-6 for *_, increase in plan.rows)


def test_a_budget_in_bytes_is_kept_and_one_that_binds_nothing_is_told(tmp_path, caplog):
    tiny().save_pretrained(tmp_path)
    plan = plan_for(tmp_path, rows(4), GRIDS, "38kB")
    assert plan.budget_bits == 38_000 * 8 and 36_000 * 8 < plan.bits <= 38_000 * 8 and not caplog.records
    plan = plan_for(tmp_path, rows(4), GRIDS, "9")
    assert "budget 9: the widest of these grids take" in caplog.text and "nothing has to be narrowed" in caplog.text
    assert all(increase <= 0 or spec == GRIDS[-1] for _, spec, _, increase in plan.rows)
