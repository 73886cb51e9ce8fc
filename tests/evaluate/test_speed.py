"""Behavioural: what speed, bench and the report measure and print, on a tiny engine and on simulated clocks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.evaluate import bench as bench_module
from karui.inference.evaluate.bench import Level, Load, advice, bench, load_of, plot, run_bench, table, write_json
from karui.inference.evaluate.machine import Machine, decode_limit, measure_machine, prefill_limit
from karui.inference.evaluate.memory import disk_bytes, peak_memory
from karui.inference.evaluate.report import Report, protocols
from karui.inference.evaluate.report import table as report_table
from karui.inference.evaluate.scoring import HeldOutLoss, Perplexity
from karui.inference.evaluate.speed import Speed, percentile, run_timed, speed
from karui.inference.requests import Completion, Delta, Output, Request
from karui.inference.speculative.config import SpeculationConfig
from tests.evaluate.tiny import engine

MACHINE = Machine(threads=2, bandwidth_bytes_per_s=20e9, flops_per_s=180e9)
TOKENS = [(7 * i) % 250 + 2 for i in range(400)]


class Clock:
    """An engine whose every step takes a stated time on a clock of its own: prefill, then `per_step` tokens at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefill_s: float, step_s: float, per_step: int = 1) -> None:
        self.now, self.prefill_s, self.step_s, self.per_step = 0.0, prefill_s, step_s, per_step
        self.salts: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        self.salts += [r.cache_salt for r in requests]
        said: list[list[int]] = [[] for _ in requests]
        self.now += self.prefill_s
        while any(len(s) < (r.params.max_tokens or 0) for s, r in zip(said, requests)):
            for s, r in zip(said, requests):
                count = min(self.per_step, (r.params.max_tokens or 0) - len(s))
                if count and r.on_delta is not None:
                    s += [3] * count
                    r.on_delta(Delta("x", 0, "", [3] * count))
            self.now += self.step_s
        return [Output("x", [1], [Completion(0, s, finish_reason="length")]) for s in said]


def test_rates_are_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, prefill_s=0.5, step_s=0.02)
    got = speed(clock, TOKENS, contexts=(8, 100), new_tokens=11, repeats=2)
    assert got.prefill_per_s == pytest.approx(200)
    assert got.decode_per_s == pytest.approx({8: 50.0, 100: 50.0})
    assert len(set(clock.salts)) == len(clock.salts)        # no measurement finds the one before in the prefix cache


