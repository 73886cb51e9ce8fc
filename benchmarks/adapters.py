"""Adapters: DoRA's step time against LoRA's, LoftQ's error against plain rounding on real weights, and what each kind learns.

    python benchmarks/adapters.py [--quick] [--json OUT] [--only steps,learning] [--work FOLDER] [--seeds 2] [--conditions "a;b"]

steps     the step is forward and backward of SmolLM2-135M over one packed row, adapters of rank 16 on all linears, fp32 and NF4
          bases.
          peft's DoRA is the peer for DoRA itself, on the same rows through the same trainer, only its layers are peft's own.
          Steps take turns in one process.
learning  fine-tuning on `--steps` steps of 2 GSM8K answers (at most 256 tokens each with their questions; about 200 on average), products
          in bf16, warmup of a tenth, then a cosine. Figure: loss per token of held-out answers. Each kind is tried at the rates of
          `LEARNING` with seed 0; the best goes on with `--seeds` seeds, and these are compared. Goals: rsLoRA ends below LoRA at the same
          rate and rank 64, LoRA+ below LoRA at the same rate, PiSSA, OLoRA and EVA below LoRA, DoRA below LoRA at rank 4, LoftQ below
          QLoRA, before training and after. Not in --quick. `--work` keeps finished runs.
"""

from __future__ import annotations

import logging
import statistics
import time
from pathlib import Path
from typing import Any

import runs
import torch
from figures import Figure, arguments, report

from karui.adapters.files import quiet
from karui.adapters.lora import attach, make_start
from karui.configs.quantspec import QuantSpec
from karui.configs.recipe import ModelSection
from karui.configs.steps import LoraStep
from karui.kernels.quantize import quantize
from karui.trainers.data import Sample, collate
from karui.trainers.model import LossSum, install_lean_ops, load_model

RANK = 16


def trainer(step: LoraStep | None) -> LossSum:
    model = load_model(ModelSection(name="smollm2-135m"))
    torch.manual_seed(0)
    if step is not None:
        model = attach(model, step).model
    else:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=32, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
        with quiet():
            model = get_peft_model(model, config)
    install_lean_ops(model)
    return LossSum(model, 1024).train()


