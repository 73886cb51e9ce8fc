"""A shipped recipe as it is, with a tiny model and tiny data put in place of its own."""

import pytest

from karui.configs.recipe import Recipe
from karui.trainers.pipeline import run_pipeline
from tests.trainers.conftest import _fresh_accelerate_state, rows_file, tiny_folder  # noqa: F401


@pytest.fixture
def run_shipped(tiny_folder, rows_file, tmp_path, own_cache):  # noqa: F811
    """run_shipped(NAME, "key=value", ...) -> (recipe, result)."""
    def run(name, *overrides):
        recipe = Recipe.load(name, [
            f"model.name={tiny_folder}", f"data.train={rows_file}", "data.eval=null", "data.holdout=4", "data.prompt=prompt",
            "data.completion=completion", "data.max_length=128", "optim.epochs=null", "optim.steps=4", "optim.batch=4",
            "optim.micro_tokens=256", f"run.output={tmp_path / 'run'}", "run.threads=1", "track.to=none", "eval.questions=[]",
            "eval.speed=false", *overrides])
        return recipe, run_pipeline(recipe)

    return run
