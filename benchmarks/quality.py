"""Perplexity, held-out loss, time and memory of every post-training method on one model, same calibration rows for all.

    KARUI_PEERS=... python benchmarks/quality.py [--quick] [--json OUT] [--plot OUT.png] [--methods gptq,...] [--specs w4g64,...]
                                                [--cache DIR]
    python benchmarks/quality.py --methods gptq --specs w3g64,mixed3.25,w2g32,mixed2.5 --cache DIR

Protocol: each text as one string, no special tokens, non-overlapping windows of 1024 tokens, every token but a window's first is
scored, mean over all, exp; fp32, through transformers, with the dequantized weights. Calibration: 64 x 512 tokens of
wikitext2_valid.txt; scored on the first 40 windows of wikitext2_test.txt. GSM8K: mean loss of the answers' tokens after
"question\\n", first 64 rows of gsm8k_test.jsonl: text of another kind than what was calibrated on. --quick: GPTQ and RTN at w3g64,
12 rows, 8 windows, 16 answers.

W8A8 quantizes activations with one fixed scale per linear's input (per tensor, static: the setting SmoothQuant was made for), found
on the calibration rows; `dynamic` has one scale per token instead, as the engine runs it.

`mixed3.25` is a grid per layer out of --grids, as `karui quantize --budget 3.25` chooses them, in stored bits per weight, scales included:
as large as w3g64. 2.5 is as large as w2g32. Goal: not worse than the uniform grid of that size.

Each run is a process of its own, so that peak memory is that run's. With --cache it leaves a JSON file in DIR, named after its
method, grid and a hash of settings and protocol, and is not repeated; a row says so when the method's code has changed since.
`--one METHOD --specs SPEC --cache DIR` makes a single run. CPU time and wall time are the quantization's alone; wall time of a
machine that others used says nothing. Peer: KARUI_PEERS/llmcompressor; where it is not installed, its
figures measured earlier on a 2-core machine under this protocol are the goal, in absolute numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import DATA, Figure, arguments, peer_python, report  # noqa: E402

MEASURED = {"w4g64": 26.46, "w3g64": 63.96, "w2g64": 9670.0}  # llm-compressor 0.14, GPTQ
MEASURED_SECONDS, MEASURED_GB = 335.0, 1.8
ASKED = {
    ("autoround", "w4g64"): 23.2,
    ("efficient_qat", "w4g64"): 22.5,
    ("efficient_qat", "w3g64"): 27.0,
    ("efficient_qat", "w2g64"): 60.0,
}
SAME_SIZE = {"mixed3.25": "w3g64", "mixed2.5": "w2g32"}
LENGTH, WINDOW = 512, 1024
# By default AutoRound takes 200 iterations, which would be an hour here; these see every row once, as Block-AP does.
SETTINGS: dict[str, dict[str, Any]] = {"autoround": {"iterations": 32, "batch": 2}}
ORDER = ("rtn", "hqq", "awq", "rotation", "gptq", "autoround", "efficient_qat")


def given(a: argparse.Namespace, method: str) -> dict[str, Any]:
    """The settings of a run, as far as they are not the method's defaults."""
    return json.loads(a.settings) or SETTINGS.get(method, {})


def cached(a: argparse.Namespace, method: str, spec: str) -> Path | None:
    """Where a run's figures are kept: one file for everything they depend on but the code."""
    from karui.qat.methods import METHODS

    name = method.removesuffix("-static")
    if a.cache is None or (method != "none" and name not in METHODS):
        return None
    settings = METHODS[name].load().CONFIG.build(given(a, name)).model_dump() if method != "none" else {}
    key = [method, spec, settings, a.model, a.samples if method != "none" else 0, a.windows, a.answers]
    key += [a.grids] if spec.startswith("mixed") else []
    mark = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return Path(a.cache) / f"{method}-{spec}-{mark}.json"


def code_of(method: str) -> str:
    """A hash of the source of a method and of what all methods stand on."""
    folder, digest = Path(__file__).resolve().parent.parent / "karui" / "qat", hashlib.sha256()
    for name in (method.removesuffix("-static"), "gptq", "calibration", "run", "search", "grids", "rtn", "fold"):
        if (file := folder / f"{name}.py").is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def one(a: argparse.Namespace, method: str, spec: str) -> dict[str, Any]:
    """`measure`, or what an earlier run has left in the cache."""
    file = cached(a, method, spec)
    if file is not None and file.is_file():
        return dict(json.loads(file.read_text()))
    found = measure(a, method, spec) | {"code": code_of(method), "settings": given(a, method.removesuffix("-static"))}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found) + "\n")
    return found