def test_several_tokens_in_one_delta_do_not_inflate_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step that emits three tokens: only those after it took the time that follows."""
    clock = Clock(monkeypatch, prefill_s=0.1, step_s=0.03, per_step=3)
    (timing,), _ = run_timed(clock, [TOKENS[:8]], 12)
    assert timing.tpot_s == pytest.approx(0.01)


def test_a_request_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(Clock):
        def generate(self, requests: Sequence[Request]) -> list[Output]:
            return [Output("x", [1], [Completion(0, [3], finish_reason="error", error="boom")]) for _ in requests]

    with pytest.raises(KaruiError, match="boom"):
        run_timed(Short(monkeypatch, 0, 0), [[1, 2]], 4)
    with pytest.raises(KaruiError, match="too few"):
        speed(Clock(monkeypatch, 0, 0), [1] * 10, contexts=(8, 512))


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0, math.nan], 0.5) == 2.0
    assert percentile(list(map(float, range(100))), 0.95) == 94.0 and math.isnan(percentile([], 0.5))


def test_limits_are_the_formulas() -> None:
    assert decode_limit(20e9, 1, 85_000_000, 8 * 11_520) == pytest.approx(20e9 / (85_000_000 + 8 * 11_520))
    assert decode_limit(20e9, 32, 85_000_000, 512 * 11_520) == pytest.approx(32 * 20e9 / (85_000_000 + 32 * 512 * 11_520))
    assert prefill_limit(184e9, 106_000_000) == pytest.approx(867.9, rel=1e-3)


def test_the_machine_is_measured() -> None:
    machine = measure_machine(threads=1, size_mib=32, repeats=2)
    assert 1e8 < machine.bandwidth_bytes_per_s < 1e13 and 1e8 < machine.flops_per_s < 1e14 and machine.threads == 1


def test_the_load_of_a_mixture_with_latent_attention() -> None:
    """Counted by hand: the experts a token takes, not those there are."""
    from karui.inference.engine import Engine
    from karui.inference.models.decoder import TorchRunner
    from tests.inference.test_latent import made

    _, config, weights = made("v3")
    load = load_of(Engine(TorchRunner(config, weights), memory="1MB"))
    attention = 24 * 48 + 6 * 20 * 24 + (32 + 8) * 48 + 6 * (12 + 16) * 32 + 48 * 6 * 16
    assert load.weights_per_token == 3 * (attention) + 3 * 48 * 80 + 2 * (8 * 48 + 3 * 3 * 48 * 16 + 3 * 48 * 32)
    assert load.kv_bytes_per_token == 3 * 40 * 4


def test_bench_on_an_engine_with_and_without_speculation(tmp_path: Path) -> None:
    plain = engine()
    result = bench({"none": plain, "ngram:4": engine("ngram:4")}, load_of(plain), TOKENS, concurrencies=(1, 3),
                   prompt_tokens=32, new_tokens=8, machine=MACHINE)
    assert [(x.speculation, x.concurrency) for x in result.levels] == [("none", 1), ("none", 3), ("ngram:4", 1), ("ngram:4", 3)]
    assert all(x.output_per_s > 0 and x.ttft_p95_ms >= x.ttft_p50_ms > 0 and x.share > 0 for x in result.levels)
    assert all(x.tokens_per_draft is None and x.acceptance is None for x in result.levels[:2])
    load = result.load
    assert load.weights_per_token == 3 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48)
    assert load.weight_bytes > 4 * load.weights_per_token
    assert result.levels[1].limit_per_s == pytest.approx(3 * 20e9 / (load.weight_bytes + 3 * 36 * load.kv_bytes_per_token))
    assert load.read_bytes(1) == load.read_bytes(3) == load.weight_bytes  # no experts
    write_json(result, tmp_path / "new" / "bench.json")
    assert json.loads((tmp_path / "new" / "bench.json").read_text())["levels"][3]["speculation"] == "ngram:4"
    console = Console(width=200, record=True, file=open("/dev/null", "w"))      # noqa: SIM115
    console.print(table(result))
    assert "ngram:4" in console.export_text()
    plot(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG") and not list(tmp_path.glob("*.tmp"))


def test_bench_refuses_a_text_without_words_before_it_loads_anything(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(KaruiError, match="empty.txt holds no text"):
        run_bench("nowhere", text=tmp_path / "empty.txt")


def test_bench_shows_what_drafts_brought() -> None:
    drafting = engine("ngram:4")
    drafting.speculation.config = SpeculationConfig(method="ngram", k=4, adaptive=False)
    result = bench({"none": engine(), "ngram:4": drafting}, load_of(drafting), [5, 6, 7, 8] * 30, concurrencies=(1,),
                   prompt_tokens=32, new_tokens=24, machine=MACHINE)
    seen, found = drafting.speculation.statistics, result.levels[1]
    assert seen.drafts > 0 and found.tokens_per_draft is not None and 1 <= found.tokens_per_draft <= 5
    assert found.acceptance is not None and 0 <= found.acceptance <= 1
    console = Console(width=200, record=True, file=open("/dev/null", "w"))      # noqa: SIM115
    console.print(table(result))
    assert f"{found.tokens_per_draft:.2f}" in console.export_text()


def test_without_matplotlib_the_plot_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench({"none": engine()}, Load(weight_bytes=1, kv_bytes_per_token=1, weights_per_token=1), TOKENS,
                   concurrencies=(1,), prompt_tokens=4, new_tokens=2, machine=MACHINE)
    with pytest.raises(UnsupportedError, match=r"karui\[plot\]"):
        plot(result, tmp_path / "x.png")


def level(speculation: str, concurrency: int, decode: float, limit: float, prompt: int = 128, **drafting: float) -> Level:
    return Level(speculation=speculation, concurrency=concurrency, prompt_tokens=prompt, new_tokens=64, ttft_p50_ms=1,
                 ttft_p95_ms=1, tpot_p50_ms=1, tpot_p95_ms=1, output_per_s=decode, decode_per_s=decode, limit_per_s=limit,
                 share=decode / limit, **drafting)


def test_advice_names_the_bottleneck() -> None:
    load = Load(weight_bytes=85_000_000, kv_bytes_per_token=11_520, weights_per_token=106_000_000)
    memory = " ".join(advice(MACHINE, load, [level("none", 1, 200, 235), level("none", 16, 700, 3_000)], 500, 850, 512))
    assert "One stream is memory-bound" in memory and "fewer bits" in memory and "compute-bound" in memory and "3.5x" in memory
    slow = " ".join(advice(MACHINE, load, [level("none", 1, 30, 235)], 100, 850, 512))
    assert "not memory" in slow and "below the compute limit" in slow and "memory-bound" not in slow
    long = " ".join(advice(MACHINE, load, [level("none", 1, 200, 235), level("none", 32, 280, 700, prompt=512)], 500, 850, 512))
    assert "KV-bound at 32 streams" in long and "int8 KV" in long
    both = " ".join(advice(MACHINE, load, [level("none", 1, 100, 235), level("ngram:5", 1, 190, 235), level("none", 4, 100, 235),
                                          level("ngram:5", 4, 80, 235)], 500, 850, 512))
    drafted = level("eagle3:3", 1, 140, 235, tokens_per_draft=2.25, acceptance=0.4167)
    told = " ".join(advice(MACHINE, load, [level("none", 1, 100, 235), drafted], 500, 850, 512))
    assert "1.40x, pays; 2.25 tokens a verification, 42% of drafted tokens accepted" in told
    assert "ngram:5 at 1 streams: 1.90x, pays; nothing was drafted" in both and "ngram:5 at 4 streams: 0.80x, does not pay" in both


@pytest.mark.parametrize("kwargs", [{"concurrencies": ()}, {"concurrencies": (0,)}, {"prompt_tokens": 0}, {"new_tokens": 1},
                                    {"prompt_tokens": 500}])
def test_bench_refuses_nonsense(kwargs: dict) -> None:
    with pytest.raises(KaruiError, match="bench"):
        bench_module.bench({"none": engine()}, Load(weight_bytes=1, kv_bytes_per_token=1, weights_per_token=1), TOKENS,
                           machine=MACHINE, **kwargs)


def test_peak_memory_sees_a_short_lived_array() -> None:
    import numpy as np

    with peak_memory() as before:
        pass
    with peak_memory() as peak:
        array = np.ones(40_000_000)     # 320 MB
        del array
    if not peak.since_start:
        pytest.skip("this system cannot reset the high-water mark")
    assert 250e6 < peak.host_bytes - before.host_bytes < 500e6
    with peak_memory() as after:
        pass
    assert after.host_bytes < peak.host_bytes - 200e6


def test_disk_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.json").write_bytes(b"y" * 11)
    assert disk_bytes(tmp_path) == 111 and disk_bytes(tmp_path, weights_only=True) == 100
    assert disk_bytes(tmp_path / "a.safetensors") == 100


def test_the_report_shows_what_was_measured() -> None:
    base = Report(name="base", disk_bytes=500_000_000, held_out=HeldOutLoss(loss=1.5, tokens=10, samples=2, left_out=1),
                  perplexity=Perplexity(perplexity=21.38, mean_nll=3.06, tokens=9, windows=1, protocol="as told"),
                  speed=Speed(prefill_tokens=512, prefill_per_s=300, decode_per_s={8: 20.0, 512: 15.0}, new_tokens=64))
    light = Report(name="light", disk_bytes=100_000_000)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))      # noqa: SIM115
    console.print(report_table([base, light]))
    text = console.export_text()
    assert all(word in text for word in ("21.38", "1.5000", "0.200", "prefill 512", "decode @512", "15.0/s"))
    assert "exact match" not in text and "peak" not in text
    assert protocols([base, light]) == ["perplexity: as told",
                                        "held-out loss: mean over 10 supervised tokens of 2 samples, 1 left out",
                                        "speed: one stream, greedy, 64 new tokens, best of the repeats"]
    assert json.loads(json.dumps(base.to_dict()))["speed"]["decode_per_s"] == {"8": 20.0, "512": 15.0}


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc")
def test_a_peak_is_the_process_s_own_not_that_of_who_launched_it():
    """getrusage hands a parent's peak down."""
    held = bytearray(400_000_000)
    held[::4096] = b"1" * len(held[::4096])
    code = "from karui.inference.evaluate.memory import high_water; print(high_water())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) < 300_000_000 < len(held)


