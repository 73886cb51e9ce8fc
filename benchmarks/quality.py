"""Perplexity, time and memory of every post-training method on one model, one grid after another, same calibration rows for all.

    python benchmarks/quality.py [--quick] [--json OUT] [--plot OUT.png] [--methods rtn,gptq,...] [--specs w4g64,w3g64,w2g64]

Protocol: each text as one string, no special tokens, non-overlapping windows of 1024 tokens, every token but a window's first is scored,
mean over all, exp; fp32, through transformers, with the dequantized weights (activations fake-quantized where the spec says a8).
Calibration: 64 x 512 tokens of wikitext2_valid.txt; scored on the first 40 windows of wikitext2_test.txt (quick: 16 rows, 10 windows).
Each run is a process of its own, so that peak memory is that run's. The peer's figures were measured by the same protocol.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import DATA, Figure, arguments, report  # noqa: E402

PEER = {"w4g64": 26.46, "w3g64": 63.96, "w2g64": 9670.0}  # llm-compressor 0.14, GPTQ, same protocol
PEER_SECONDS, PEER_GB = 335.0, 1.8
LENGTH, WINDOW = 512, 1024


def measure(model_name: str, method: str, spec: str, samples: int, windows: int, settings: dict[str, Any]) -> dict[str, float]:
    """Quantize and score in this process."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.qat.activations import attach
    from karui.qat.run import load, quantize_loaded, read_config
    from karui.qat.types import Options

    folder = Path(resolve(model_name))
    tokenizer = load_tokenizer(folder)

    def encode(name: str) -> torch.Tensor:
        return torch.tensor(tokenizer((DATA / name).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])

    model: Any = load(folder, torch.float32).eval()
    seconds = 0.0
    if method != "none":
        rows = encode("wikitext2_valid.txt")[: samples * LENGTH].view(samples, LENGTH)
        start = time.perf_counter()
        result = quantize_loaded(model, read_config(folder), method, spec, rows, Options(settings=settings))
        seconds = time.perf_counter() - start
        if result.facts["spec"].endswith("a8"):
            attach(model, {r.name: None for r in result.report if r.spec.endswith("a8")})
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    ids, total = encode("wikitext2_test.txt"), 0.0
    with torch.inference_mode():
        for i in range(windows):
            x = ids[i * WINDOW : (i + 1) * WINDOW][None]
            hidden = model.get_decoder()(x, use_cache=False).last_hidden_state[0, :-1]
            total += float(torch.nn.functional.cross_entropy(model.lm_head(hidden), x[0, 1:], reduction="sum").double())
    return {"perplexity": math.exp(total / (windows * (WINDOW - 1))), "seconds": seconds, "gb": memory}


def child(a: argparse.Namespace, method: str, spec: str) -> dict[str, float] | None:
    """`measure` in a process of its own; None when it failed, with the reason printed."""
    command = [sys.executable, __file__, "--one", method, "--specs", spec, "--model", a.model, "--settings", a.settings]
    done = subprocess.run(command + (["--quick"] if a.quick else []), capture_output=True, text=True)
    if done.returncode:
        print(f"{method} {spec}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def plot(points: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for method, values in points.items():
        axes.plot(list(values), list(values.values()), marker="o", label=method)
    axes.set_yscale("log")
    axes.set_ylabel("perplexity, wikitext-2 test")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="rtn,hqq,awq,gptq,autoround")
    parser.add_argument("--specs", default="w4g64,w3g64,w2g64")
    parser.add_argument("--settings", default="{}", help="JSON settings of the method; with a single method")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args()
    samples, windows = (16, 10) if a.quick else (64, 40)
    if a.one:
        print(json.dumps(measure(a.model, a.one, a.specs, samples, windows, json.loads(a.settings))))
        return
    methods = a.methods.split(",")
    if a.quick:
        methods, a.specs = [m for m in methods if m in ("rtn", "gptq")], "w3g64"
    plain = child(a, "none", "none")
    figures = [Figure(name="unquantized, perplexity", ours=plain and plain["perplexity"], unit="ppl", better="lower")]
    points: dict[str, dict[str, float]] = {}
    for spec in a.specs.split(","):
        for method in methods:
            found = child(a, method, spec)
            if found is None:
                figures.append(Figure(name=f"{method} {spec}, perplexity", ours=None, unit="ppl", note="failed, see above"))
                continue
            points.setdefault(method, {})[spec] = found["perplexity"]
            against = method == "gptq" and not a.quick and spec in PEER
            named: dict[str, Any] = {"peer_name": "llm-compressor", "better": "lower"} if against else {"better": "lower"}
            figures += [
                Figure(name=f"{method} {spec}, perplexity", ours=found["perplexity"], unit="ppl", **named,
                       **({"peer": PEER[spec], "goal": 1.0} if against else {})),
                Figure(name=f"{method} {spec}, time", ours=found["seconds"], unit="s", **named,
                       **({"peer": PEER_SECONDS, "goal": 1 / 3} if against else {})),
                Figure(name=f"{method} {spec}, peak memory", ours=found["gb"], unit="GB", **named,
                       **({"peer": PEER_GB, "goal": 1.0} if against else {})),
            ]  # fmt: skip
    report(figures, a.json, samples=samples, windows=windows)
    if a.plot is not None:
        plot(points, a.plot)


if __name__ == "__main__":
    main()