def measure(a: argparse.Namespace, method: str, spec: str) -> dict[str, float]:
    """Quantize and score in this process. `method` may end in `-static`: activations by one fixed scale per linear."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.qat.activations import attach
    from karui.qat.run import load, quantize_loaded, read_config
    from karui.qat.types import Options

    torch.set_num_threads(a.threads or torch.get_num_threads())
    folder = Path(resolve(a.model))
    tokenizer = load_tokenizer(folder)
    model: Any = load(folder, torch.float32).eval()
    found: dict[str, float] = {"seconds": 0.0, "cpu_seconds": 0.0}
    if method != "none":
        name, static = method.removesuffix("-static"), method.endswith("-static")
        rows = calibration(tokenizer, a.samples)
        start, cpu = time.perf_counter(), time.process_time()
        settings = given(a, name)
        overrides: dict[str, Any] = {}
        if spec.startswith("mixed"):
            from karui.trainers.mixed import plan_for

            work = None if a.cache is None else Path(a.cache) / f"sensitivity-{len(rows)}-{a.grids}"
            if work is not None:
                work.mkdir(parents=True, exist_ok=True)
            plan = plan_for(folder, rows, a.grids.split(","), spec.removeprefix("mixed"), work=work)
            overrides, spec = {n.removesuffix(".weight"): s for n, s in plan.specs.items()}, a.grids.split(",")[0]
            found["bits"] = plan.bits_per_weight
            start, cpu = time.perf_counter(), time.process_time()
        result = quantize_loaded(model, read_config(folder), name, spec, rows, Options(settings=settings, overrides=overrides))
        found |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        if spec.endswith("a8"):
            eights = [r.name for r in result.report if r.spec != "none"]
            outlier = result.facts["settings"].get("threshold", 0.0)  # LLM.int8() keeps outlier columns whole
            attach(model, static_scales(model, eights, rows) if static else dict.fromkeys(eights), outlier=outlier)
    found["gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found | scored(model, tokenizer, a.windows, a.answers)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def calibration(tokenizer: Any, samples: int) -> Any:
    """Token ids [samples, LENGTH] from the beginning of wikitext2_valid.txt."""
    import torch

    ids = encode(tokenizer, (DATA / "wikitext2_valid.txt").read_text(encoding="utf-8")[: samples * LENGTH * 8])
    return torch.tensor(ids[: samples * LENGTH]).view(samples, LENGTH)


def scored(model: Any, tokenizer: Any, windows: int, answers: int) -> dict[str, float]:
    """`perplexity` on the first windows of wikitext2_test.txt, and `gsm8k`, the mean loss of the first answers, unless there are none."""
    ids = encode(tokenizer, (DATA / "wikitext2_test.txt").read_text(encoding="utf-8"))
    total = sum(loss(model, ids[i * WINDOW : (i + 1) * WINDOW], 1)[0] for i in range(windows))
    found = {"perplexity": math.exp(total / (windows * (WINDOW - 1)))}
    losses = []
    for line in (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:answers]:
        row = json.loads(line)
        question = encode(tokenizer, row["question"] + "\n")
        losses.append(loss(model, question + encode(tokenizer, row["answer"]), len(question)))
    if losses:
        found["gsm8k"] = sum(s for s, _ in losses) / sum(n for _, n in losses)
    return found


def loss(model: Any, ids: list[int], first: int) -> tuple[float, int]:
    """Sum of the losses of ids[first:], and their number."""
    import torch

    x = torch.tensor([ids])
    with torch.inference_mode():
        hidden = model.get_decoder()(x, use_cache=False).last_hidden_state[0, first - 1 : -1]
        return float(torch.nn.functional.cross_entropy(model.lm_head(hidden), x[0, first:], reduction="sum").double()), len(
            ids
        ) - first


def static_scales(model: Any, names: list[str], rows: Any) -> dict[str, float]:
    """absmax / 127 of each linear's input over the calibration rows."""
    import torch

    peaks = dict.fromkeys(names, 0.0)
    linears = {f"{n}.weight": m for n, m in model.named_modules()}

    def watch(name: str) -> Any:
        def hook(_: Any, args: Any) -> None:
            peaks[name] = max(peaks[name], float(args[0].abs().max()))

        return hook

    hooks = [linears[n].register_forward_pre_hook(watch(n)) for n in names]
    with torch.inference_mode():
        for part in rows.split(4):
            model.get_decoder()(part, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {n: peak / 127 for n, peak in peaks.items()}


def child(a: argparse.Namespace, method: str, spec: str) -> dict[str, Any] | None:
    """`one` in a process of its own; None when it failed, with the reason printed."""
    file = cached(a, method, spec)
    if file is not None and file.is_file():
        return one(a, method, spec)
    command = [sys.executable, __file__, "--one", method, "--specs", spec, "--model", a.model, "--settings", a.settings]
    command += [
        "--samples",
        str(a.samples),
        "--windows",
        str(a.windows),
        "--answers",
        str(a.answers),
        "--threads",
        str(a.threads),
    ]
    command += ["--grids", a.grids, *(["--cache", str(a.cache)] if a.cache is not None else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{method} {spec}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{method} {spec}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items() if isinstance(v, float)), file=sys.stderr)
    return found


def peer(a: argparse.Namespace, spec: str) -> dict[str, float] | None:
    """llm-compressor's GPTQ by the same protocol, or None when it is not installed."""
    python = peer_python("llmcompressor")
    if python is None:
        return None
    from karui.catalogue import resolve

    script = Path(__file__).parent / "peers" / "ptq_quality.py"
    bits, group = re.fullmatch(r"w(\d)g(\d+)", spec).groups()  # type: ignore[union-attr]
    command = [str(python), str(script), str(resolve(a.model)), "--peer", "llmcompressor-gptq", "--bits", bits, "--group", group]
    command += ["--calibration", str(DATA / "wikitext2_valid.txt"), "--text", str(DATA / "wikitext2_test.txt")]
    command += ["--samples", str(a.samples), "--windows", str(a.windows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = re.search(r"perplexity (\S+)\s+quantization (\S+) s\s+peak (\S+) GB", done.stdout)
    assert words is not None, done.stdout[-300:]
    return dict(zip(("perplexity", "seconds", "gb"), map(float, words.groups())))


def rows_of(method: str, spec: str, found: dict[str, Any], other: dict[str, float] | None, full: bool) -> list[Figure]:
    """The figures of one run; GPTQ's beside the peer, or beside its earlier figures."""
    out = []
    for key, label, unit, share in (("perplexity", "perplexity", "ppl", 1.0), ("gsm8k", "GSM8K loss", "nats", None),
                                    ("seconds", "time", "s", 1 / 3), ("cpu_seconds", "CPU time", "s", None), ("gb", "peak memory", "GB", 1.0)):  # fmt: skip
        more: dict[str, Any] = {}
        if method == "gptq" and share is not None and spec in MEASURED:
            more = {"peer_name": "llm-compressor", "goal": share}
            if other is not None:
                more["peer"] = other[key]
            elif full:
                before = {"perplexity": MEASURED[spec], "seconds": MEASURED_SECONDS, "gb": MEASURED_GB}[key]
                more = {"goal": share * before, "note": f"peer not installed; measured earlier: {before:g} {unit}"}
            else:
                more["note"] = "peer not installed"
        elif key == "perplexity" and full and (method, spec) in ASKED:
            more = {"goal": ASKED[method, spec]}
        if key == "perplexity" and found["code"] != code_of(method):
            more["note"] = "; ".join(filter(None, (more.get("note"), "kept from a run of earlier code")))
        out.append(Figure(name=f"{method} {spec}, {label}", ours=found.get(key), unit=unit, better="lower", **more))
    return out


def comparisons(points: dict[str, dict[str, float]], specs: list[str], plain: float) -> list[Figure]:
    """What the papers' order would have, as ratios within this run."""
    out = []

    def below(first: str, second: str, spec: str) -> None:
        a, b = points.get(first, {}).get(spec), points.get(second, {}).get(spec)
        if a is not None and b is not None:
            out.append(
                Figure(
                    name=f"{first} {spec} against {second}",
                    ours=a,
                    peer=b,
                    peer_name=second,
                    goal=1.0,
                    unit="ppl",
                    better="lower",
                )
            )

    for spec in specs:
        for first, second in (("gptq", "rtn"), ("awq", "rtn"), ("rotation", "rtn"), ("autoround", "gptq"), ("autoround", "awq"),
                              ("efficient_qat", "autoround")):  # fmt: skip
            below(first, second, spec)
    for spec, uniform in SAME_SIZE.items():
        for method, found in points.items():
            if spec in found and uniform in found:
                out.append(Figure(name=f"{method} {spec} against {uniform}", ours=found[spec], peer=found[uniform], peer_name=uniform,
                                  goal=1.0, unit="ppl", better="lower"))  # fmt: skip
    for method in ("gptq", "rtn", "awq"):
        if {"nvfp4", "mxfp4"} <= points.get(method, {}).keys():
            out.append(Figure(name=f"{method} nvfp4 against mxfp4", ours=points[method]["nvfp4"], peer=points[method]["mxfp4"],
                              peer_name="mxfp4", goal=1.0, unit="ppl", better="lower"))  # fmt: skip
    for method in ("rtn", "smoothquant", "llm_int8", "rtn-static", "smoothquant-static"):
        if "w8a8" in points.get(method, {}):
            goal = 1.01 if method.startswith("smoothquant") else None
            out.append(Figure(name=f"{method} w8a8 against unquantized", ours=points[method]["w8a8"], peer=plain,
                              peer_name="unquantized", goal=goal, unit="ppl", better="lower"))  # fmt: skip
    return out


def plot(points: dict[str, dict[str, float]], plain: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    specs = sorted({s for v in points.values() for s in v if re.fullmatch(r"w\dg64", s)}, reverse=True)
    for method in sorted(points, key=lambda m: ORDER.index(m) if m in ORDER else len(ORDER)):
        shown = [(specs.index(s), v) for s, v in points[method].items() if s in specs]
        if shown:
            axes.plot(*zip(*sorted(shown)), marker="o", label=method)
    axes.axhline(plain, color="gray", linestyle=":", label="unquantized")
    axes.set_xticks(range(len(specs)), specs)
    axes.set_yscale("log")
    axes.set_ylabel("perplexity, wikitext-2 test")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default=",".join(ORDER))
    parser.add_argument("--specs", default="w4g64,w3g64,w2g64")
    parser.add_argument("--settings", default="{}", help="JSON settings of the method; with a single method")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--grids", default="w2g64,w3g64,w4g64", help="what `mixed` chooses from")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--cache", type=Path, help="folder of finished runs, read and added to")
    parser.add_argument("--threads", type=int, default=0, help="of torch in each run (0: as many as it takes by itself)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        print(json.dumps(one(a, a.one, a.specs)))
        return
    from karui.qat.methods import METHODS

    wanted = [(m, s) for s in a.specs.split(",") for m in a.methods.split(",")]
    if "w4g64" in a.specs and "gptq" in a.methods:
        wanted += [(m, "w8a8") for m in ("rtn-static", "rtn", "smoothquant-static", "smoothquant", "llm_int8")]
    if a.quick:
        wanted, (a.samples, a.windows, a.answers) = [("rtn", "w3g64"), ("gptq", "w3g64")], (12, 8, 16)
    full = (a.samples, a.windows) == (64, 40)
    plain = child(a, "none", "none")
    assert plain is not None, "the unquantized model must run"
    figures = [Figure(name="unquantized, perplexity", ours=plain["perplexity"], unit="ppl", better="lower"),
               Figure(name="unquantized, GSM8K loss", ours=plain["gsm8k"], unit="nats", better="lower")]  # fmt: skip
    points: dict[str, dict[str, float]] = {}
    for method, spec in wanted:
        if method.removesuffix("-static") not in METHODS:
            figures.append(Figure(name=f"{method} {spec}, perplexity", ours=None, unit="ppl", note="no such method here"))
            continue
        found = child(a, method, spec)
        if found is None:
            figures.append(Figure(name=f"{method} {spec}, perplexity", ours=None, unit="ppl", note="failed, see above"))
            continue
        points.setdefault(method, {})[spec] = found["perplexity"]
        other = peer(a, spec) if method == "gptq" and spec in MEASURED else None
        figures += rows_of(method, spec, found, other, full)
    figures += comparisons(points, a.specs.split(","), plain["perplexity"])
    report(figures, a.json, samples=a.samples, windows=a.windows, answers=a.answers)
    if a.plot is not None:
        plot(points, plain["perplexity"], a.plot)


if __name__ == "__main__":
    main()
