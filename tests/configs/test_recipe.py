"""Unit tests of recipes: reading, overriding, and errors that name file, key and remedy."""

import pytest
import yaml

from karui.configs import KaruiError, Recipe
from karui.configs.recipe import shipped_recipes

MINIMAL = {"model": "smollm2-135m", "data": {"train": "gsm8k-sample"}}


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def test_minimal_recipe_has_defaults(tmp_path):
    recipe = Recipe.load(write(tmp_path, MINIMAL))
    assert recipe.name == "mine" and recipe.model.name == "smollm2-135m" and recipe.optim.epochs == 1.0
    assert str(recipe.output) == "runs/mine"


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_survive_a_round_trip(name):
    recipe = Recipe.load(name)
    assert Recipe.build(recipe.dump()) == recipe


def test_qlora_defaults_to_a_double_quantized_nf4_base(tmp_path):
    recipe = Recipe.load(write(tmp_path, MINIMAL | {"prepare": [{"method": "qlora"}]}))
    assert str(recipe.prepare[0].base) == "nf4dq"


def test_overrides_reach_every_depth(tmp_path):
    path = write(tmp_path, MINIMAL | {"prepare": [{"method": "qlora"}]})
    recipe = Recipe.load(
        path, ["optim.lr=1e-4", "prepare.0.rank=8", "model.dtype=float16", "eval.questions=[a, b]", "track.to=none"]
    )
    assert (recipe.optim.lr, recipe.prepare[0].rank, recipe.model.dtype) == (1e-4, 8, "float16")
    assert recipe.eval.questions == ("a", "b") and recipe.track.to == "none"


@pytest.mark.parametrize("override, message", [
    ("optim.lrr=1", r"mine.yaml: unknown key 'optim.lrr'; valid here: name, lr, .* Did you mean 'lr'"),
    ("prepare.0.rnak=3", "unknown key 'prepare.0.rnak'.*Did you mean 'rank'"),
    ("optin.lr=1", "unknown key 'optin'.*Did you mean 'optim'"),
    ("optim.lr=-1", "optim.lr: .*greater than 0.*given: -1"),
    ("optim.lr=.inf", "optim.lr: .*finite number"),
    ("optim.eps=-1", "optim.eps: .*greater than or equal to 0"),
    ("optim.betas=[5, 0.9]", "optim.betas.0: .*less than 1"),
    ("optim.steps=true", "optim.steps: true or false is no value of this key"),
    ("run.threads=1000000000", "run.threads: .*less than or equal to 4096"),
    ("data.train=''", "data.train: an empty text"),
    ("run.output=''", "run.output: an empty text"),
    ("run.output=runs/{nam}", r"run.output: braces hold \{name\} and nothing else"),
    ("export=[{output: '{rn}'}]", r"export.0.output: braces hold \{run\} or \{spec\}"),
    ("export=[{}, {method: gptq}]", "two bundles would go to runs/mine/bundle-w4g32"),
    ("prepare=[{method: lora, targets: []}]", "prepare.0.targets: .*at least 1 item"),
    ("prepare=[{method: qat_lora, rank: 1000000}]", "prepare.0.rank: .*less than or equal to 65536"),
    ("prepare=[{method: lsq, activation_bits: 4}]", "activation_bits and range_lr are of lsq_plus and pact"),
    ("objective={kind: distil, k: 20}", "k belongs to rows: topk or sampled"),
    ("data.repeat=2", "weight and repeat are of a mix"),
    ("data={train: x, shuffle: false, shuffle_window: 9}", "shuffle_window shuffles, and shuffle is false"),
    ("model.revision=main", "a revision cannot be chosen here"),
    ("prepare.0.targets=3", r"^[^\n]*prepare.0.targets: Input should be a valid string, or a list \(given: 3\)\.$"),
    ("objective={kind: distil, label: -1}", r"^[^\n]*objective.label: .*equal to 0, or a list \(given: -1\)\.$"),
    ("prepare.0.base=w4q3", "prepare.0.base: .*w4q3"),
    ("prepare.0.base=5", "prepare.0.base: a grid is a spelling, such as w4g32, or a mapping with the keys format, bits"),
    ("prepare.0.base={bit: 4}", "unknown key 'prepare.0.base.bit'; valid here: format, bits, .*Did you mean 'bits'"),
    ("prepare.0.base={bits: 9, group_size: 8}", "prepare.0.base: int grids have 2 to 8 bits, got 9 "),
    ("prepare.0.base={format: int4}", "prepare.0.base.format: Input should be 'int'"),
    ("prepare.0.base=none", "qlora needs a quantized base"),
    ("prepare.3.rank=1", "'3' is not an index"),
    ("optim", "expected key=value"),
    ("optim.lr=[1", "malformed YAML"),
    ("track.to=wandbb", "track.to: .*'wandb', 'tensorboard', 'trackio' or 'none'")])  # fmt: skip
def test_bad_values_are_explained(tmp_path, override, message):
    path = write(tmp_path, MINIMAL | {"prepare": [{"method": "qlora"}]})
    with pytest.raises(KaruiError, match=message):
        Recipe.load(path, [override])


@pytest.mark.parametrize("text, message", [
    ("model: [unclosed", r"mine.yaml:1:\d+: malformed YAML"), ("", "holds nothing"), ("- a\n- b\n", "holds list"),
    ("model: smollm2-135m\n", "key 'data' is required and missing"), ("model: m\ndata: {}\n", "key 'data.train' is required")])  # fmt: skip
def test_malformed_files(tmp_path, text, message):
    with pytest.raises(KaruiError, match=message):
        Recipe.load(write(tmp_path, text))


def test_not_text(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KaruiError, match="not a text file"):
        Recipe.load(tmp_path / "mine.yaml")


def test_missing_recipe_lists_the_shipped_ones():
    with pytest.raises(KaruiError, match="no shipped recipe of that name; shipped: .*qlora.* Did you mean 'qlora'"):
        Recipe.load("qlorra")


def test_frozen(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        Recipe.load(write(tmp_path, MINIMAL)).optim.lr = 1.0


def test_recipes_stored_with_the_key_that_was_dropped_still_load():
    assert Recipe.build(MINIMAL | {"model": {"name": "m", "revision": None}}).model.name == "m"
