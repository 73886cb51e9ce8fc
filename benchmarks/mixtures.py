"""A mixture of experts made of SmolLM2-135M: what balances it while it trains, and which experts can go.

    python benchmarks/mixtures.py [--quick] [--json OUT] [--only balance,prune] [--work DIR] [--kinds whole,corrected,half] [--seeds 1]

balance  upcycled (`upcycle-moe`) into 4 copies of the feed-forward layer, 2 a token (whole; corrected: with routers that have a
         correction bias), or into 8 halves of copies, 2 a token (half), and trained whole for `--steps` steps of `--batch` x 256
         tokens of wikitext2_valid.txt (lr 3e-4), each way of `moe: balance`. Figures on the first `--words` words of
         wikitext2_test.txt: the load of the busiest expert of a layer over the mean of the layer (mean over layers), the worst of any
         layer, the share of experts that less than a quarter of the mean goes to, and the loss of the labels with the difference's
         standard error. Goal: a balanced load's distance from even is at most half of the unbalanced one's.
prune    half of the experts of the trained mixture (`--from`: KIND:BALANCE) go, by score, by count (the least used), at random, as
         a recipe: prune-experts on 8 samples of text it has not read, `--heal` steps on that, export to 4 bits with its parity gate; the
         bundle runs in the engine. Figures: the held-out loss right after and healed. Goals: score below random, right after.

With --work DIR finished runs are kept and not repeated.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import DATA, Figure, arguments, report  # noqa: E402
from runs import folder, gap, level, losses, mean, trained  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"method": "upcycle-moe", "experts": 4, "top_k": 2},
    "corrected": {"method": "upcycle-moe", "experts": 4, "top_k": 2, "correction": True},
    "half": {"method": "upcycle-moe", "experts": 8, "top_k": 2, "split": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "none": {}, "switch": {"balance": "switch"}, "switch 0.1": {"balance": "switch", "weight": 0.1},
    "sequence": {"balance": "sequence", "weight": 0.01}, "bias": {"balance": "bias", "speed": 0.003}}
TRIED = {"whole": ("none", "switch", "sequence"), "corrected": ("none", "bias"), "half": ("none", "switch 0.1")}
CHOICES = ("score", "random", "count")


def wikitext(a: Any, work: Path, healing: bool = False) -> dict[str, Any]:
    """A recipe's `data:` with text for all steps, to heal by the text behind that, and `--words` held-out words."""
    first, second = 256 * a.batch * a.steps, 256 * a.batch * max(a.heal, 8)
    for name, source, start, words in (("train", "wikitext2_valid.txt", 0, first), ("heal", "wikitext2_valid.txt", first, second),
                                       ("eval", "wikitext2_test.txt", 0, a.words)):  # fmt: skip
        text = " ".join((DATA / source).read_text(encoding="utf-8").split(" ")[start : start + words])
        if not (work / f"{name}-{words}.txt").is_file():
            (work / f"{name}-{words}.txt").write_text(text, encoding="utf-8")
    train = f"heal-{second}" if healing else f"train-{first}"
    return {"train": str(work / f"{train}.txt"), "eval": str(work / f"eval-{a.words}.txt"), "format": "text", "max_length": 256,
            "overlong": "split"}


def run(a: Any, work: Path, kind: str, way: str, seed: int) -> dict[str, Any]:
    """One mixture, trained; its folder is kept for `prune`."""
    from karui.distill.prune.experts import router_use

    def measure(setup: Any, final: Path) -> dict[str, Any]:
        import torch

        if seed == 0:
            shutil.rmtree(mixture(work, kind, way), ignore_errors=True)
            shutil.copytree(final, mixture(work, kind, way))
        setup.model.eval()
        rows = [torch.from_numpy(sample.ids.astype("int64")) for sample in setup.held_out]
        loads = [count.tolist() for _, count in router_use(setup.model, rows).values()]
        return {**losses(setup), "loads": loads}

    return trained(work, f"{kind} {way}", seed, matmul=a.matmul, threads=a.threads, measure=measure, more=["loads"],
                   data=wikitext(a, work), prepare=[KINDS[kind]], moe=WAYS[way],
                   optim={"lr": 3e-4, "batch": a.batch, "steps": a.steps, "micro_tokens": 512, "warmup": 0.1})


def mixture(work: Path, kind: str, way: str) -> Path:
    return work / f"mixture-{kind}-{way}".replace(" ", "_")


def load_figures(found: dict[str, Any]) -> dict[str, float]:
    """Of the held-out text."""
    relative = [[n * len(layer) / sum(layer) for n in layer] for layer in found["loads"]]
    busiest = [max(layer) for layer in relative]
    every = [n for layer in relative for n in layer]
    return {"busiest": sum(busiest) / len(busiest), "worst": max(busiest), "idle": sum(n < 0.25 for n in every) / len(every)}


