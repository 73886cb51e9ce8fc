"""Unit tests of the TransformerEngine side: refusals without the package, and conversion that is all or nothing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from karui.configs import KaruiError, UnsupportedError
from karui.lowprec import LayerPolicy, Precision, Switch
from karui.lowprec.transformer_engine import convert, te_recipe


class _Blocked:
    """An import hook for a package that is absent, or whose shared library does not load."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformer_engine":
            raise self.error
        return


@pytest.mark.parametrize(
    "error,message",
    [
        (ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine"), "is not installed"),
        (OSError("libcudart.so.13: cannot open shared object file"), "compiled part does not load here.*libcudart"),
        (
            RuntimeError("Found empty `transformer-engine` meta package installed."),
            "compiled part does not load here.*meta package",
        ),
    ],
)
def test_an_absent_or_broken_package_is_a_clear_error(monkeypatch, error, message):
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Blocked(error), *sys.meta_path])
    with pytest.raises(UnsupportedError, match=message):
        te_recipe(Precision(recipe="fp8-current"))
    model = nn.Sequential(nn.Linear(32, 32))
    before = model[0]
    with pytest.raises(UnsupportedError, match=message):
        convert(model, Precision(recipe="fp8-current"))
    assert model[0] is before


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"recipe": "fp8-rowwise"}, "no recipe for fp8-rowwise"),
        ({"recipe": "nvfp4", "schedule": (Switch(step=1),)}, "one format for all three GEMMs"),
        ({"recipe": "mxfp8", "wgrad": "high"}, "one format for all three GEMMs"),
        ({"recipe": "mxfp8", "compat": "ao"}, "cannot round as 'ao'"),
        ({"recipe": "nvfp4", "tensor_scale": False}, "always has the tensor's scale"),
    ],
)
def test_what_transformer_engine_cannot_do_is_refused(fields, message):
    with pytest.raises(UnsupportedError, match=message):
        te_recipe(Precision(**fields))


def test_arguments_of_the_recipes(monkeypatch):
    """Against a recorder with the keywords of TransformerEngine 2.x; `test_real_recipes` uses the package itself."""
    seen = ModuleType("transformer_engine.common.recipe")
    seen.Format = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
        setattr(seen, name, lambda _name=name, **kwargs: (_name, kwargs))
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", seen)
    name, kwargs = te_recipe(Precision(recipe="fp8-delayed", history=16, margin=2))
    assert name == "DelayedScaling" and kwargs["amax_history_len"] == 16 and kwargs["margin"] == 2
    name, kwargs = te_recipe(Precision(recipe="nvfp4", stochastic=False))
    assert kwargs == {"disable_rht": False, "disable_stochastic_rounding": True, "disable_2d_quantization": False}


REAL = {"fp8-delayed": "DelayedScaling", "fp8-current": "Float8CurrentScaling", "fp8-blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}  # fmt: skip


@pytest.mark.peer
def test_real_recipes():
    """The package's own classes; NVTE_PROJECT_BUILDING=1 lets it import where CUDA's libraries are absent."""
    recipe = pytest.importorskip("transformer_engine.common.recipe")
    for name, kind in REAL.items():
        assert type(te_recipe(Precision(recipe=name))) is getattr(recipe, kind)
    assert te_recipe(Precision(recipe="nvfp4", hadamard=False)).disable_rht
    assert te_recipe(Precision(recipe="fp8-delayed", history=16)).amax_history_len == 16


@pytest.mark.peer
def test_the_real_package_without_its_compiled_part():
    pytest.importorskip("transformer_engine.common.recipe")
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:
        model = nn.Sequential(nn.Linear(32, 32))
        before = model[0]
        with pytest.raises(UnsupportedError, match="its compiled part does not load here"):
            convert(model, Precision(recipe="fp8-current"))
        assert model[0] is before
    else:
        pytest.skip("its compiled part is here")


def test_conversion_names_every_odd_layer_and_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32), nn.Linear(32, 32))
    before = list(model)
    with pytest.raises(KaruiError, match=r"multiples of 16, which 2 layers are not: 0, 1\."):
        convert(model, Precision(recipe="fp8-current"), factory=lambda m: nn.Identity())
    assert all(a is b for a, b in zip(model, before))
    stays, built = convert(
        model, Precision(recipe="fp8-current", policy=LayerPolicy(skip=("0", "1"))), factory=lambda m: nn.Identity()
    )
    assert list(stays) == ["0", "1"] and isinstance(model[2], nn.Identity) and list(built) == ["2"]


def test_a_layer_that_cannot_be_built_leaves_the_others_alone():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    before = list(model)

    def factory(linear):
        if linear is before[1]:
            raise RuntimeError("no memory")
        return nn.Identity()

    with pytest.raises(RuntimeError, match="no memory"):
        convert(model, Precision(recipe="fp8-current"), factory=factory)
    assert all(a is b for a, b in zip(model, before))
