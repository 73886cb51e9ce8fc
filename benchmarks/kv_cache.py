"""Formats of the KV cache: bytes per token, perplexity, and tokens per second at long contexts.

    python benchmarks/kv_cache.py [--quick] [--json OUT] [--only quality|speed] [--windows 8] [--context 2048] [--model NAME]
                                  [--formats kivi2,kvquant3,...] [--contexts 4096 8000] [--threads 2]

Quality: wikitext2_test.txt as one string, no special tokens, non-overlapping windows of `context` tokens, every token but a
window's first is scored by `Engine.score`, mean over all, exp. A row sees the keys and values that decoding would see there: those
of the cache. Torch runner, fp32 weights and activations. The peer is the same engine with an fp32 cache; the ratio is perplexity
over its.

Speed: native runner, w4g32 weights with an int8 head, one stream that has 4,096 and 8,000 tokens in its cache and decodes 64 more;
formats in turn, best of the rounds. The peer is the fp16 cache in the same run.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import DATA, Figure, arguments, report  # noqa: E402

# (kv_dtype, tokens per block): with kivi so many tokens are in full precision at most.
FORMATS: list[tuple[str, int | None]] = [
    ("float16", None), ("int8", None), ("fp8", None), ("int4", None),
    ("kivi4", 32), ("kivi4", 128), ("kivi2", 32), ("kivi2", 64), ("kivi2", 128),
    ("uniform 3", None), ("kvquant4", None), ("kvquant3", None), ("kvquant3 without Fisher", None), ("kvquant2", None),
]  # fmt: skip
QUICK = [("int8", None), ("int4", None), ("kivi4", 64), ("kivi2", 64)]


def quality(a: argparse.Namespace) -> list[Figure]:
    """Perplexity of every format."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.inference.bundle.reader import open_model
    from karui.inference.engine import Engine
    from karui.inference.loading import make_runner
    from karui.inference.models.config import from_hf
    from karui.qat.kvquant import fit

    folder = Path(resolve(a.model))
    tokenizer, text = load_tokenizer(folder), (DATA / "wikitext2_test.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = [ids[i * a.context : (i + 1) * a.context] for i in range(a.windows)]
    opened = open_model(folder)
    runner: Any = make_runner(opened, from_hf(opened.config), choice="torch")

    def perplexity(name: str, block_size: int | None) -> float:
        started, kv_dtype = time.perf_counter(), "float32" if name == "uniform 3" else name.split()[0]
        engine = Engine(runner, kv_dtype=kv_dtype, block_size=block_size, max_context=a.context, max_sequences=1, memory="1GiB")
        if name == "uniform 3":
            whole = runner._kv.write
            runner._kv.write = lambda layer, slots, k, v: whole(layer, slots, uniform(k, 3), uniform(v, 3))
        logprobs = torch.cat([engine.score([window])[0].double() for window in windows])
        found = math.exp(-float(logprobs.mean()))
        print(f"{name} {block_size or ''}: {found:.3f}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return found

    chosen = [f for f in FORMATS if f[0] in a.formats.split(",")] if a.formats else QUICK if a.quick else FORMATS
    plain, fp16 = perplexity("float32", None), runner.kv_bytes_per_token("float16")
    figures = [Figure(name="float32", ours=plain, unit="perplexity", better="lower")]
    for name, block in chosen:
        if name.startswith("kvquant"):
            runner.set_kv_levels(fit(collected(folder, tokenizer), int(name[7]), fisher="without" not in name))
        note = "3 bits and a scale"
        if name != "uniform 3":
            size = runner.kv_bytes_per_token(name.split()[0])
            note = f"{size:,} bytes per token, 1/{fp16 / size:.2f} of fp16's"
            if beside := runner.kv_staged_bytes_per_token(name.split()[0]):
                note += f"; {beside:,} more for each of the last {block} at most"
        ours = perplexity(name, block)
        full = f"{name}{'' if block is None else f', blocks of {block}'}"
        figures.append(Figure(name=full, ours=ours, unit="perplexity", peer=plain, peer_name="float32", better="lower", note=note))
    return figures


def uniform(x: Any, bits: int) -> Any:
    """Every token's head [..., D] on 2^bits even levels from its min to its max."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low).clamp_min(1e-12) / (2**bits - 1)
    return ((x - low) / step).round() * step + low


@functools.cache
def collected(folder: Path, tokenizer: Any) -> Any:
    """What kvquant is fitted to."""
    import torch

    from karui.qat.kvquant import collect
    from karui.qat.run import load

    text = (DATA / "wikitext2_valid.txt").read_text(encoding="utf-8")[:60000]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    started = time.perf_counter()
    found = collect(load(folder, torch.float32), torch.tensor(ids[: 16 * 512]).view(16, 512))
    print(f"keys and values of the calibration text: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return found


SPEED = ["float16", "int8", "kivi4", "kivi2"]


def speed(a: argparse.Namespace) -> list[Figure]:
    """Decoding at long contexts with every format of the native runner."""
    import tempfile

    from karui.catalogue import resolve
    from karui.inference.bundle.export import export_model
    from karui.inference.bundle.reader import open_model
    from karui.inference.engine import Engine
    from karui.inference.loading import load_tokenizer
    from karui.inference.models.config import from_hf
    from karui.inference.models.native import NativeRunner

    folder = resolve(a.model)
    text = (DATA / "wikitext2_test.txt").read_text(encoding="utf-8")[:60000]
    best: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        export_model(folder, "w4g32", Path(scratch) / "w4g32", embedding_spec="w8")
        opened = open_model(Path(scratch) / "w4g32")
        weights = dict(opened.weights())
        ids = load_tokenizer(opened.tokenizer_path)(text, add_special_tokens=False, verbose=False)["input_ids"]
        config = from_hf(opened.config)
        engines = {
            kv_dtype: Engine(NativeRunner(config, weights, threads=a.threads), kv_dtype=kv_dtype, max_sequences=1, memory="1GiB")
            for kv_dtype in SPEED
        }
        for _ in range(a.rounds):
            for context in a.contexts:
                for kv_dtype, engine in engines.items():
                    rate = decode(engine, ids[:context])
                    best[kv_dtype, context] = max(best.get((kv_dtype, context), 0.0), rate)
                    print(f"{kv_dtype} at {context}: {rate:.1f}", file=sys.stderr)
    return [
        Figure(
            name=f"{kv_dtype}, decode at context {context}",
            ours=best[kv_dtype, context],
            unit="tokens/s",
            peer=best["float16", context],
            peer_name="float16",
            goal=1.0 if kv_dtype != "float16" else None,
        )
        for context in a.contexts
        for kv_dtype in SPEED
    ]


def decode(engine: Any, prompt: list[int], new_tokens: int = 64) -> float:
    """Tokens per second behind a prompt that the prefix cache holds but for its end."""
    from karui.inference.requests import Request, SamplingParams

    arrived: list[tuple[float, int]] = []
    for count, seen in ((1, None), (new_tokens, lambda delta: arrived.append((time.perf_counter(), len(delta.token_ids))))):
        engine.generate(Request(prompt=prompt, params=SamplingParams(max_tokens=count, ignore_eos=True), on_delta=seen))
    return sum(n for _, n in arrived[1:]) / (arrived[-1][0] - arrived[0][0])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=["quality", "speed"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--formats", help="only these, by name, with commas between them")
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    a.windows, a.rounds = a.windows or (2 if a.quick else 8), a.rounds or (1 if a.quick else 3)
    a.contexts = a.contexts or ([4096] if a.quick else [4096, 8000])
    figures = [] if a.only == "quality" else speed(a)
    figures += [] if a.only == "speed" else quality(a)
    report(figures, a.json, model=a.model, context=a.context, windows=a.windows, rounds=a.rounds, threads=a.threads)


if __name__ == "__main__":
    main()
