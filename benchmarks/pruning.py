"""Pruning of SmolLM2-135M: what masks, narrower layers and fewer layers cost, by what is chosen to go.

    python benchmarks/pruning.py [--quick] [--json OUT] [--only sparse,width] [--skip 4:8,gptq] [--cache DIR]

sparse   half of the weights of all 210 linears are zero: any (0.5), 2 of 4 or 4 of 8 neighbours, by magnitude, Wanda and SparseGPT;
         and on a grid too: SparseGPT's zeros kept by GPTQ. Perplexity and calibration as in benchmarks/quality.py (64 x 512 tokens, 40
         windows). Goals: SparseGPT below Wanda below magnitude; 4 bits with half of the weights (3 bits with a mask of 1) below w3g64.
width    some 21 % fewer parameters: neurons of the feed-forward layers, a group of heads and neurons, channels of the stream (each by
         activation, as Minitron has it, by the weights' norms, at random), or 8 of 30 layers (by block influence, evenly). Perplexity on
         the first `--few` windows right after the cut and after `--steps` steps of 4 x 128 tokens of wikitext2_valid.txt by label + KLD
         (0.5 + 1; lr 3e-4) from a teacher that has read the same text as often. Goals: activation below the two others.

Experts of a mixture: benchmarks/mixtures.py.

Each run is a process of its own; with --cache it leaves a JSON file in DIR and is not repeated. `--one NAME` makes a single run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import DATA, Figure, arguments, report  # noqa: E402
from quality import calibration, scored  # noqa: E402

METHODS, PATTERNS = ("magnitude", "wanda", "sparsegpt"), ("0.5", "2:4", "4:8")
GRIDS = ("sparsegpt 0.5, gptq w4g64", "gptq w3g64")
CUTS: dict[str, dict[str, int]] = {
    "neurons": {"intermediate": 992}, "heads and neurons": {"kv_heads": 2, "intermediate": 1152}, "channels": {"hidden": 448}}
CHOICES = ("activation", "norm", "random")
LAYERS = ("layers by influence", "layers by uniform")
WIDTH_ROWS = 16


def load_model(a: argparse.Namespace, name: str | Path = "") -> tuple[Any, Any]:
    """(model in fp32, tokenizer) of a folder, or of the whole model."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.qat.run import load

    torch.set_num_threads(a.threads)
    folder = Path(name) if name else Path(resolve(a.model))
    return load(folder, torch.float32).eval(), load_tokenizer(folder)


def sparse(a: argparse.Namespace, name: str) -> dict[str, Any]:
    """`METHOD PATTERN`, `gptq GRID`, or one after the other with a comma between."""
    from karui.catalogue import resolve
    from karui.distill.prune.sparse import prune_sparse
    from karui.qat.run import quantize_loaded, read_config

    model, tokenizer = load_model(a)
    rows = calibration(tokenizer, a.samples)
    for part in [] if name == "none" else name.split(", "):
        method, how = part.split()
        if method == "gptq":
            quantize_loaded(model, read_config(Path(resolve(a.model))), method, how, rows)
        else:
            prune_sparse(model, list(rows), float(how) if ":" not in how else how, method)
    linears = [p for n, p in model.named_parameters() if "_proj" in n]
    zeros = sum(int((p == 0).sum()) for p in linears) / sum(p.numel() for p in linears)
    return scored(model, tokenizer, a.windows, 0) | {"zeros": zeros}


def norms(model: Any, head_dim: int) -> dict[str, Any]:
    """What `importance` gives, from the weights alone: the L2 norm of all that goes with a neuron, a head or a channel goes."""
    found: dict[str, Any] = {}
    channels = model.model.embed_tokens.weight.square().sum(0)
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        found[f"{i}.neurons"] = (mlp.gate_proj.weight.square().sum(1) + mlp.up_proj.weight.square().sum(1)
                                 + mlp.down_proj.weight.square().sum(0)).sqrt()
        q, k, v, o = (getattr(attention, f"{n}_proj").weight.square() for n in "qkvo")
        each = len(q) // len(k)
        heads = [x.view(-1, head_dim, x.shape[1]).sum((1, 2)) for x in (q, k, v, o.T)]
        found[f"{i}.heads"] = (heads[0] + heads[3] + (heads[1] + heads[2]).repeat_interleave(each) / each).sqrt()
        channels = channels + sum(x.sum(0) for x in (q, k, v)) + o.sum(1)
        channels = channels + sum(x.weight.square().sum(0) for x in (mlp.gate_proj, mlp.up_proj)) + mlp.down_proj.weight.square().sum(1)
    return {**found, "channels": channels.sqrt()}


