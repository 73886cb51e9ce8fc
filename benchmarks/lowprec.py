"""Low-precision pretraining: the held-out loss of every recipe and optimizer against fp32, and what each NVFP4 ingredient is worth.

    python benchmarks/lowprec.py [--quick] [--json OUT] [--plot OUT.png] [--cache FOLDER] [--only NAME ...] [--workers N]

A byte-level llama of 5.6 M parameters on WikiText-2 (KARUI_DATA, or --train and --held). Every run has the same initial weights,
batches and schedule, and the loss it ends with is measured on the same windows of held-out text. The 8-bit recipes and the NVFP4
variants put all blocks in low precision, so that few blocks show what many hide; "nvfp4" is the recipe with everything on, its
layer policy (first and last blocks high) too.

What a gap has to exceed to count:
    paired error   standard error of the mean difference over the held-out windows; the windows are common, so it is small
    chance         runs that differ in nothing that matters part ways too: fp32 from initial weights moved by 1 % of their size, about
                   what rounding to 8 bits moves them; NVFP4 with other random bits for its stochastic rounding. The spread of each
                   group is the chance in its kind; gaps are taken to the group's mean
A run is called separable from a group when it is away from its mean by more than 2 sqrt(paired error^2 + spread^2 (1 + 1 / runs)).

Optimizers are held to a band: how far above fp32 AdamW's held-out loss they may end (`BANDS`; those that are AdamW with smaller states
are meant to take its way, Adafactor and Muon go ways of their own), and to the bytes of their states, measured after the last step. On a
CPU paged states lie where the others do: the same losses and bytes.

Each run has one thread (--threads), and as many run at once as there are cores (--workers): what a run computes does not depend on
how many there are. Runs are kept in --cache, a file each, with their settings: the table accumulates, and a run that is there is not
repeated.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from figures import DATA, Figure, arguments, report

from karui.lowprec import LayerPolicy, LowPrecision, Precision
from karui.lowprec.optim import OPTIMIZERS, build_optimizer

EVERYWHERE = LayerPolicy(first_blocks=0, last_blocks=0)
GOALS = {"fp8-current": 1.003, "fp8-blockwise": 1.003, "mxfp8": 1.003, "nvfp4": 1.015}
BANDS = dict.fromkeys(("adamw8bit", "adamw-fp8", "paged-adamw8bit", "paged-adamw-fp8", "bnb-adamw8bit"), 1.005) | {
    "adafactor": 1.05, "muon": 1.02
}  # fmt: skip
STATES = {"adafactor": 0.05, "muon": 0.6}  # of fp32 AdamW's bytes; the others 0.3
SMOOTHED = 25  # steps of training loss that one point of a curve averages
# Of AdamW's rate, whose steps are absolute: Adafactor's are shares of a parameter's RMS, 0.02 to 0.05 here, Muon's have an RMS of 0.2.
RELATIVE = {"adafactor": 20, "muon": 5}
BASE = "nvfp4, all blocks"  # what the variants with one ingredient off are compared with
FP32 = ("fp32", "fp32, moved by 1 %", "fp32, moved by 1 % again")
NVFP4 = (BASE, f"{BASE}, other random bits", f"{BASE}, more random bits")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs of a table have in common. Tokens are bytes."""

    steps: int
    width: int
    blocks: int
    batch: int
    length: int
    windows: int
    lr: float


FULL = Job(steps=500, width=256, blocks=7, batch=4, length=128, windows=192, lr=2e-3)
QUICK = Job(steps=150, width=96, blocks=4, batch=4, length=128, windows=128, lr=3e-3)