def test_streams_read_the_experts_that_any_of_them_takes():
    load = Load(weight_bytes=1100, kv_bytes_per_token=1, weights_per_token=1, expert_bytes=800, chosen=0.25, table_bytes=100)
    assert [load.read_bytes(n) for n in (1, 2, 1000)] == pytest.approx([400, 200 + 800 * (1 - 0.75**2), 1000])


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_no_head_is_not_read(tied: bool) -> None:
    from karui.inference.engine import Engine
    from karui.inference.models.decoder import TorchRunner
    from tests.inference.conftest import tiny

    _, config, weights = tiny("llama", tie_word_embeddings=tied)
    runner = TorchRunner(config, weights)
    load = load_of(Engine(runner, max_context=64, max_sequences=1))
    assert load.read_bytes(1) == runner.weight_bytes() - (0 if tied else 4 * config.vocab_size * config.hidden_size)


def test_keys_behind_windows_are_not_counted() -> None:
    """Gemma 3's: of four layers three see 8 tokens; a sparse one reads `top` latents and every key of the indexer."""
    from karui.inference.engine import Engine
    from karui.inference.models import latent
    from karui.inference.models.decoder import TorchRunner
    from tests.inference.conftest import tiny
    from tests.inference.test_latent import made

    _, config, weights = tiny("gemma3_text", num_hidden_layers=4, sliding_window=8, sliding_window_pattern=4, query_pre_attn_scalar=13)
    load = load_of(Engine(TorchRunner(config, weights), max_context=64, max_sequences=1))
    per_layer = load.kv_bytes_per_token / 4
    assert load.kv_bytes(6) == 6 * load.kv_bytes_per_token
    assert load.kv_bytes(40) == pytest.approx(per_layer * (3 * 8 + 40))

    _, config, weights = made("v32")
    load = load_of(Engine(TorchRunner(config, weights), kv_dtype="float16", memory="1MB"))
    top = config.latent.indexer.top
    assert load.kv_bytes(3 * top) == pytest.approx(latent.bytes_read(config, "float16", 3 * top))