def cut(a: argparse.Namespace, model: Any, tokenizer: Any, name: str) -> None:
    """Prune as `name` says, in place."""
    import torch

    from karui.distill.prune.layers import drop_layers
    from karui.distill.prune.width import importance, prune_width

    rows = list(calibration(tokenizer, min(a.samples, WIDTH_ROWS)))
    kind, _, choice = name.partition(" by ")
    if kind == "layers":
        drop_layers(model, 22, rows, choice)
        return
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    scores = None
    if choice == "norm":
        with torch.no_grad():
            scores = norms(model, head_dim)
    elif choice == "random":
        draw = torch.Generator().manual_seed(a.seed)
        scores = {k: torch.rand(v.shape, generator=draw) for k, v in importance(model, rows[:1], head_dim).items()}
    prune_width(model, rows, **CUTS[kind], scores=scores)


def width(a: argparse.Namespace, name: str) -> dict[str, Any]:
    """The loss right after a cut; of `NAME, healed` after training."""
    name, healed = name.removesuffix(", healed"), name.endswith(", healed")
    model, tokenizer = load_model(a)
    if name not in ("whole", "nothing"):
        cut(a, model, tokenizer, name)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if not healed and name != "whole":
        return found | scored(model, tokenizer, a.few, 0)
    with tempfile.TemporaryDirectory() as scratch:
        student = Path(scratch) / "student"
        model.save_pretrained(student)
        tokenizer.save_pretrained(student)
        final = train(a, student, Path(scratch) / "run", teacher=None if name == "whole" else teacher_folder(a))
        if name == "whole":
            shutil.rmtree(teacher_folder(a), ignore_errors=True)
            shutil.copytree(final, teacher_folder(a))
        return found | scored(load_model(a, final)[0], tokenizer, a.few, 0)


def teacher_folder(a: argparse.Namespace) -> Path:
    return Path(a.cache) / f"teacher-{a.steps}"


def train(a: argparse.Namespace, model: Path, output: Path, teacher: Path | None) -> Path:
    """The folder of the trained model: on labels, or on labels and what the teacher says."""
    from karui.configs.recipe import Recipe
    from karui.trainers.run import run_recipe

    text = output.parent / "train.txt"
    words = (DATA / "wikitext2_valid.txt").read_text(encoding="utf-8").split(" ")
    text.write_text(" ".join(words[: 512 * a.steps * 2]), encoding="utf-8")
    objective = {"kind": "sft"} if teacher is None else {"kind": "distil", "label": 0.5, "teacher": str(teacher)}
    done = run_recipe(Recipe.build({
        "name": "heal", "model": str(model), "data": {"train": str(text), "format": "text", "max_length": 128}, "prepare": [],
        "objective": objective,
        "optim": {"lr": 1e-4 if teacher is None else 3e-4, "batch": 4, "steps": a.steps, "micro_tokens": 512, "warmup": 0.1},
        "run": {"output": str(output), "seed": a.seed, "threads": a.threads, "matmul": a.matmul}, "track": {"to": "none"}}))
    assert done.final is not None
    return done.final


PARTS = {"sparse": sparse, "width": width}