def balance(a: Any, work: Path) -> list[Figure]:
    figures = []
    for kind in a.kinds.split(","):
        runs = {way: [run(a, work, kind, way, seed) for seed in range(a.seeds)] for way in a.ways.split(",") if way in TRIED[kind]}
        loads = {way: load_figures(done[0]) for way, done in runs.items()}
        for way, found in loads.items():
            note = f"worst layer {found['worst']:.2f}; {100 * found['idle']:.0f} % of the experts get less than a quarter of the mean"
            figures.append(Figure(name=f"{kind}, {way}: busiest expert over the mean", ours=found["busiest"], unit="x", better="lower", note=note))
            if way != "none" and "none" in loads:
                figures.append(Figure(name=f"{kind}, {way}: its distance from even", ours=found["busiest"] - 1, peer=loads["none"]["busiest"] - 1,
                                      peer_name="not balanced", goal=0.5, unit="x", better="lower"))
        figures += [level(f"{kind}, {way}: held-out loss", done) for way, done in runs.items()]
        figures += [gap(f"{kind}, {way} minus none", done, runs["none"]) for way, done in runs.items() if way != "none" and "none" in runs]
    return figures


def pruned(a: Any, work: Path, choice: str) -> dict[str, Any]:
    """One recipe: prune, heal, export; and the bundle in the engine."""
    from karui.configs.manifest import Manifest
    from karui.configs.recipe import Recipe
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams
    from karui.trainers.pipeline import run_pipeline

    kind, way = a.source.split(":")
    kept = work / f"pruned-{kind}-{way}-{choice}-{a.steps}-{a.heal}-{a.batch}-{a.words}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    have = KINDS[kind]["experts"]
    done = run_pipeline(Recipe.build({
        "name": "pruned", "model": str(mixture(work, kind, way)), "data": wikitext(a, work, healing=True),
        "prepare": [{"method": "prune-experts", "keep_experts": have // 2, "by": choice, "samples": 8}],
        "moe": WAYS[way], "optim": {"lr": 1e-4, "batch": a.batch, "steps": a.heal, "micro_tokens": 512, "warmup": 0.1},
        "run": {"output": str(work / f"run-pruned-{choice}"), "threads": a.threads, "matmul": a.matmul}, "track": {"to": "none"},
        "export": [{"spec": "w4g32"}], "eval": {"speed": False}}))
    (bundle,) = done.bundles
    parity = Manifest.read(bundle).parity
    engine = Engine.load(bundle, max_context=256, max_sequences=1)
    out = engine.generate([Request(prompt=engine.encode("The history of the city begins"), params=SamplingParams(max_tokens=24))])[0]
    metrics = done.run.metrics
    found = {"before": metrics["eval_loss_before"], "after": metrics["eval_loss"], "parity": parity["max_abs_dlogprob"],
             "bound": parity["bound"], "runner": type(engine.runner).__name__, "text": out.text, "experts": have // 2}
    for big in done.run.folder.rglob("*.safetensors"):
        big.unlink()
    kept.write_text(json.dumps(found), encoding="utf-8")
    print(f"pruned by {choice}: {found}", flush=True)
    return found


def before_pruning(a: Any, work: Path, kind: str, way: str) -> tuple[float, float]:
    """Of the mixture with all its experts: its loss on the same text, and how far its down projections are from the mean of their
    layer's, as a share of their norm (copies: 0)."""
    from karui.configs.recipe import Recipe
    from karui.distill.prune.experts import mixtures
    from karui.trainers.run import prepare

    setup = prepare(Recipe.build({"model": str(mixture(work, kind, way)), "data": wikitext(a, work), "track": {"to": "none"}}))
    down = [block.experts.down_proj.detach().flatten(1) for _, block in mixtures(setup.model)]
    return mean(losses(setup)["answers"]), sum(float((d - d.mean(0)).norm() / d.norm()) for d in down) / len(down)


def prune(a: Any, work: Path) -> list[Figure]:
    kind, way = a.source.split(":")
    if not (mixture(work, kind, way) / "config.json").is_file():
        run(a, work, kind, way, 0)
    found = {choice: pruned(a, work, choice) for choice in CHOICES}
    loss, apart = before_pruning(a, work, kind, way)
    figures = [Figure(name=f"{kind}, {way}: all experts", ours=loss, unit="nats", better="lower",
                      note=f"experts are {100 * apart:.1f} % of their norm apart")]
    for stage, label in (("before", "half of them, right after"), ("after", f"half of them, {a.heal} steps later")):
        for choice, result in found.items():
            note = f"bundle: parity {result['parity']:.1e} of {result['bound']:.0e}, {result['runner']}" if stage == "after" else ""
            figures.append(Figure(name=f"{label}, by {choice}", ours=result[stage], unit="nats", better="lower", note=note))
    figures.append(Figure(name="score against random, right after", ours=found["score"]["before"], peer=found["random"]["before"],
                          peer_name="random", goal=1.0, unit="nats", better="lower"))
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="balance,prune")
    parser.add_argument("--work", type=Path, help="folder for finished runs; what is in it is not repeated")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ways", default=",".join(WAYS), help="those of them that are tried on a kind")
    parser.add_argument("--from", dest="source", default="whole:switch", help="the mixture whose experts go")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--heal", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matmul", default="bf16", choices=("fp32", "bf16x3", "bf16-backward", "bf16"))
    a = parser.parse_args()
    logging.disable(logging.INFO)
    if a.quick:
        a.steps, a.heal, a.words, a.kinds, a.ways = 8, 4, 1000, "whole", "none,switch"
    work = folder(a.work)
    figures = []
    for part, make in (("balance", balance), ("prune", prune)):
        if part in a.only.split(","):
            figures += make(a, work)
    report(figures, a.json, steps=a.steps, heal=a.heal, batch=a.batch, words=a.words)


if __name__ == "__main__":
    main()
