"""Unit tests of the recipes, their schedule and the layer policy."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from karui.configs import KaruiError
from karui.configs.steps import LowPrecisionStep
from karui.lowprec import LayerPolicy, LowPrecision, Precision, Switch
from karui.lowprec.policy import decide
from karui.lowprec.precision import GEMMS, HIGH, RECIPES
from tests.lowprec.conftest import Tiny

TABLE = {
    "fp8-delayed": {"fprop": "e4m3 tensor|e4m3 tensor", "dgrad": "e5m2 tensor|e4m3 tensor", "wgrad": "e5m2 tensor|e4m3 tensor"},
    "fp8-current": {"fprop": "e4m3 tensor|e4m3 tensor", "dgrad": "e5m2 tensor|e4m3 tensor", "wgrad": "e5m2 tensor|e4m3 tensor"},
    "fp8-rowwise": {g: "e4m3 row|e4m3 row" for g in GEMMS},
    "fp8-blockwise": {"fprop": "e4m3 1x128|e4m3 128x128", "dgrad": "e4m3 1x128|e4m3 128x128", "wgrad": "e4m3 1x128|e4m3 1x128"},
    "mxfp8": {g: "mxfp8 1x32|mxfp8 1x32" for g in GEMMS},
    "mxfp4": {"fprop": "mxfp4 1x32|mxfp4 1x32", "dgrad": "mxfp4 1x32 sr|mxfp4 1x32", "wgrad": "mxfp4 1x32 h sr|mxfp4 1x32 h"},
    "nvfp4": {"fprop": "nvfp4 1x16|nvfp4 16x16", "dgrad": "nvfp4 1x16 sr|nvfp4 16x16", "wgrad": "nvfp4 1x16 h sr|nvfp4 1x16 h"},
}


def spell(operand):
    return f"{operand.format} {operand.tile}" + " h" * operand.hadamard + " sr" * operand.stochastic


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_published_table(recipe):
    precision = Precision.parse(recipe)
    for gemm in GEMMS:
        a, b = precision.operands(gemm, recipe)
        assert f"{spell(a)}|{spell(b)}" == TABLE[recipe][gemm]
        assert a.delayed == b.delayed == (recipe == "fp8-delayed")
        assert a.hadamard == b.hadamard  # else the transform would not cancel


def test_ingredients_can_be_switched_off():
    bare = Precision(recipe="nvfp4", hadamard=False, stochastic=False, square_weights=False)
    assert {spell(o) for g in GEMMS for o in bare.operands(g, "nvfp4")} == {"nvfp4 1x16"}


def test_gradients_need_the_tensor_scale():
    """Without it the scale of a block of gradients falls below E4M3's smallest number, and the block is zero."""
    gradients = []
    for tensor_scale in (True, False):
        torch.manual_seed(0)
        precision = Precision(recipe="nvfp4", tensor_scale=tensor_scale, stochastic=False)
        model = LowPrecision(precision).prepare(nn.Sequential(nn.Linear(32, 32)))
        x = torch.randn(16, 32, requires_grad=True)
        y = model(x)
        y.backward(torch.full_like(y, 1e-4))
        gradients.append(x.grad)
        assert torch.isfinite(y).all() and y.any()
    assert gradients[0].any() and not gradients[1].any()


def test_gemms_apart_and_on_a_schedule():
    precision = Precision(
        recipe="nvfp4", wgrad="mxfp8", schedule=(Switch(step=10, to="high"), Switch(step=20, gemm="all", to="fp8-current"))
    )
    assert precision.at(9) == {"fprop": "nvfp4", "dgrad": "nvfp4", "wgrad": "mxfp8"}
    assert precision.at(10) == {"fprop": "high", "dgrad": "nvfp4", "wgrad": "mxfp8"}
    assert set(precision.at(20).values()) == {"fp8-current"}
    assert precision.operands("fprop", "high") == (HIGH, HIGH)


def test_libraries():
    assert Precision(recipe="fp8-rowwise").library("fp8-rowwise") == "ao" and Precision(recipe="mxfp8").library("mxfp8") == "te"
    assert Precision(recipe="fp8-blockwise", compat="deepgemm").library("fp8-blockwise") == "deepgemm"


@pytest.mark.parametrize(
    "value,message",
    [
        ("nvfp", "recipe 'nvfp' is not known; recipes: fp8-delayed.*Did you mean 'nvfp4'"),
        ({"recipe": "nvfp4", "compat": "deepgemm"}, "deepgemm' knows no NVFP4"),
        ({"recipe": "nvfp4", "sr": True}, "unknown key 'sr'; valid keys: recipe, fprop"),
        ({"recipe": "nvfp4", "policy": {"skp": ["a"]}}, "unknown key 'policy.skp'; valid here: first_blocks, .*Did you mean 'skip'"),
        ({"fprop": "high"}, "recipe None is not known"),
        (3, "recipe 3 is not known"),
        ({"recipe": "nvfp4", "fprop": "bf16"}, "fprop: Input should be 'fp8-delayed'"),
        ({"recipe": "fp8-delayed", "history": 0}, "history: .*greater than or equal to 1"),
    ],
)
def test_bad_recipes_say_what_is_wrong(value, message):
    with pytest.raises(KaruiError, match=message):
        Precision.parse(value)


@pytest.mark.parametrize("fields, message", [
    ({"history": 0}, "history: .*greater than or equal to 1"), ({"dgrad": "fp4"}, "dgrad: Input should be 'fp8-delayed'"),
    ({"policy": LayerPolicy(first_blocks=-1)}, "policy.first_blocks: .*greater than or equal to 0"),
    ({"schedule": (Switch(step=1, to="fp4"),)}, "schedule.0.to: Input should be"), ({"compat": "deepgemm"}, "knows no NVFP4")])  # fmt: skip
