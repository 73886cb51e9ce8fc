"""Counters and histograms in Prometheus' text format (exposition format 0.0.4), without a client library."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Cumulative buckets, sum and count."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        self.name, self.help, self.bounds = name, help_text, bounds
        self.counts, self.sum, self.count = [0] * len(bounds), 0.0, 0

    def observe(self, value: float) -> None:
        for i, bound in enumerate(self.bounds):
            self.counts[i] += value <= bound
        self.sum += value
        self.count += 1

    def lines(self) -> list[str]:
        buckets = [f'{self.name}_bucket{{le="{bound:g}"}} {n}' for bound, n in zip(self.bounds, self.counts, strict=True)]
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram", *buckets,
                f'{self.name}_bucket{{le="+Inf"}} {self.count}', f"{self.name}_sum {self.sum:.6f}",
                f"{self.name}_count {self.count}"]


class Metrics:
    """What the server itself counts; the engine's own counters are read when asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.ttft = Histogram("karui_time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.tpot = Histogram("karui_time_per_output_token_seconds", "Mean time per token after the first, by request.")
        self.total = Histogram("karui_request_seconds", "From a request's arrival to its end.")

    def finished(self, route: str, outcome: str, ttft_s: float | None = None, total_s: float | None = None,
                 tokens: int = 0) -> None:
        """outcome: stop, length, abort, error or the HTTP status of a refusal."""
        with self._lock:
            self.requests[route, outcome] += 1
            if ttft_s is not None:
                self.ttft.observe(ttft_s)
            if total_s is not None:
                self.total.observe(total_s)
                if ttft_s is not None and tokens > 1:
                    self.tpot.observe((total_s - ttft_s) / (tokens - 1))

    def text(self, engine: Any, healthy: bool) -> str:
        with self._lock:
            lines = ["# HELP karui_requests_total Requests by route and outcome.", "# TYPE karui_requests_total counter"]
            lines += [f'karui_requests_total{{route="{r}",outcome="{o}"}} {n}' for (r, o), n in sorted(self.requests.items())]
            for histogram in (self.ttft, self.tpot, self.total):
                lines += histogram.lines()
        for name, kind, help_text, value in engine_figures(engine, healthy):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"


_FIGURES = (
    ("karui_steps_total", "counter", "Engine steps.", "num_steps"),
    ("karui_failed_steps_total", "counter", "Engine steps that raised.", "num_failed_steps"),
    ("karui_running_sequences", "gauge", "Sequences running.", "num_running"),
    ("karui_waiting_sequences", "gauge", "Sequences waiting.", "num_waiting"),
    ("karui_prompt_tokens_total", "counter", "Prompt tokens taken in.", "num_prompt_tokens"),
    ("karui_cached_prompt_tokens_total", "counter", "Prompt tokens found in the prefix cache.", "num_cached_prompt_tokens"),
    ("karui_generated_tokens_total", "counter", "Tokens emitted.", "num_generated_tokens"),
    ("karui_preemptions_total", "counter", "Sequences preempted.", "num_preemptions"),
    ("karui_kv_blocks", "gauge", "KV blocks in all.", "num_blocks"),
    ("karui_kv_blocks_free", "gauge", "KV blocks not in use.", "num_free_blocks"),
    ("karui_kv_blocks_cached", "gauge", "Free KV blocks that still hold a findable prefix.", "num_cached_blocks"),
    ("karui_drafted_tokens_total", "counter", "Tokens drafted.", "num_drafted_tokens"),
    ("karui_accepted_tokens_total", "counter", "Drafted tokens accepted.", "num_accepted_tokens"))


def engine_figures(engine: Any, healthy: bool) -> list[tuple[str, str, str, float]]:
    """(name, type, help, value) of the engine's counters and of the loop's health."""
    stats = engine.stats
    return [("karui_healthy", "gauge", "1 while the engine loop runs.", float(healthy)),
            *((name, kind, text, float(getattr(stats, field))) for name, kind, text, field in _FIGURES)]