def row(tokens: int):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40000, (tokens,), generator=g).int().numpy()
    mask = (torch.arange(tokens) > tokens // 3).numpy()
    return collate([Sample(ids=ids, loss_mask=mask, source_row=0)])


def seconds(loss: LossSum, batch) -> float:
    begin = time.perf_counter()
    loss.of(batch).backward()
    spent = time.perf_counter() - begin
    loss.zero_grad(set_to_none=True)
    return spent


def steps(quick: bool) -> list[Figure]:
    """Step times, and LoftQ's error."""
    repeats, batch = (4, row(512)) if quick else (8, row(1024))
    plain = {"rank": RANK, "alpha": 32.0}
    pairs = {"fp32 base": ("lora", {}), "NF4 base": ("qlora", {"base": "nf4dq"})}
    figures = []
    for name, (method, extra) in pairs.items():
        two = [trainer(LoraStep(method=method, **plain, **extra)), trainer(LoraStep(method=method, dora=True, **plain, **extra))]
        if method == "lora":
            two.append(trainer(None))
        times = [[seconds(t, batch) for t in two] for _ in range(repeats + 1)][1:]
        lora, dora = (statistics.median(t[i] for t in times) for i in range(2))
        figures.append(Figure(name=f"DoRA step over LoRA step, {name}", ours=dora, peer=lora, peer_name="our LoRA", unit="s",
                              goal=1.25, better="lower"))
        if len(two) == 3:
            theirs = statistics.median(t[2] for t in times)
            figures.append(Figure(name="DoRA step, our layers over peft's", ours=dora, peer=theirs, peer_name="peft DoRA", unit="s",
                                  better="lower"))
        del two
    model = load_model(ModelSection(name="smollm2-135m"))
    names = [f"model.layers.{i}.{n}" for i in ((3, 20) if quick else range(0, 30, 5)) for n in ("self_attn.q_proj", "mlp.up_proj")]
    for spec in ("nf4dq", "w4g32"):
        grid = QuantSpec.parse(spec)
        step = LoraStep(method="qlora", base=spec, init="loftq", init_steps=5, **plain)
        ours, rounding, begin = [], [], time.perf_counter()
        for name in names:
            w = model.get_submodule(name).weight.detach()
            start = make_start(step, w, name)
            assert start is not None
            base = quantize(start.base(w), grid).dequantize()
            ours.append(float((w - base - step.scaling * start.b @ start.a).norm() / w.norm()))
            rounding.append(float((w - quantize(w, grid).dequantize()).norm() / w.norm()))
        spent = (time.perf_counter() - begin) / len(names)
        figures.append(Figure(name=f"LoftQ error, 5 steps, {spec}", ours=statistics.mean(ours), peer=statistics.mean(rounding),
                              peer_name="rounding", goal=1.0, better="lower", unit="relative", note=f"{spent:.2f} s a matrix"))
    return figures


LORA = {"method": "lora", "rank": 16, "alpha": 32}
QLORA = {**LORA, "method": "qlora"}
LEARNING: dict[str, tuple[dict[str, Any] | None, tuple[float, ...]]] = {  # a prepare step, and the rates it is tried at
    "LoRA": (LORA, (2e-4, 5e-4, 1e-3, 2e-3)),
    "LoRA+": ({**LORA, "lr_ratio": 16}, (1e-4, 5e-4)),
    "LoRA+ ratio 4": ({**LORA, "lr_ratio": 4}, (5e-4,)),
    "LoRA r64": ({**LORA, "rank": 64, "alpha": 16}, (2e-4, 1e-3)),
    "rsLoRA r64": ({**LORA, "rank": 64, "alpha": 16, "rslora": True}, (2e-4, 1e-3)),
    "PiSSA": ({**LORA, "alpha": 16, "init": "pissa"}, (2e-4, 5e-4, 1e-3)),
    "OLoRA": ({**LORA, "alpha": 16, "init": "olora"}, (5e-4,)),
    "EVA": ({**LORA, "init": "eva"}, (1e-3,)),
    "LoRA r4": ({**LORA, "rank": 4, "alpha": 8}, (1e-3,)),
    "DoRA r4": ({**LORA, "rank": 4, "alpha": 8, "dora": True}, (1e-3,)),
    "whole model": (None, (1e-4,)),
    "QLoRA nf4dq": ({**QLORA, "base": "nf4dq"}, (1e-3,)),
    "LoftQ nf4dq": ({**QLORA, "base": "nf4dq", "init": "loftq"}, (1e-3,)),
    "QLoRA w3g64": ({**QLORA, "base": "w3g64"}, (1e-3,)),
    "LoftQ w3g64": ({**QLORA, "base": "w3g64", "init": "loftq"}, (1e-3,)),
    "QLoRA w2g64": ({**QLORA, "base": "w2g64"}, (1e-3,)),
    "LoftQ w2g64": ({**QLORA, "base": "w2g64", "init": "loftq"}, (1e-3,)),
    "VeRA": ({"method": "vera", "rank": 256}, (1e-2,)),
    "IA3": ({"method": "ia3"}, (1e-2,)),
    "prompt": ({"method": "prompt", "tokens": 20}, (3e-2,)),
    "prefix": ({"method": "prefix", "tokens": 20}, (1e-2,)),
}
BETTER = [("rsLoRA r64", "LoRA r64"), ("LoRA+", "LoRA"), ("LoRA+ ratio 4", "LoRA"), ("PiSSA", "LoRA"), ("OLoRA", "LoRA"), ("EVA", "LoRA"), ("DoRA r4", "LoRA r4"),
          *((f"LoftQ {g}", f"QLoRA {g}") for g in ("nf4dq", "w3g64", "w2g64"))]
EQUAL = [("QLoRA nf4dq", "LoRA"), ("whole model", "LoRA"), ("LoRA r64", "LoRA"), ("LoRA r4", "LoRA")]
SAME_RATE = [("rsLoRA r64", "LoRA r64", 2e-4), ("rsLoRA r64", "LoRA r64", 1e-3), ("LoRA+", "LoRA", 5e-4), ("PiSSA", "LoRA", 2e-4), ("PiSSA", "LoRA", 5e-4),
             ("OLoRA", "LoRA", 5e-4)]


def learning(a: Any) -> list[Figure]:
    """Every kind at its rates, the best with every seed, and their differences."""
    work = runs.folder(a.work)
    data = runs.gsm8k(work, 4 * a.steps, 24)

    def run(name: str, lr: float, seed: int) -> dict[str, Any]:
        step = LEARNING[name][0]
        return runs.trained(work, f"{name} {lr:g}", seed, data=data, prepare=[step] if step else [],
                            optim={"lr": lr, "batch": 2, "steps": a.steps, "micro_tokens": 512, "warmup": 0.1})

    wanted = [n for n in LEARNING if not a.conditions or n in a.conditions]
    swept = {name: {lr: run(name, lr, 0) for lr in LEARNING[name][1]} for name in wanted}
    rates = {name: min(found, key=lambda lr: runs.mean(found[lr]["answers"])) for name, found in swept.items()}
    paired = {n for pair in BETTER + EQUAL for n in pair}
    best = {n: [run(n, rates[n], seed) for seed in range(a.seeds if n in paired else 1)] for n in wanted}
    untrained = {n: runs.start(work, n, data=data, prepare=[LEARNING[n][0]]) for n in wanted if "QLoRA" in n or "LoftQ" in n}
    figures = [runs.level("not trained", [runs.start(work, "base", data=data, prepare=[])])]
    for name, found in best.items():
        tried = ", ".join(f"{lr:g} {runs.mean(r['answers']):.4f}" for lr, r in swept[name].items())
        figures.append(runs.level(name, found, f"rate {rates[name]:g} of {tried}"))
    figures += [runs.level(f"{n}, before its first step", [r]) for n, r in untrained.items()]
    for one, other in BETTER:
        if one in best and other in best:
            if one in untrained:
                figures.append(runs.gap(f"{one} minus {other}, before", [untrained[one]], [untrained[other]], goal=0.0))
            figures.append(runs.gap(f"{one} minus {other}", best[one], best[other], goal=0.0))
    figures += [runs.gap(f"{one} minus {other}", best[one], best[other]) for one, other in EQUAL if one in best and other in best]
    figures += [runs.gap(f"{one} minus {other}, both at {lr:g}", [swept[one][lr]], [swept[other][lr]], goal=0.0)
                for one, other, lr in SAME_RATE if one in swept and other in swept]
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="steps,learning")
    parser.add_argument("--work", type=Path, help="folder for finished runs; what is in it is not repeated")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--conditions", type=lambda s: s.split(";"), help="kinds of `learning`, ;-separated")
    a = parser.parse_args()
    logging.disable(logging.INFO)
    wanted = ["steps"] if a.quick else a.only.split(",")
    figures = steps(a.quick) if "steps" in wanted else []
    figures += learning(a) if "learning" in wanted else []
    report(figures, a.json)


if __name__ == "__main__":
    main()
