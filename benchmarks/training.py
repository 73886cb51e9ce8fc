"""Fine-tuning speed, peak memory and loss curve against TRL's SFTTrainer: same model, samples, order, initial adapter, threads.

    KARUI_PEERS=/path/to/venvs python benchmarks/training.py [--quick] [--json OUT] [--data gsm8k_train.jsonl]

LoRA rank 16 on all linears of SmolLM2-135M in fp32, GSM8K as chat, 4 samples a step, linear schedule. Each side runs in a
process of its own, in turn; TRL tokenizes, and karui trains on exactly those tokens, masks and initial A matrices, once with fp32
products and once with `run.matmul: bf16x3` (`--matmul`). Without the peer karui's own figures are still measured,
on its own tokens.

Also says where the time goes: operations of the step, and their rate as a share of this machine's measured matrix product rate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import DATA, Figure, arguments, peer_python, report

HERE = Path(__file__).resolve().parent
MODEL, BATCH = "smollm2-135m", 4


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, default=DATA / "gsm8k_train.jsonl", help="GSM8K rows with question and answer")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 12, quick 4)")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="karui's tokens in one forward pass")
    parser.add_argument("--matmul", default="fp32,bf16x3", help="karui's `run.matmul`, one run for each")
    parser.add_argument("--worker", type=Path, help="internal: train in this folder and write result.json")
    args = parser.parse_args()
    steps = args.steps or (4 if args.quick else 12)
    if args.worker:
        worker(args.worker, steps, args.micro_tokens, args.matmul)
        return
    if not args.data.is_file():
        sys.exit(f"{args.data} is missing; give GSM8K's training rows with --data.")
    from karui.catalogue import resolve

    model, python = resolve(MODEL), peer_python("trl")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()[: steps * BATCH]]
        (folder / "rows.json").write_text(json.dumps([
            {"prompt": [{"role": "user", "content": r["question"]}],
             "completion": [{"role": "assistant", "content": r["answer"]}]} for r in rows]))
        peers: dict[str, dict[str, Any]] = {}
        if python is not None:
            for name, flags in (("TRL", []), ("TRL, gradient checkpointing (its default)", ["--gradient-checkpointing"])):
                out = folder / f"peer{len(peers)}"
                run([str(python), str(HERE / "peers" / "trl_sft_speed.py"), str(model), str(folder / "rows.json"), str(out),
                     "--steps", str(steps), "--batch", str(BATCH), *flags])
                peers[name] = json.loads((out / "result.json").read_text())
        ours: dict[str, dict[str, Any]] = {}
        for matmul in args.matmul.split(","):
            run([sys.executable, __file__, "--worker", str(folder), "--steps", str(steps), "--micro-tokens", str(args.micro_tokens),
                 "--matmul", matmul])
            ours[matmul] = json.loads((folder / "result.json").read_text())
    rows = [figure for matmul, result in ours.items() for figure in figures(matmul, result, peers)]
    report(rows, args.json, ours=ours, peers=peers, steps=steps, batch=BATCH)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "WANDB_MODE": "disabled"})
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr[-3000:]}")


def figures(matmul: str, ours: dict[str, Any], peers: dict[str, dict[str, Any]]) -> list[Figure]:
    """Speed against each of the peer's modes, memory against each, and the largest difference of the losses."""
    rows = []
    for name, peer in peers.items() or {"TRL": None}.items():
        rate = peer["tokens"] / peer["seconds"] if peer else None
        rows.append(Figure(name=f"{matmul}, {name}"[:44], ours=ours["tokens_per_s"], peer=rate, peer_name="trl",
                           goal=2.5 if matmul == "fp32" else 3.0, unit="tokens/s"))
        for what, held, goal in (("peak memory", 0.0, 0.5), ("the same above the weights", ours["weight_bytes"], 1 / 3)):
            rows.append(Figure(name=what, ours=(ours["peak_memory_bytes"] - held) / 1e9,
                               peer=(peer["peak_memory_bytes"] - held) / 1e9 if peer else None, peer_name="trl", goal=goal,
                               better="lower", unit="GB", note="whole process: libraries, weights, activations"))
        gap = max(abs(a - b) for a, b in zip(ours["losses"], peer["losses"])) if peer else None
        rows.append(Figure(name="largest difference of a step's loss", ours=gap, goal=1e-3, better="lower", unit="nats",
                           note="" if peer else "peer not installed"))
    rows.append(Figure(name="operations per token", ours=ours["gflop_per_token"], unit="GFLOP"))
    rows.append(Figure(name="rate while training", ours=ours["gflop_per_token"] * ours["tokens_per_s"], unit="GFLOP/s"))
    rows.append(Figure(name="matrix products alone, this machine", ours=ours["gemm_gflop_per_s"], unit="GFLOP/s",
                       note="fp32 [1024, 576] x [576, 1536], best of 20"))
    rows.append(Figure(name="share of that rate", ours=ours["gflop_per_token"] * ours["tokens_per_s"] / ours["gemm_gflop_per_s"],
                       unit=""))
    return rows


