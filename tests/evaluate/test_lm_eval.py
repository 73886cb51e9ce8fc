"""Reference: the harness adapter's three request kinds against plain forward passes of transformers."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.evaluate import lm_eval as adapter
from karui.inference.evaluate.lm_eval import EngineRequests
from tests.evaluate.test_scoring import reference_model
from tests.evaluate.tiny import engine


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def logprobs(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    table = logits.log_softmax(-1)
    return table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])], table.argmax(-1).tolist()


def test_loglikelihood_and_greediness() -> None:
    lm, model = EngineRequests(engine()), reference_model()
    greedy = lm.generate_until([asked("The sky", {"max_gen_toks": 3})])[0]
    pairs = [("The sky", " is blue"), ("", "start"), ("ends in space ", "word"), ("The sky", greedy), ("x", "")]
    results = lm.loglikelihood([asked(*p) for p in pairs])
    for (context, continuation), (value, is_greedy) in zip(pairs, results, strict=True):
        head, tail = lm.encode_pair(context, continuation)
        assert lm.tokenizer.decode(head + tail).removeprefix("<s>") == context + continuation
        if not tail:
            assert (value, is_greedy) == (0.0, True)
            continue
        scores, best = logprobs(model, head + tail)
        assert value == pytest.approx(float(scores[-len(tail):].sum()), abs=1e-3)
        assert is_greedy == (best[len(head) - 1:-1] == tail)
    assert lm.encode_pair("ends in space ", "word")[1] == lm.encode(" word")


def test_rolling_predicts_every_token_once_across_windows() -> None:
    text = "All happy families are alike; each unhappy family is unhappy in its own way. " * 3
    lm, model = EngineRequests(engine(max_context=100)), reference_model()
    ids = lm.encode(text)
    windows = list(lm.windows(ids))
    assert [t for _, target in windows for t in target] == ids and all(len(c) + len(t) <= 100 for c, t in windows)
    assert len(windows[-1][0]) + len(windows[-1][1]) == 100     # the last window uses all the context it can
    expected = sum(float(logprobs(model, c + t)[0][-len(t):].sum()) for c, t in windows)
    assert lm.loglikelihood_rolling([asked(text)])[0] == pytest.approx(expected, abs=1e-2)


def test_generate_until_stops_and_refuses_unknown_options() -> None:
    lm = EngineRequests(engine())
    (whole,) = lm.generate_until([asked("abc", {"until": [], "max_gen_toks": 12})])
    stop = whole[4:6]
    (cut,) = lm.generate_until([asked("abc", {"until": [stop, ""], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0})])
    assert cut == whole[:whole.index(stop)]
    with pytest.raises(UnsupportedError, match="num_beams"):
        lm.generate_until([asked("abc", {"num_beams": 4})])
    with pytest.raises(KaruiError, match="no room"):
        lm.generate_until([asked("abc", {"max_gen_toks": 999})])


def test_a_missing_harness_is_told() -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm-eval is installed")
    with pytest.raises(UnsupportedError, match=r"karui\[eval\]"):
        _ = adapter.KaruiLM


@pytest.mark.peer
def test_the_class_is_one_of_the_harness() -> None:
    api = pytest.importorskip("lm_eval.api.model")
    lm = adapter.KaruiLM(engine())
    assert isinstance(lm, api.LM) and not getattr(type(lm), "__abstractmethods__", None)
    assert lm.loglikelihood([asked("a", "b")])[0][0] < 0
