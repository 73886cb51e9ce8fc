"""Unit: the short spelling parses, prints back and refuses nonsense; the controller switches off and looks again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.inference.speculative.adaptive import Controller, expected_tokens, speedup
from karui.inference.speculative.config import SpeculationConfig


@pytest.mark.parametrize(("text", "printed"), [
    ("none", "none"), ("ngram", "ngram"), ("ngram:8", "ngram:8"), ("draft:some/path", "draft:some/path"),
    ("draft:C:x:3", "draft:C:x:3"), ("lookahead", "lookahead:5,7,7"), ("lookahead:4,3,2", "lookahead:4,3,2"),
    ("medusa", "medusa"), ("eagle3:6", "eagle3:6"), ("medusa,any-target", "medusa,any-target"), ("eagle3:6,any-target", "eagle3:6,any-target")])
def test_spellings_round_trip(text: str, printed: str) -> None:
    config = SpeculationConfig.parse(text)
    assert str(config) == printed and SpeculationConfig.parse(printed) == config


@pytest.mark.parametrize(("text", "message"), [
    ("ngarm:5", "Did you mean 'ngram'"), ("ngram:0", "1 to 63"), ("ngram:x", "cannot read 'x'"), ("ngram:64", "1 to 63"),
    ("draft", "needs a model"),
    ("draft:", "needs a model"), ("lookahead:5", "N,W,G"), ("none:3", "cannot read"), ("", "unknown method"),
    ("ngram:5,any-target", "cannot read"), ("eagle3:x,any-target", "cannot read"), ("medusa,other", "cannot read")])
def test_nonsense_is_refused(text: str, message: str) -> None:
    with pytest.raises(KaruiError, match=message):
        SpeculationConfig.parse(text)


@pytest.mark.parametrize(("text", "native", "length"), [
    ("ngram", True, 5), ("draft:x", True, 4), ("medusa", True, 3), ("medusa", False, 24), ("medusa:9", True, 9), ("eagle3", False, 5)])
def test_lengths_where_none_is_given(text: str, native: bool, length: int) -> None:
    assert SpeculationConfig.parse(text).length(native) == length


def test_fields_that_do_not_belong_are_refused() -> None:
    with pytest.raises(KaruiError, match="typical"):
        SpeculationConfig(method="ngram", typical=True)
    with pytest.raises(KaruiError, match="any_target goes with medusa or eagle3"):
        SpeculationConfig(method="ngram", any_target=True)
    with pytest.raises(KaruiError, match="path"):
        SpeculationConfig(method="ngram", path="x")


@given(st.floats(0, 0.999), st.integers(1, 10), st.floats(0, 2))
def test_speedup_is_the_papers_quotient(a: float, k: int, c: float) -> None:
    assert expected_tokens(a, k) == pytest.approx(sum(a**i for i in range(k + 1)))
    assert speedup(a, k, c) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (1 + k * c)))


def timed(**options: float) -> Controller:
    """A controller that has seen its plain steps, a second each."""
    controller = Controller(**options)      # type: ignore[arg-type]
    for _ in range(controller.plain_first):
        assert not controller.should_draft()
        controller.record_plain(1.0)
    return controller


def test_controller_stays_on_when_it_pays() -> None:
    controller = timed()
    for _ in range(100):
        assert controller.should_draft()
        controller.record_verified(4, 4, 1.5)
    assert controller.cost == pytest.approx(0.125) and controller.acceptance == 1.0
    assert controller.speedup == pytest.approx(5 / 1.5)


def test_controller_switches_off_and_looks_again() -> None:
    controller = timed(budget=5.0)
    drafted = []
    for step in range(3_000):
        if controller.should_draft():
            drafted.append(step)
            controller.record_verified(4, 0, 3.0)
        else:
            assert controller.on or controller.resting >= 0
            controller.record_plain(1.0)
    assert drafted[:4] == [0, 1, 2, 303] and drafted[3:6] == [303, 304, 305]     # 6 plain steps lost, 2 % of 300


@pytest.mark.parametrize("seconds", [1.1, 3.0, 9.0])
def test_what_never_pays_costs_a_small_share(seconds: float) -> None:
    controller, lost, steps = timed(), 0.0, 0.0
    for _ in range(20_000):
        if controller.should_draft():
            controller.record_verified(9, 0, seconds)
            lost, steps = lost + seconds - 1, steps + seconds
        else:
            controller.record_plain(1.0)
            steps += 1
        assert lost <= 2 * (controller.budget + seconds) + 0.02 * steps     # what was tried first, and is being tried now
    assert 0 < lost < 0.03 * steps


def test_bad_luck_does_not_switch_off_what_pays() -> None:
    """Two of three drafts bring nothing, the third three tokens: 2 tokens for 1.4 plain steps on the average."""
    controller = timed()
    for step in range(3_000):
        assert controller.should_draft()
        controller.record_verified(3, 3 if step % 3 == 2 else 0, 1.4)


def test_disturbed_steps_count_as_undisturbed_ones() -> None:
    controller = timed()
    for step in range(40):
        controller.record_verified(3, 1, 60.0 if step % 4 == 0 else 1.3)
    assert controller.on and controller.spec_s == 1.3
    controller.record_plain(30.0)
    assert controller.plain_s == 1.0


def test_controller_comes_back_when_the_text_becomes_predictable() -> None:
    controller = timed(budget=1.0)
    kinds = []
    for step in range(1_000):
        if controller.should_draft():
            controller.record_verified(4, 4 if step > 300 else 0, 1.6)
            kinds.append(True)
        else:
            controller.record_plain(1.0)
            kinds.append(False)
    assert sum(kinds[:300]) < 20 and all(kinds[-600:])