def worker(folder: Path, steps: int, micro_tokens: int, matmul: str) -> None:
    """Train with karui in this process and write result.json."""
    import numpy as np
    import torch

    from karui.adapters.files import adapter_values, load_values
    from karui.configs.recipe import Recipe
    from karui.trainers.data import Sample, SampleSet
    from karui.trainers.loop import read_log
    from karui.trainers.run import prepare, run_recipe

    rows = [json.loads(r) for r in (folder / "rows.json").read_text().splitlines()][0]
    plain = folder / "rows.jsonl"
    plain.write_text("".join(json.dumps({"messages": r["prompt"] + r["completion"]}) + "\n" for r in rows))
    recipe = Recipe.build({
        "name": "speed", "model": MODEL, "data": {"train": str(plain), "max_length": 512, "shuffle": False},
        "prepare": [{"method": "lora", "rank": 16, "alpha": 32}],
        "optim": {"lr": 2e-4, "schedule": "linear", "warmup": 0, "clip": 1.0, "batch": BATCH, "steps": steps,
                  "micro_tokens": micro_tokens},
        "objective": {"chunk_tokens": 256}, "run": {"output": str(folder / "run"), "matmul": matmul}, "track": {"to": "none"},
    })
    setup = prepare(recipe)
    if (folder / "peer0").is_dir():
        stored = json.loads((folder / "peer0" / "samples.json").read_text())
        setup.samples = SampleSet.of([Sample(ids=np.array(s["ids"], np.int32), loss_mask=np.array(s["mask"], bool), source_row=i)
                                      for i, s in enumerate(stored)])
        load_values(setup.model, adapter_values(folder / "peer0" / "init"), "init")
    result = run_recipe(recipe, setup=setup)
    log = [r for r in read_log(folder / "run") if "loss" in r]
    tokens = sum(r["tokens"] for r in log)
    x, w = torch.randn(1024, 576), torch.randn(1536, 576)
    best = 1e9
    for _ in range(20):
        begin = time.perf_counter()
        x @ w.T
        best = min(best, time.perf_counter() - begin)
    (folder / "result.json").write_text(json.dumps({
        "tokens": tokens, "tokens_per_s": result.metrics["tokens_per_s"], "losses": [r["loss"] for r in log],
        "peak_memory_bytes": result.metrics["peak_memory_bytes"], "gemm_gflop_per_s": 2 * x.numel() * w.shape[0] / best / 1e9,
        "weight_bytes": sum(p.numel() * p.element_size() for p in setup.model.parameters() if not p.requires_grad),
        "gflop_per_token": operations(setup.model, log) / tokens / 1e9, "threads": torch.get_num_threads(),
    }))


def operations(model: Any, log: list[dict[str, Any]]) -> float:
    """Multiply-adds x 2 that the steps need: frozen linears forward and input gradient, adapters both and their own gradient,
    the head forward and input gradient at supervised positions. Attention scores, norms and the first layer's unneeded input
    gradient are left out."""
    tokens, supervised = sum(r["tokens"] for r in log), sum(r["supervised_tokens"] for r in log)
    frozen = adapters = 0
    for module in model.modules():
        if hasattr(module, "lora_A"):
            frozen += module.in_features * module.out_features
            adapters += sum(p.numel() for p in module.parameters() if p.requires_grad)
    head = model.get_base_model().get_output_embeddings().weight.numel()
    return tokens * (4 * frozen + 6 * adapters) + supervised * 4 * head


if __name__ == "__main__":
    main()
