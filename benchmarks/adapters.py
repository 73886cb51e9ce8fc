"""Adapters: DoRA's step time against LoRA's, interleaved in one process; LoftQ's error against plain rounding on real weights.

    python benchmarks/adapters.py [--quick] [--json OUT]

The step is forward and backward of SmolLM2-135M over one packed row, adapters of rank 16 on all linears, fp32 and NF4 bases.
peft's DoRA is the peer for DoRA itself, on the same rows through the same trainer, only its layers are peft's own.
"""

from __future__ import annotations

import statistics
import time

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


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    repeats, batch = (4, row(512)) if given.quick else (8, row(1024))
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
    names = [f"model.layers.{i}.{n}" for i in ((3, 20) if given.quick else range(0, 30, 5)) for n in ("self_attn.q_proj", "mlp.up_proj")]
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
    report(figures, given.json)


if __name__ == "__main__":
    main()
