"""Unit: the short spelling parses, prints back and refuses nonsense; the controller switches off and looks again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.inference.speculative.adaptive import Controller, expected_tokens, speedup
from karui.inference.speculative.config import SpeculationConfig


@pytest.mark.parametrize(("text", "printed"), [
    ("none", "none"), ("ngram", "ngram:5"), ("ngram:8", "ngram:8"), ("draft:some/path", "draft:some/path:4"),
    ("draft:C:x:3", "draft:C:x:3"), ("lookahead", "lookahead:5,7,7"), ("lookahead:4,3,2", "lookahead:4,3,2"),
    ("medusa", "medusa:24"), ("eagle3:6", "eagle3:6"), ("eagle3:6,any-target", "eagle3:6,any-target")])
def test_spellings_round_trip(text: str, printed: str) -> None:
    config = SpeculationConfig.parse(text)
    assert str(config) == printed and SpeculationConfig.parse(printed) == config


@pytest.mark.parametrize(("text", "message"), [
    ("ngarm:5", "Did you mean 'ngram'"), ("ngram:0", "1 to 63"), ("ngram:x", "cannot read 'x'"), ("ngram:64", "1 to 63"),
    ("draft", "needs a model"),
    ("draft:", "needs a model"), ("lookahead:5", "N,W,G"), ("none:3", "cannot read"), ("", "unknown method"),
    ("ngram:5,any-target", "cannot read"), ("eagle3:x,any-target", "cannot read")])
def test_nonsense_is_refused(text: str, message: str) -> None:
    with pytest.raises(KaruiError, match=message):
        SpeculationConfig.parse(text)


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


def test_controller_stays_on_when_it_pays() -> None:
    controller = Controller()
    assert not controller.should_draft()        # no plain step timed yet
    controller.record_plain(1.0)
    for _ in range(100):
        assert controller.should_draft()
        controller.record_verified(4, 4, 1.5)
    assert controller.cost == pytest.approx(0.125) and controller.acceptance == 1.0
    assert controller.speedup == pytest.approx(5 / 1.5)


def test_controller_switches_off_and_probes_ever_more_rarely() -> None:
    controller = Controller(warmup=4, probe_every=10)
    controller.record_plain(1.0)
    drafted = []
    for step in range(2_000):
        if controller.should_draft():
            drafted.append(step)
            controller.record_verified(4, 0, 1.05)
        else:
            controller.record_plain(1.0)
    assert drafted[:4] == [0, 1, 2, 3]
    probes = drafted[::4]
    gaps = [b - a for a, b in zip(probes, probes[1:])]
    assert gaps == sorted(gaps) and gaps[-1] > 5 * gaps[0] and len(drafted) < 80


def test_what_trying_again_loses_stays_a_small_share() -> None:
    """A step over many rows costs nine plain ones: two tries are enough, and what they lost is made up for before the next."""
    controller, lost, steps = Controller(), 0.0, 0
    controller.record_plain(1.0)
    for _ in range(20_000):
        steps += 1
        if controller.should_draft():
            controller.record_verified(9, 0, 9.0)
            lost += 8.0
        else:
            assert controller.on or controller.resting > 0 or controller.waited == controller.patience
            controller.record_plain(1.0)
        assert lost <= 16 + 0.02 * steps + 16       # what was tried first, and is being tried now
    assert 300 < lost < 0.025 * steps


def test_one_disturbed_step_does_not_put_it_off_for_long() -> None:
    controller = Controller()
    controller.record_plain(1.0)
    for step in range(40):
        controller.record_verified(3, 1, 60.0 if step % 4 == 1 else 1.3)
    assert controller.lost < 0 and controller.on and controller.spec_s == 1.3
    controller.record_plain(30.0)
    assert controller.plain_s == 1.0


def test_controller_comes_back_when_the_text_becomes_predictable() -> None:
    controller = Controller(warmup=4, probe_every=10)
    controller.record_plain(1.0)
    kinds = []
    for step in range(1_000):
        if controller.should_draft():
            controller.record_verified(4, 4 if step > 300 else 0, 1.6)
            kinds.append(True)
        else:
            controller.record_plain(1.0)
            kinds.append(False)
    assert sum(kinds[50:300]) < 30 and all(kinds[-300:])
