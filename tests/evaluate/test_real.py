"""End to end, slow: the real model's perplexity by the protocol is the known figure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from karui.inference.engine import Engine
from karui.inference.evaluate.scoring import engine_scorer, perplexity

DATA = Path(os.environ.get("KARUI_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


@pytest.mark.slow
def test_smollm2_on_wikitext2() -> None:
    from karui.catalogue import resolve
    from karui.configs.errors import KaruiError

    text = DATA / "wikitext2_test.txt"
    if not text.is_file():
        pytest.skip("wikitext2_test.txt is not here; set KARUI_DATA to its folder")
    try:
        folder = Path(resolve("smollm2-135m"))
    except (KaruiError, OSError) as error:
        pytest.skip(f"smollm2-135m is not on this machine: {error}")
    engine = Engine.load(folder, runner="torch", kv_dtype="float32", max_context=1024, max_sequences=1)
    got = perplexity(engine_scorer(engine), text, engine.tokenizer, windows=40)
    assert got.tokens == 40 * 1023
    assert got.perplexity == pytest.approx(21.38, abs=0.01)