def one(a: argparse.Namespace, part: str, name: str) -> dict[str, Any]:
    """A run in a process of its own, or what an earlier one has left in the cache; empty when it failed, with the reason printed."""
    own = {"sparse": ("samples", "windows"),
           "width": ("samples", "few", "seed") + (("steps", "matmul") if "healed" in name or name == "whole" else ())}[part]  # fmt: skip
    key = [part, name, a.model, *(getattr(a, k) for k in own)]
    file = Path(a.cache) / f"{part}-{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.json".replace(" ", "_")
    if file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    options = ("model", "samples", "windows", "few", "steps", "seed", "threads", "matmul", "cache")
    command = [sys.executable, __file__, "--one", f"{part}/{name}", *(f"--{k}={getattr(a, k)}" for k in options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{part}, {name}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}", file=sys.stderr)
        return {}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{part}, {name}: {found}", file=sys.stderr, flush=True)
    file.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


def skipped(a: argparse.Namespace, name: str) -> bool:
    return any(word and word in name for word in a.skip.split(","))


def against(name: str, first: float | None, second: float | None, label: str) -> Figure:
    return Figure(name=name, ours=first, peer=second, peer_name=label, goal=1.0, unit="ppl", better="lower")


def sparse_figures(a: argparse.Namespace) -> list[Figure]:
    names = [f"{m} {p}" for p in (["2:4"] if a.quick else PATTERNS) for m in METHODS] + ([] if a.quick else list(GRIDS))
    names = [n for n in names if not skipped(a, n)]
    runs = {n: one(a, "sparse", n) for n in ["none", *names]}
    found = {n: r.get("perplexity") for n, r in runs.items()}
    figures = [Figure(name="unpruned, perplexity", ours=found["none"], unit="ppl", better="lower")]
    figures += [Figure(name=f"{n}, perplexity", ours=found[n], unit="ppl", better="lower", note=f"{100 * runs[n].get('zeros', 0):.1f} % zeros")
                for n in names]
    for p in PATTERNS:
        for first, second in (("sparsegpt", "wanda"), ("wanda", "magnitude")):
            if {f"{first} {p}", f"{second} {p}"} <= found.keys():
                figures.append(against(f"{first} {p} against {second}", found[f"{first} {p}"], found[f"{second} {p}"], second))
    if set(GRIDS) <= found.keys():
        figures.append(against("half of w4g64's weights against w3g64", found["sparsegpt 0.5, gptq w4g64"], found["gptq w3g64"], "w3g64"))
    return figures


def width_figures(a: argparse.Namespace) -> list[Figure]:
    cuts = [f"{k} by {c}" for k in (["neurons"] if a.quick else CUTS) for c in CHOICES] + ([] if a.quick else list(LAYERS))
    whole = one(a, "width", "nothing")
    figures = [Figure(name="whole model", ours=whole.get("perplexity"), unit="ppl", better="lower")]
    found: dict[str, float | None] = {}
    for stage in ("", ", healed"):
        if stage:
            teacher = one(a, "width", "whole")
            figures.append(Figure(name="whole model, trained as long", ours=teacher.get("perplexity"), unit="ppl", better="lower"))
        for name in cuts:
            if stage and (name.endswith("norm") or name == LAYERS[1]) or skipped(a, name + stage):
                continue
            run = one(a, "width", name + stage)
            found[name + stage] = run.get("perplexity")
            fewer = 1 - run["parameters"] / whole["parameters"] if run and whole else math.nan
            figures.append(Figure(name=f"{name}{stage}", ours=run.get("perplexity"), unit="ppl", better="lower",
                                  note=f"{100 * fewer:.1f} % fewer parameters"))
    for stage in ("", ", healed"):
        for kind in CUTS:
            for other in ("norm", "random"):
                if {f"{kind} by {other}{stage}", f"{kind} by activation{stage}"} <= found.keys():
                    figures.append(against(f"{kind}{stage}: activation against {other}", found[f"{kind} by activation{stage}"],
                                           found[f"{kind} by {other}{stage}"], other))
        if LAYERS[0] + stage in found:
            best = min((v for k in CUTS if (v := found.get(f"{k} by activation{stage}")) is not None), default=None)
            figures.append(against(f"best of width{stage} against depth", best, found[LAYERS[0] + stage], LAYERS[0]))
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="sparse,width")
    parser.add_argument("--skip", default="", help="runs whose names hold one of these are left out")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matmul", default="bf16", choices=("fp32", "bf16x3", "bf16-backward", "bf16"), help="`run.matmul` of what is trained")
    parser.add_argument("--cache", type=Path, help="folder of finished runs, read and added to")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args()
    logging.disable(logging.INFO)
    if a.one:
        part, _, name = a.one.partition("/")
        print(json.dumps(PARTS[part](a, name)))
        return
    if a.quick:
        a.samples, a.windows, a.few, a.steps = 12, 8, 4, 8
    a.cache = a.cache or Path(tempfile.mkdtemp(prefix="karui-pruning-"))
    a.cache.mkdir(parents=True, exist_ok=True)
    wanted = a.only.split(",")
    figures: list[Figure] = []
    for part, make in (("sparse", sparse_figures), ("width", width_figures)):
        if part in wanted:
            figures += make(a)
    report(figures, a.json, samples=a.samples, windows=a.windows, few=a.few, steps=a.steps, seed=a.seed)


if __name__ == "__main__":
    main()