def test_values_are_checked_as_a_recipe_checks_them(fields, message):
    with pytest.raises(KaruiError, match=message):
        Precision(recipe="nvfp4", **fields)


@pytest.mark.parametrize("more", [{}, {"margin": 3, "schedule": [{"step": 2}], "policy": {"skip": ["down_proj"], "min_features": 8}}])
def test_a_recipe_s_step_and_its_fields_say_the_same(more):
    assert [f.name for f in fields(Precision)] == ["recipe", *(key for key in LowPrecisionStep.model_fields if key != "method")]
    for name in RECIPES:  # with the defaults of both
        assert Precision.of(LowPrecisionStep(method=name, **more)) == Precision.parse({"recipe": name} | more)
    assert Precision(recipe="nvfp4", policy={"skip": ["a"]}, schedule=[Switch(step=3)]) == Precision(
        recipe="nvfp4", policy=LayerPolicy(skip=("a",)), schedule=(Switch(step=3),))  # fmt: skip


def test_policy_keeps_head_tied_weights_and_routers_and_says_why():
    reasons = decide(Tiny(), Precision.parse("fp8-current"))
    assert reasons["out"] == "shares its weight with the embedding" and reasons["layers.0.gate"] == "router"
    assert [n for n, r in reasons.items() if not r] == [f"layers.{i}.{n}" for i in range(3) for n in ("up", "down")]


@pytest.mark.parametrize("blocks,first,last", [(2, 0, 0), (3, 1, 1), (4, 1, 1), (12, 1, 2), (30, 2, 5), (62, 2, 8), (96, 2, 8)])
def test_four_bits_spare_the_ends_scaled_to_the_model(blocks, first, last):
    reasons = decide(Tiny(width=4, blocks=blocks), Precision.parse("nvfp4"))
    low = [i for i in range(blocks) if not reasons[f"layers.{i}.up"]]
    assert low == list(range(first, blocks - last))


def test_policy_overrides():
    def low(**policy):
        reasons = decide(Tiny(blocks=4), Precision(recipe="nvfp4", policy=LayerPolicy(**policy)))
        return [n for n, r in reasons.items() if not r]

    assert len(low(first_blocks=0, last_blocks=0)) == 8
    assert low(first_blocks=0, last_blocks=3) == ["layers.0.up", "layers.0.down"]
    assert low(skip=("up",)) == ["layers.1.down", "layers.2.down"] and low(only=("layers.1.up",)) == ["layers.1.up"]
    with pytest.raises(KaruiError, match="names 'upp'.*Did you mean 'up'"):
        low(skip=("upp",))
    with pytest.raises(KaruiError, match="no linear layer of Tiny would train in nvfp4: .*narrower than 1000"):
        low(min_features=1000)


def test_padding_off_names_the_layer():
    model = nn.Sequential(nn.Linear(40, 64))
    with pytest.raises(KaruiError, match=r"0: mxfp8 needs multiples of 32, and padding is off \(in 40 -> 64\)"):
        LowPrecision(Precision(recipe="mxfp8", pad=False)).prepare(model)
    LowPrecision(Precision(recipe="mxfp8", pad=False)).prepare(nn.Sequential(nn.Linear(32, 64)))


def test_report_covers_every_linear(tiny):
    low = LowPrecision("mxfp8")
    model = tiny(width=40)
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    low.prepare(model)
    by_name = {row.name: row for row in low.report}
    assert set(by_name) == {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert by_name["layers.0.up"].frozen and not by_name["layers.1.up"].frozen
    assert by_name["layers.1.up"].padding == "in 40 -> 64, out 80 -> 96" and by_name["layers.1.up"].formats == "mxfp8"
    assert by_name["layers.1.gate"].formats == "high" and by_name["layers.1.gate"].reason == "router"
    assert "in 40 -> 64" in low.table() and "router" in low.table()


def test_preparing_twice_or_converting_nothing_is_an_error(tiny):
    low = LowPrecision("mxfp8")
    model = low.prepare(tiny())
    with pytest.raises(KaruiError, match="in low precision already"):
        LowPrecision("mxfp8").prepare(model)
    low.convert(model)
    with pytest.raises(KaruiError, match="no low-precision layer"):
        low.convert(model)
    with pytest.raises(KaruiError, match="no model is prepared"):
        low.finish_step()


def test_a_subclass_of_linear_is_not_replaced_silently():
    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(32, 32), Own(32, 32))
    with pytest.raises(KaruiError, match="1 is a Own, not a plain linear"):
        LowPrecision("mxfp8").prepare(model)
    assert type(model[0]) is nn.Linear  # nothing was replaced


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_replaced(value, frozen):
    """Its codes would saturate, and a frozen one would never be looked at again."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(not frozen)
    with torch.no_grad():
        model[1].weight[3, 4] = value
    with pytest.raises(KaruiError, match="1.weight holds NaN or infinite values"):
        LowPrecision("fp8-current").prepare(model)
    assert all(type(m) is nn.Linear for m in model)


def test_prepare_and_convert_keep_the_same_parameters(tiny):
    model = tiny()
    before = {n: id(p) for n, p in model.named_parameters()}
    low = LowPrecision("fp8-current")
    low.prepare(model)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    tensors = low.convert(model)
    assert {n: id(p) for n, p in model.named_parameters()} == before and len(tensors) == 6
    assert type(model.layers[0].up) is nn.Linear and not hasattr(model, "lowprec_state")
    assert torch.equal(tensors["layers.0.up.weight"], model.layers[0].up.weight)
