"""Low-precision pretraining: the held-out loss of every recipe against fp32, and what each NVFP4 ingredient is worth.

    python benchmarks/lowprec.py [--quick] [--json OUT] [--plot OUT.png] [--steps N] [--width N]

A byte-level llama on WikiText-2's validation text (KARUI_DATA), the last tenth held out; the same initial weights and batches for
every recipe; the mean of the held-out loss over the last quarter of training. All blocks train in low precision, so that four
blocks show what sixty hide. One fp32 run with other batches says how large a gap chance alone makes: an ingredient whose removal
changes the loss by less is reported as not separable. The default is 6.4 M parameters and 2,000 steps.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from figures import DATA, Figure, arguments, report

from karui.lowprec import LayerPolicy, LowPrecision, Precision

RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4")
GOALS = {"fp8-current": 1.003, "fp8-blockwise": 1.003, "mxfp8": 1.003, "nvfp4": 1.015}
WITHOUT = {
    "stochastic rounding": {"stochastic": False},
    "Hadamard transform": {"hadamard": False},
    "16x16 weight tiles": {"square_weights": False},
}
EVERYWHERE = LayerPolicy(first_blocks=0, last_blocks=0)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="write the loss curves here")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--data", type=Path, default=DATA / "wikitext2_valid.txt")
    options = parser.parse_args()
    if not options.data.exists():
        sys.exit(f"{options.data} is not there; name a text file with --data, or its folder with KARUI_DATA")
    steps = options.steps or (120 if options.quick else 2000)
    shape = dict(width=options.width or (96 if options.quick else 256), blocks=4 if options.quick else 8)
    batch, length = (4, 128) if options.quick else (16, 256)
    text = torch.frombuffer(bytearray(options.data.read_bytes()), dtype=torch.uint8).long()
    cut = len(text) * 9 // 10
    job = dict(train=text[:cut], held=text[cut:], steps=steps, batch=batch, length=length, **shape)

    curves = {"fp32": run(None, **job), "bf16": run("bf16", **job), "fp32, other batches": run(None, order=1, **job)}
    for recipe in RECIPES:
        curves[recipe] = run(Precision(recipe=recipe, policy=EVERYWHERE), **job)
    for name, change in WITHOUT.items():
        curves[f"nvfp4 without {name}"] = run(Precision(recipe="nvfp4", policy=EVERYWHERE, **change), **job)
    late = steps * 3 // 4
    schedule = ({"step": late, "gemm": "fprop", "to": "high"},)
    curves["nvfp4, fprop high for the last quarter"] = run(
        Precision.parse({"recipe": "nvfp4", "policy": EVERYWHERE, "schedule": schedule}), **job
    )

    final = {name: sum(v for s, v in curve if s > late) / sum(s > late for s, _ in curve) for name, curve in curves.items()}
    base, chance = final["fp32"], abs(final["fp32, other batches"] - final["fp32"])
    figures = []
    for name, loss in final.items():
        if name == "fp32":
            continue
        note = f"gap {100 * (loss / base - 1):+.2f} %"
        if name.startswith("nvfp4 without"):
            worse = loss - final["nvfp4"]
            note += f"; {worse:+.4f} against nvfp4, " + (
                "separable" if abs(worse) > chance else f"chance alone makes {chance:.4f}"
            )
        figures.append(Figure(name=name, ours=loss, unit="nats/byte", peer=base, peer_name="fp32", goal=GOALS.get(name),
                              better="lower", note=note))  # fmt: skip
    report(f"held-out loss after {steps} steps, {shape['blocks']} blocks of width {shape['width']}", figures, options.json)
    if options.plot:
        plot(curves, options.plot)


def run(precision: Any, *, train: torch.Tensor, held: torch.Tensor, steps: int, batch: int, length: int, width: int, blocks: int,
        order: int = 0) -> list[tuple[int, float]]:  # fmt: skip
    """Train one model; (step, held-out loss in nats per byte) at about 24 points."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=blocks,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=length,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * (96 / width) ** 0.5, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, optimizer.param_groups[0]["lr"], total_steps=steps + 1, pct_start=0.1
    )
    if isinstance(precision, Precision):
        low = LowPrecision(precision)
        low.prepare(model)
        low.attach(optimizer)
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    generator = torch.Generator().manual_seed(order)
    fixed = torch.randint(len(held) - length - 1, (16,), generator=torch.Generator().manual_seed(99))
    curve, began = [], time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(train) - length - 1, (batch,), generator=generator)
        optimizer.zero_grad()
        with cast:
            loss = _loss(model, train, starts, length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 24) == 0 or step == steps:
            model.eval()
            with torch.no_grad(), cast:
                curve.append((step, float(_loss(model, held, fixed, length))))
            model.train()
    name = precision.identity() if isinstance(precision, Precision) else precision or "fp32"
    print(f"{curve[-1][1]:.4f} after {time.perf_counter() - began:.0f} s  {name}", file=sys.stderr, flush=True)
    return curve


def _loss(model: torch.nn.Module, text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def plot(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    base = dict(curves["fp32"])
    for name, curve in curves.items():
        steps, losses = zip(*curve)
        left.plot(steps, losses, label=name, linewidth=1)
        right.plot(steps, [100 * (v / base[s] - 1) for s, v in curve], label=name, linewidth=1)
    left.set(xlabel="step", ylabel="held-out loss, nats per byte")
    right.set(xlabel="step", ylabel="gap to fp32, %")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
