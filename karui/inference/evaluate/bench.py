"""`karui bench`: latency and throughput at several concurrencies against what the machine allows, and what would help.

    tokens/s <= batch * bandwidth / (weight bytes + batch * KV bytes of the context that a query sees)

Every figure is measured in this process on this machine; the advice is read off the numbers by the rules stated in `advice`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.evaluate.machine import Machine, decode_limit, measure_machine, prefill_limit
from karui.inference.evaluate.speed import Generates, percentile, run_timed


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step reads and computes: bytes of weights as packed, KV bytes per token of context, weights multiplied per token.

    expert_bytes: those of routed experts (in proportion to their values, whatever the grids); chosen: a token's share of them.
    table_bytes: those of an embedding that is not the output head too, of which a token reads a row.
    spans: tokens that a query sees at most and the share of a token's KV bytes in such layers: windows, sparse attention.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    weights_per_token: int
    expert_bytes: int = 0
    chosen: float = 1.0
    table_bytes: int = 0
    spans: tuple[tuple[int, float], ...] = ()

    def kv_bytes(self, context: float) -> float:
        """Bytes of keys and values that a step reads for one stream at this context."""
        unseen = sum(share * max(0.0, context - most) for most, share in self.spans)
        return self.kv_bytes_per_token * (context - unseen)

    def read_bytes(self, streams: int) -> float:
        """Bytes of weights that a step of so many streams reads; their choices of experts are taken to be independent."""
        return self.weight_bytes - self.table_bytes - self.expert_bytes * (1 - self.chosen) ** streams


@dataclass(frozen=True, kw_only=True)
class Level:
    """One concurrency. Times in milliseconds as a client sees them; rates in tokens/s over all streams.

    decode_per_s: output tokens after each stream's first, over the time from the first such token to the last.
    limit_per_s: the bandwidth limit of a decode at this batch and the mean context; share: decode_per_s over it (with speculation
        it may pass 1, since several tokens leave one pass over the weights).
    tokens_per_draft, acceptance: tokens that a verified draft brought, the model's own included, and the accepted share of
        drafted ones; None where nothing was drafted.
    """

    speculation: str
    concurrency: int
    prompt_tokens: int
    new_tokens: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    output_per_s: float
    decode_per_s: float
    limit_per_s: float
    share: float
    tokens_per_draft: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything `bench` measured; `prefill_per_s` is one stream's, `advice` one line per finding."""

    machine: Machine
    load: Load
    prompt_tokens: int
    prefill_per_s: float
    prefill_limit_per_s: float
    levels: list[Level]
    advice: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(engines: Mapping[str, Generates], load: Load, tokens: Sequence[int], *, concurrencies: Sequence[int] = (1, 4, 16),
          prompt_tokens: int = 128, new_tokens: int = 64, machine: Machine | None = None,
          progress: Callable[[str], None] | None = None) -> Result:
    """Measure each engine at each concurrency.

    Args:
        engines: by the name of their speculation, e.g. {"none": ..., "ngram:5": ...}; the same model in each.
        load: see `Load`; `load_of(engine)` reads it off one.
        tokens: text to cut prompts from; prompts start at different offsets and share no prefix.
    Raises:
        KaruiError: nonsensical sizes or too little text.
    """
    if not engines or not concurrencies or min(*concurrencies, prompt_tokens, new_tokens - 1) < 1:
        raise KaruiError(f"bench: needs an engine, concurrencies and prompts of at least 1, and at least 2 new tokens; got "
                         f"{list(concurrencies)}, {prompt_tokens} and {new_tokens}.")
    if len(tokens) < prompt_tokens:
        raise KaruiError(f"bench: {len(tokens)} tokens of text are too few for prompts of {prompt_tokens}.")
    machine = machine or measure_machine()
    room = len(tokens) - prompt_tokens
    levels, prefill = [], 0.0
    for name, engine in engines.items():
        run_timed(engine, [tokens[:min(16, prompt_tokens)]], 4)
        for concurrency in concurrencies:
            if progress is not None:
                progress(f"speculation {name}, {concurrency} at once")
            offsets = [i * room // concurrency for i in range(concurrency)]
            before = _drafting(engine)
            timings, total = run_timed(engine, [tokens[o:o + prompt_tokens] for o in offsets], new_tokens)
            drafts, drafted, accepted = (now - then for now, then in zip(_drafting(engine), before))
            first, last = min(t.first_s for t in timings), max(t.last_s for t in timings)
            decoded = sum(t.new_tokens - 1 for t in timings)
            rate = decoded / (last - first) if last > first else math.nan
            limit = decode_limit(machine.bandwidth_bytes_per_s, concurrency, load.read_bytes(concurrency),
                                 load.kv_bytes(prompt_tokens + new_tokens / 2))
            ttft, tpot = [t.first_s * 1e3 for t in timings], [t.tpot_s * 1e3 for t in timings]
            levels.append(Level(
                speculation=name, concurrency=concurrency, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
                ttft_p50_ms=percentile(ttft, 0.5), ttft_p95_ms=percentile(ttft, 0.95),
                tpot_p50_ms=percentile(tpot, 0.5), tpot_p95_ms=percentile(tpot, 0.95),
                output_per_s=concurrency * new_tokens / total, decode_per_s=rate, limit_per_s=limit, share=rate / limit,
                tokens_per_draft=1 + accepted / drafts if drafts else None, acceptance=accepted / drafted if drafted else None))
            if concurrency == 1:
                prefill = max(prefill, prompt_tokens / timings[0].first_s)
    if not prefill:
        timings, _ = run_timed(next(iter(engines.values())), [tokens[:prompt_tokens]], 2)
        prefill = prompt_tokens / timings[0].first_s
    ceiling = prefill_limit(machine.flops_per_s, load.weights_per_token)
    return Result(machine=machine, load=load, prompt_tokens=prompt_tokens, prefill_per_s=prefill, prefill_limit_per_s=ceiling,
                  levels=levels, advice=advice(machine, load, levels, prefill, ceiling, prompt_tokens))


def _drafting(engine: Generates) -> tuple[int, int, int]:
    """Drafts verified, tokens drafted and accepted so far."""
    found = getattr(getattr(engine, "speculation", None), "statistics", None)
    return (0, 0, 0) if found is None else (found.drafts, found.drafted, found.accepted)


PASSAGE = """The harbour town wakes before the sun. Fishermen carry nets down the stone steps, bakers open their shutters, and the
first ferry sounds its horn at the end of the pier. By eight the market is full: oranges from the south, cheese from the hills,
blue crabs in wet baskets. An old woman sells almanacs and weather; she has been wrong only twice, she says, and both times the
sea apologised. Children run between the stalls with chalk on their hands. At noon everything stops. The shutters close, the dogs
lie down in the shade of the customs house, and for two hours nobody buys or sells anything at all. Then a bell rings, the nets
come up heavy, and the whole town argues about the price of fish until the lamps are lit along the quay.
"""


def run_bench(model: str | Path, *, speculate: str | None = "ngram:5", concurrencies: Sequence[int] = (1, 4, 16),
              prompt_tokens: int = 128, new_tokens: int = 64, text: Path | None = None, runner: str = "auto",
              progress: Callable[[str], None] | None = None, **options: Any) -> Result:
    """`bench` of a bundle, a model folder or a catalogue name: plain, and with `speculate` unless it is None.

    Args:
        text: where prompts are cut from; a shipped passage, repeated, when None. Whether prompt lookup pays depends on the text:
            give the kind of text you serve.
        options: further options of `Engine.load`.
    """
    import gc

    from karui.inference.engine import Engine
    from karui.inference.evaluate.scoring import read_text

    options = {"max_context": prompt_tokens + new_tokens + 16, "max_sequences": max(concurrencies), "runner": runner} | options
    passage = PASSAGE if text is None else read_text(text)
    if not passage.strip():
        raise KaruiError(f"bench: {text} holds no text to cut prompts from.")
    machine = measure_machine()
    results = []
    for spelling in (None, speculate) if speculate else (None,):
        engine = Engine.load(model, speculation=spelling, **options)
        if engine.tokenizer is None:
            raise KaruiError(f"bench: {model} has no tokenizer to cut prompts with.")
        tokens = list(engine.tokenizer(passage, add_special_tokens=False)["input_ids"])
        tokens = (tokens * (1 + 2 * prompt_tokens // len(tokens)))[:max(len(tokens), 2 * prompt_tokens)]
        results.append(bench({spelling or "none": engine}, load_of(engine), tokens, concurrencies=concurrencies,
                             prompt_tokens=prompt_tokens, new_tokens=new_tokens, machine=machine, progress=progress))
        # One model in memory at a time: the second would push the first out of the caches and both out of small machines.
        del engine
        gc.collect()
    first, levels = results[0], [level for r in results for level in r.levels]
    return replace(first, levels=levels, advice=advice(machine, first.load, levels, first.prefill_per_s,
                                                       first.prefill_limit_per_s, prompt_tokens))


def load_of(engine: Any) -> Load:
    """Read the load off an engine: its runner's packed weights and KV, the weights of the matrices a token passes through, of a
    mixture those of as many experts as it takes."""
    from karui.inference.models.weights import expected_shapes

    runner, mixture = engine.runner, engine.runner.config.mixture
    chosen, values, matrices, routed = 1.0 if mixture is None else mixture.per_token / mixture.experts, 0, 0, 0
    for name, shape in expected_shapes(runner.config).items():
        values += math.prod(shape)
        if len(shape) == 2 and ".layers." in name:
            matrices += math.prod(shape)
            routed += math.prod(shape) if ".experts." in name else 0
    total, table = runner.weight_bytes(), 0 if runner.config.tied else runner.embedding_bytes()
    return Load(weight_bytes=total, table_bytes=table, chosen=chosen,
                kv_bytes_per_token=runner.kv_bytes_per_token(engine.kv_dtype), spans=runner.config.spans,
                weights_per_token=round(matrices - routed * (1 - chosen)), expert_bytes=(total - table) * routed // values)


def advice(machine: Machine, load: Load, levels: Sequence[Level], prefill_per_s: float, prefill_limit_per_s: float,
           prompt_tokens: int) -> list[str]:
    """Which bottleneck the numbers show, and which technique moves it.

    Rules: KV-bound when a step at the largest batch reads more keys and values than weights; memory-bound when one stream reaches
    at least half of its bandwidth limit, else overhead or compute holds it back; prefill compute-bound from 40 % of the
    fp32 yardstick; batching saturates when the largest batch gives less than half of a linear gain. Techniques stand in the order
    in which they are worth trying: fewer bits before speculation before a smaller model; batching before prefix reuse.
    """
    lines = []
    plain = [level for level in levels if level.speculation == "none"] or list(levels)
    one, most = min(plain, key=lambda x: x.concurrency), max(plain, key=lambda x: x.concurrency)
    context = most.prompt_tokens + most.new_tokens / 2
    kv_bytes = most.concurrency * load.kv_bytes(context)
    kv_share = kv_bytes / (kv_bytes + load.read_bytes(most.concurrency))
    if kv_share > 0.5:
        lines.append(f"KV-bound at {most.concurrency} streams and context {context:.0f}: {kv_share:.0%} of what a step reads are "
                     "keys and values -> int8 KV cache, then a model with GQA or MLA.")
    if one.share >= 0.5:
        lines.append(f"One stream is memory-bound: {one.decode_per_s:.0f} tokens/s are {one.share:.0%} of the limit of reading "
                     f"{load.read_bytes(1) / 1e6:.0f} MB of weights per token -> fewer bits (w4, ternary), then speculation, "
                     "then a smaller (distilled) model.")
    else:
        lines.append(f"One stream reaches {one.share:.0%} of its bandwidth limit "
                     f"({one.decode_per_s:.0f} of {one.limit_per_s:.0f} tokens/s): compute or overhead per step "
                     "holds it back, not memory -> the native runner, more threads, or speculation, which shares a step "
                     "among several tokens.")
    if most.concurrency > one.concurrency:
        gain = most.decode_per_s / one.decode_per_s
        lines.append(f"{most.concurrency} streams give {gain:.1f}x one stream -> "
                     + ("many requests gain most from being served together; then share prefixes."
                        if gain > 0.5 * most.concurrency / one.concurrency else
                        "batching is saturating; a larger batch mostly adds latency."))
    share = prefill_per_s / prefill_limit_per_s
    kind = "compute-bound" if share >= 0.4 else "below the compute limit"
    lines.append(f"Prefill is {kind}: {prefill_per_s:.0f} tokens/s are {share:.0%} of the fp32 yardstick, so a prompt of "
                 f"{prompt_tokens} waits {prompt_tokens / prefill_per_s * 1e3:.0f} ms -> "
                 + ("reuse prefixes, or multiply in 8 bits (W8A8, FP8)." if share >= 0.4
                    else "larger chunks, or the native runner."))
    for level in levels:
        base = next((b for b in levels if b.speculation == "none" and b.concurrency == level.concurrency), None)
        if base is not None and level.speculation != "none":
            gain = level.decode_per_s / base.decode_per_s
            verdict = "pays" if gain > 1.02 else "does not pay; leave it off" if gain < 0.98 else "changes nothing"
            told = ("nothing was drafted" if level.tokens_per_draft is None or level.acceptance is None else
                    f"{level.tokens_per_draft:.2f} tokens a verification, {level.acceptance:.0%} of drafted tokens accepted")
            lines.append(f"Speculation {level.speculation} at {level.concurrency} streams: {gain:.2f}x, {verdict}; {told}.")
    return lines


COLUMNS = ("speculation", "streams", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95", "output/s", "decode/s", "limit/s", "share",
           "tokens/draft")


def table(result: Result) -> Any:
    """A rich table of the levels."""
    from rich.table import Table

    grid = Table(*COLUMNS, title=f"prompts of {result.prompt_tokens}, {result.levels[0].new_tokens} new tokens; prefill "
                 f"{result.prefill_per_s:.0f} tokens/s; memory {result.machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s, "
                 f"fp32 {result.machine.flops_per_s / 1e9:.0f} GFLOP/s on {result.machine.threads} threads", title_justify="left")
    for x in result.levels:
        grid.add_row(x.speculation, str(x.concurrency), f"{x.ttft_p50_ms:.0f}", f"{x.ttft_p95_ms:.0f}",
                     f"{x.tpot_p50_ms:.1f}", f"{x.tpot_p95_ms:.1f}", f"{x.output_per_s:.1f}", f"{x.decode_per_s:.1f}",
                     f"{x.limit_per_s:.0f}", f"{x.share:.0%}",
                     "" if x.tokens_per_draft is None else f"{x.tokens_per_draft:.2f}")
    return grid


def write_json(result: Result, path: Path) -> None:
    """Write the result, atomically; nan becomes null."""
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(clean(result.to_dict()), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def plot(result: Result, path: Path) -> None:
    """Write a PNG: throughput against the limit, and latency, over concurrency. Raises `UnsupportedError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("a plot needs matplotlib; install karui[plot], or leave the plot out.") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rates, latencies = figure.subplots(1, 2)
    for name in dict.fromkeys(level.speculation for level in result.levels):
        chosen = sorted((x for x in result.levels if x.speculation == name), key=lambda x: x.concurrency)
        streams = [x.concurrency for x in chosen]
        rates.plot(streams, [x.decode_per_s for x in chosen], marker="o", label=f"speculation {name}")
        latencies.plot(streams, [x.tpot_p50_ms for x in chosen], marker="o", label=f"TPOT, {name}")
        latencies.plot(streams, [x.ttft_p50_ms for x in chosen], marker="s", linestyle="--", label=f"TTFT, {name}")
    limits = {x.concurrency: x.limit_per_s for x in result.levels}
    rates.plot(sorted(limits), [limits[c] for c in sorted(limits)], color="grey", linestyle=":", label="bandwidth limit")
    for axes, label in ((rates, "decode tokens/s"), (latencies, "ms, median")):
        axes.set(xlabel="streams", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(sorted(limits), [str(c) for c in sorted(limits)], minor=False)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