def runs(job: Job) -> dict[str, Any]:
    """By name: None (fp32), "bf16" (autocast), an optimizer's name, an int (seed that moves the weights), or a `Precision`."""
    late = ({"step": job.steps * 4 // 5, "gemm": "fprop", "to": "high"},)
    table: dict[str, Any] = dict(zip(FP32, (None, 1, 2))) | {"bf16": "bf16"}
    table |= {name: {} for name in ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4")}
    nvfp4: dict[str, Any] = {"recipe": "nvfp4"}
    table |= {"nvfp4": nvfp4 | {"policy": LayerPolicy()}} | {name: nvfp4 | {"seed": seed} for seed, name in enumerate(NVFP4)}
    without = {"stochastic rounding": "stochastic", "Hadamard transform": "hadamard", "16x16 weight tiles": "square_weights",
               "the tensor's scale": "tensor_scale"}  # fmt: skip
    table |= {f"{BASE}, without {name}": nvfp4 | {key: False} for name, key in without.items()}
    table[f"{BASE}, fprop high for the last fifth"] = nvfp4 | {"schedule": late}
    table |= {f"optimizer {name}": name for name in BANDS if not name.startswith("bnb") or find_spec("bitsandbytes")}
    return {
        name: Precision.parse({"recipe": name, "policy": EVERYWHERE} | what) if isinstance(what, dict) else what
        for name, what in table.items()
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="write the loss curves here")
    parser.add_argument("--cache", type=Path, help="folder of finished runs, read and added to")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="train these runs only; the table shows all that are cached")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--steps", type=int, help="more or fewer than the table's own")
    parser.add_argument("--lr", type=float, help="another highest learning rate")
    parser.add_argument("--train", type=Path, default=DATA / "wikitext2_valid.txt")
    parser.add_argument("--held", type=Path, default=DATA / "wikitext2_test.txt")
    options = parser.parse_args()
    for path in (options.train, options.held):
        if not path.exists():
            sys.exit(f"{path} is not there; name text files with --train and --held, or their folder with KARUI_DATA")
    job = QUICK if options.quick else FULL
    job = replace(job, steps=options.steps or job.steps, lr=options.lr or job.lr)
    table = runs(job)
    wanted = options.only or list(table)
    if unknown := [name for name in wanted if name not in table]:
        sys.exit(f"{unknown[0]!r} is no run; runs: {', '.join(table)}")
    texts = {"train": options.train, "held": options.held}
    key = asdict(job) | {k: path.name for k, path in texts.items()}
    done: dict[str, Any] = {}
    files = {n: options.cache / f"{re.sub('[^a-z0-9]+', '-', n)}-{job.steps}-{rate_of(table[n], job):g}.json" for n in table if options.cache}
    for name, kept in files.items():
        if kept.exists() and (run := json.loads(kept.read_text()))["job"] == key:
            done[name] = run
    for name, run in train_all([n for n in wanted if n not in done], job, texts, options.workers, options.threads):
        done[name] = run | {"job": key}
        if name in files:
            files[name].parent.mkdir(parents=True, exist_ok=True)
            files[name].write_text(json.dumps(done[name]) + "\n")
    done = {name: done[name] for name in table if name in done}
    title = f"held-out loss after {job.steps} steps of {job.batch * job.length} tokens, {job.blocks} blocks of width {job.width}"
    report(figures(done), options.json, title=title, job=asdict(job))
    if options.plot:
        plot({name: run["curve"] for name, run in done.items()}, options.plot)


def train_all(
    names: list[str], job: Job, texts: dict[str, Path], workers: int, threads: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run by its name, as it ends; `workers` at once, each in a process of its own."""
    if min(workers, len(names)) <= 1:
        yield from ((name, train_one(name, job, texts, threads)) for name in names)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        runs_of = {pool.submit(train_one, name, job, texts, threads): name for name in names}
        for ended in as_completed(runs_of):
            yield runs_of[ended], ended.result()


def train_one(name: str, job: Job, texts: dict[str, Path], threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    text = {k: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long() for k, path in texts.items()}
    return train(runs(job)[name], job, text, name)


def figures(done: dict[str, Any]) -> list[Figure]:
    """The table: every run against the mean of the fp32 runs, one of which is as far from another as any gap that is asked about, the
    NVFP4 variants against NVFP4 in all blocks too, and the bytes of optimizers' states."""
    mean = {name: statistics.fmean(run["windows"]) for name, run in done.items()}
    exact = [mean[name] for name in FP32 if name in done]
    out = []
    for name in done:
        if name == "fp32" or "fp32" not in done:
            continue
        note = "gap to fp32 " + verdict(done, name, FP32)
        if name.startswith("nvfp4") and name not in NVFP4 and BASE in done:
            note += f"; to {BASE} " + verdict(done, name, NVFP4)
        optimizer = name.removeprefix("optimizer ")
        if optimizer in BANDS:
            worst = max(abs(a / b - 1) for (_, a), (_, b) in zip(done[name]["curve"], done["fp32"]["curve"]))
            note += f"; training loss within {100 * worst:.2f} % all the way"
        out.append(Figure(name=name, ours=mean[name], unit="nats/byte", peer=statistics.fmean(exact), peer_name=f"fp32, mean of {len(exact)}",
                          goal=BANDS.get(optimizer, GOALS.get(name)), better="lower", note=note))  # fmt: skip
        if optimizer in BANDS:
            out.append(Figure(name=f"{name}, states", ours=done[name]["state_bytes"] / 1e6, unit="MB", better="lower",
                              peer=done["fp32"]["state_bytes"] / 1e6, peer_name="fp32 AdamW", goal=STATES.get(optimizer, 0.3)))
    return out


def verdict(done: dict[str, Any], name: str, group: tuple[str, ...]) -> str:
    """The mean paired difference of a run to the others of `group` in percent, its two errors, and whether it counts."""
    others = [done[n]["windows"] for n in group if n in done and n != name]
    base = [statistics.fmean(values) for values in zip(*others)]
    differences = [a - b for a, b in zip(done[name]["windows"], base)]
    gap, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    spread = chance(done, NVFP4 if name.startswith("nvfp4") else FP32)
    percent = 100 / statistics.fmean(base)
    text = f"{gap * percent:+.2f} % (paired error {error * percent:.2f}, chance {spread * percent:.2f})"
    bound = 2 * math.sqrt(error**2 + spread**2 * (1 + 1 / len(others)))
    return text + (" separable" if abs(gap) > bound else " not separable")


def chance(done: dict[str, Any], group: tuple[str, ...]) -> float:
    """Spread (standard deviation, nats) of runs that differ by chance alone."""
    means = [statistics.fmean(done[n]["windows"]) for n in group if n in done]
    return statistics.stdev(means) if len(means) > 1 else 0.0


def train(what: Any, job: Job, text: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    """Train one model.

    Returns {"curve": [(step, mean training loss of the steps up to it)], "windows": final loss of each held-out window,
    "cpu_seconds", "state_bytes", "parameters"}.
    """
    model = build(job)
    if isinstance(what, int):
        moved = torch.Generator().manual_seed(what)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.01 * torch.randn(p.shape, generator=moved))
    rate = rate_of(what, job)
    optimizer = build_optimizer(what if what in OPTIMIZERS else "adamw", model, lr=rate, betas=(0.9, 0.95),
                                weight_decay=0.1 * job.lr / rate)  # fmt: skip
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=job.steps + 1, pct_start=0.1,
                                                   cycle_momentum="betas" in optimizer.defaults)  # fmt: skip
    if isinstance(what, Precision):
        low = LowPrecision(what)
        low.prepare(model)
        low.attach(optimizer)
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if what == "bf16" else nullcontext()
    generator = torch.Generator().manual_seed(0)
    curve, recent = [], []
    began = time.process_time()
    for step in range(1, job.steps + 1):
        starts = torch.randint(len(text["train"]) - job.length - 1, (job.batch,), generator=generator)
        optimizer.zero_grad()
        with cast:
            loss = losses(model, rows(text["train"], starts, job.length)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % SMOOTHED == 0 or step == job.steps:
            curve.append((step, statistics.fmean(recent)))
            recent.clear()
    held = rows(text["held"], torch.linspace(0, len(text["held"]) - job.length - 2, job.windows).long(), job.length)
    with torch.no_grad(), cast:
        windows = torch.cat([losses(model.eval(), part) for part in held.split(32)]).double()
    seconds = time.process_time() - began
    print(f"{float(windows.mean()):.5f} after {seconds:.0f} s of processor time  {name}", file=sys.stderr, flush=True)
    states = {v.data_ptr(): v.numel() * v.element_size() for each in optimizer.state.values() for v in each.values()
              if torch.is_tensor(v)}  # fmt: skip
    return {"curve": curve, "windows": windows.tolist(), "cpu_seconds": seconds, "state_bytes": sum(states.values()),
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


def rate_of(what: Any, job: Job) -> float:
    """The highest learning rate of a run."""
    return job.lr * (RELATIVE.get(what, 1) if isinstance(what, str) else 1)


def build(job: Job) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=job.width,
        intermediate_size=job.width * 8 // 3 // 32 * 32,
        num_hidden_layers=job.blocks,
        num_attention_heads=job.width // 32,
        num_key_value_heads=job.width // 32,
        max_position_embeddings=job.length,
    )
    return LlamaForCausalLM(config)


def rows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()])


def losses(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean loss of each row."""
    logits = model(input_ids=batch[:, :-1]).logits.float()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return each.view(len(batch), -1).mean(1)


def plot(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    base = dict(map(tuple, curves.get("fp32", [])))
    for at, (name, curve) in enumerate(curves.items()):
        steps, values = zip(*curve)
        style = {"linewidth": 1, "linestyle": ("-", "--", ":")[at // 10 % 3]}  # ten colours
        left.plot(steps, values, label=name, **style)
        if base:
            right.plot(steps, [100 * (v / base[s] - 1) for s, v in curve], label=name, **style)
    left.set(xlabel="step", ylabel="training loss, nats per byte")
    right.set(xlabel="step", ylabel="gap to fp32, %")
    right.set_yscale("symlog", linthresh=1)
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
