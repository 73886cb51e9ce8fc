"""Training on the grid against post-training quantization of SmolLM2-135M, at equal grids, on the same text.

    python benchmarks/qat.py [--quick] [--json OUT] [--work FOLDER] [--only grids,data-free,adapter] [--conditions "a;b"] [--seeds 1]

grids      `--steps` steps of 2 x 192 tokens of wikitext2_valid.txt, the unquantized model's distribution as the target; products in bf16.
           Post-training methods read the same tokens. Scored: 12 windows of 512 tokens of wikitext2_test.txt, and 12 answers of GSM8K
           (text of another kind than what was trained on), in fp32, with the weights that are exported; grids in a8 with activations
           rounded per token, as the engine does it. LSQ, LSQ+, PACT and SEQ as shipped, LSQ also from the paper's start. Goals: LSQ below RTN at
           4 and 3 bits, and the start of least error below the paper's. The first LSQ run at w4g64 also goes through the export and the
           engine: same loss.
data-free  LLM-QAT at w4g64a8, keys and values in 4 bits, on text that the model has written itself, against RTN under the same.
adapter    GSM8K, `--steps` steps of 2 answers: an adapter inside the rounding (`qat_lora`, w4g32) against QLoRA on NF4, merged, then rounded
           to w4g32 by RTN and by GPTQ over the training text. Scored: 24 held-out answers.

Differences are taken window by window (answer by answer); see `runs`. --quick: RTN and LSQ at w3g64, 6 steps. `--work` keeps finished runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import runs  # noqa: E402
from figures import DATA, Figure, arguments, report  # noqa: E402

LENGTH, WINDOW = 192, 512
ROUNDED = {"RTN": "rtn", "GPTQ": "gptq"}
TRAINED: dict[str, tuple[dict[str, Any], float]] = {  # a prepare step and its learning rate
    "LSQ w4g64": ({"method": "lsq", "spec": "w4g64"}, 3e-4),
    "LSQ w3g64": ({"method": "lsq", "spec": "w3g64"}, 3e-4),
    "LSQ w3g64, paper's start": ({"method": "lsq", "spec": "w3g64", "start": "paper"}, 3e-4),
    "LSQ w4g64, paper's start": ({"method": "lsq", "spec": "w4g64", "start": "paper"}, 3e-4),
    "LSQ w2g64": ({"method": "lsq", "spec": "w2g64"}, 3e-4),
    "SEQ w2g64": ({"method": "seq", "spec": "w2g64"}, 3e-4),
    "LSQ w4g64a8": ({"method": "lsq", "spec": "w4g64a8"}, 3e-4),
    "LSQ+ w4g64a8": ({"method": "lsq_plus", "spec": "w4g64a8"}, 3e-4),
    "PACT w4g64a8": ({"method": "pact", "spec": "w4g64a8"}, 3e-4),
}
PAIRS: list[tuple[str, str, float | None]] = [
    ("LSQ w4g64", "RTN w4g64", 0.0), ("LSQ w3g64", "RTN w3g64", 0.0), ("LSQ w2g64", "RTN w2g64", 0.0), ("LSQ w4g64a8", "RTN w4g64a8", 0.0),
    ("LSQ w4g64", "GPTQ w4g64", None), ("LSQ w3g64", "GPTQ w3g64", None), ("LSQ w2g64", "GPTQ w2g64", None),
    ("LSQ w3g64", "LSQ w3g64, paper's start", 0.0), ("LSQ w4g64", "LSQ w4g64, paper's start", 0.0),
    ("SEQ w2g64", "LSQ w2g64", None), ("SEQ w2g64", "LSQ w3g64", None), ("LSQ+ w4g64a8", "LSQ w4g64a8", None),
    ("PACT w4g64a8", "LSQ w4g64a8", None)]  # fmt: skip


def held_out() -> dict[str, list[tuple[list[int], int]]]:
    """{text: [(token ids, first scored one)]}."""
    from karui.catalogue import load_tokenizer, resolve

    tokenizer = load_tokenizer(resolve(runs.MODEL))

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    text = ids((DATA / "wikitext2_test.txt").read_text(encoding="utf-8")[: 12 * WINDOW * 8])
    answers = []
    for line in (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:12]:
        row = json.loads(line)
        question = ids(row["question"] + "\n")
        answers.append((question + ids(row["answer"]), len(question)))
    return {"answers": [(text[i * WINDOW : (i + 1) * WINDOW], 1) for i in range(12)], "gsm8k": answers}


def scored(model: Any, a8: list[str], kv_bits: int | None = None) -> dict[str, runs.Answers]:
    """Losses of a transformers model; `a8`: weights whose inputs are rounded per token."""
    from quality import loss

    from karui.qat.activations import attach
    from karui.qat.llm_qat import quantize_kv

    hooks = attach(model.eval(), dict.fromkeys(a8)) + (quantize_kv(model, kv_bits) if kv_bits else [])
    found = {name: [loss(model, *row) for row in rows] for name, rows in held_out().items()}
    for hook in hooks:
        hook.remove()
    return found


def loaded(folder: Any) -> Any:
    import torch

    from karui.qat.run import load

    return load(Path(folder), torch.float32)


def linears(model: Any) -> list[str]:
    from torch import nn

    return [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]


def kept(work: Path, name: str, mark: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`make()`, or what an earlier call has left."""
    file = work / f"{hashlib.sha256(json.dumps([name, mark], default=str).encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        file.write_text(json.dumps({"name": name, "seed": 0, **make()}), encoding="utf-8")
        print(name, {k: round(runs.mean(v), 4) for k, v in json.loads(file.read_text()).items() if isinstance(v, list)}, flush=True)
    return dict(json.loads(file.read_text(encoding="utf-8")))


def rounded(a: Any, work: Path, text: Path, name: str, spec: str, kv_bits: int | None = None) -> dict[str, Any]:
    """A post-training method over the training text; `none`: the model as it is."""

    def make() -> dict[str, Any]:
        from karui.catalogue import resolve
        from karui.qat.run import quantize_loaded, read_config
        from karui.trainers.quantize import rows_of_text

        folder = Path(resolve(runs.MODEL))
        model = loaded(folder)
        if name != "none":
            quantize_loaded(model, read_config(folder), ROUNDED[name], spec, rows_of_text(folder, text, 2 * a.steps, LENGTH))
        return scored(model, linears(model) if spec.endswith("a8") else [], kv_bits)

    return kept(work, f"{name} {spec}", [a.steps if name == "GPTQ" else 0, kv_bits], make)


def on_grid(a: Any, work: Path, text: Path, name: str, step: dict[str, Any], lr: float, seed: int = 0, kv_bits: int | None = None,
            also: Callable[[Path], dict[str, Any]] | None = None) -> dict[str, Any]:
    """A run that trains on the grid, scored as it is exported."""
    spec = step["spec"]

    def measure(setup: Any, final: Path) -> dict[str, Any]:
        del setup
        model = loaded(final)
        return scored(model, linears(model) if spec.endswith("a8") else [], kv_bits) | (also(final) if also else {})

    data = {"train": str(text), "format": "text", "max_length": LENGTH, "overlong": "split", "train_on": "all", "limit": None}
    return runs.trained(work, name, seed, measure=measure, more=[kv_bits], data=data, prepare=[step], objective={"kind": "distil"},
                        optim={"lr": lr, "batch": 2, "steps": a.steps, "micro_tokens": 384, "warmup": 0.1})


def through_the_engine(final: Path) -> dict[str, Any]:
    """Export a finished run, and the engine's loss on the held-out windows: its own weights, its own products."""
    from karui.inference.engine import Engine
    from karui.trainers.pipeline import export_run

    run = json.loads((final.parent / "recipe.json").read_text(encoding="utf-8"))
    bundle = export_run(final.parent, output=final.parent / "bundle", spec=run["prepare"][0]["spec"], embedding="none")
    engine = Engine.load(bundle.path, max_context=WINDOW)
    texts = held_out()["answers"]
    logprobs = engine.score([ids for ids, _ in texts])
    return {"engine": [(-float(p.double().sum()), len(p)) for p in logprobs], "parity": bundle.manifest.parity}


def figures_of(name: str, found: list[dict[str, Any]], note: str = "") -> list[Figure]:
    """Perplexity and both losses."""
    text = runs.level(f"{name}, wikitext", found, note)
    perplexity = math.exp(text.ours or 0.0)
    seen = [Figure(name=f"{name}, perplexity", ours=perplexity, unit="ppl", better="lower", note=text.note), text]
    return [*seen, runs.level(f"{name}, GSM8K", [{**r, "answers": r["gsm8k"]} for r in found])]


def text_file(work: Path, tokens: int) -> Path:
    """At least so many tokens of the training text."""
    path = work / f"wikitext-{tokens}.txt"
    path.write_text((DATA / "wikitext2_valid.txt").read_text(encoding="utf-8")[: tokens * 6], encoding="utf-8")
    return path


def grids(a: Any, work: Path) -> list[Figure]:
    """Every method on its grid, and their differences."""
    text = text_file(work, 2 * a.steps * LENGTH)
    wanted = [n for n in TRAINED if not a.conditions or n in a.conditions]
    specs = dict.fromkeys(TRAINED[n][0]["spec"] for n in wanted)
    plain = [f"{m} {s}" for s in specs for m in ROUNDED if not a.quick or m == "RTN"]
    found = {"unquantized": [rounded(a, work, text, "none", "none")]}
    found |= {n: [rounded(a, work, text, *n.split(" "))] for n in plain}
    for name in wanted:
        step, lr = TRAINED[name]
        also = through_the_engine if name == "LSQ w4g64" else None
        found[name] = [on_grid(a, work, text, name, step, a.lr or lr, seed, also=also if seed == 0 else None) for seed in range(a.seeds)]
    figures = []
    for name, results in found.items():
        figures += figures_of(name, results, f"rate {a.lr or TRAINED[name][1]:g}" if name in TRAINED else "")
        if "engine" in results[0]:
            same = runs.mean(results[0]["engine"]) - runs.mean(results[0]["answers"])
            figures.append(Figure(name=f"{name}, the engine's loss less that", ours=abs(same), unit="nats", better="lower", goal=1e-3))
    for one, other, goal in PAIRS:
        if one in found and other in found:
            pair = found[one], found[other]
            figures.append(runs.gap(f"{one} minus {other}, wikitext", *pair, goal=goal))
            figures.append(runs.gap(f"{one} minus {other}, GSM8K", *([{**r, "answers": r["gsm8k"]} for r in side] for side in pair)))
    return figures


def data_free(a: Any, work: Path) -> list[Figure]:
    """LLM-QAT against rounding."""
    text, spec, bits = text_file(work, 2 * a.steps * LENGTH), "w4g64a8", 4
    step = {"method": "llm_qat", "spec": spec, "kv_bits": bits, "generate": 2 * a.steps, "length": LENGTH}
    rtn, own = rounded(a, work, text, "RTN", spec, bits), on_grid(a, work, text, "LLM-QAT", step, a.lr or 3e-4, kv_bits=bits)
    figures = figures_of(f"RTN {spec}, {bits}-bit cache", [rtn]) + figures_of(f"LLM-QAT {spec}, {bits}-bit cache", [own])
    for key, label in (("answers", "wikitext"), ("gsm8k", "GSM8K")):
        figures.append(runs.gap(f"LLM-QAT minus RTN, {label}", [{**own, "answers": own[key]}], [{**rtn, "answers": rtn[key]}], goal=0.0))
    return figures


def adapter(a: Any, work: Path) -> list[Figure]:
    """An adapter inside the rounding, and one whose merge is rounded afterwards, both as they are exported."""
    data = runs.gsm8k(work, 4 * a.steps, 24)
    sections = {"data": data, "optim": {"lr": a.lr or 1e-3, "batch": 2, "steps": a.steps, "micro_tokens": 512, "warmup": 0.1}}
    shape = {"rank": 16, "alpha": 32}

    def inside(setup: Any, final: Path) -> dict[str, Any]:
        before = kept(work, "w4g32 before", ["RTN"], lambda: rounded_to(None, setup, "rtn", "w4g32"))
        return {"answers": answers(loaded(final), setup.held_out), "rtn": before["answers"]}

    def after(setup: Any, final: Path) -> dict[str, Any]:
        found = {f"{m} w4g32": rounded_to(final, setup, m, "w4g32")["answers"] for m in ROUNDED.values()}
        return runs.losses(setup) | found

    qlora = runs.trained(work, "qlora", 0, prepare=[{"method": "qlora", **shape}], measure=after, **sections)
    figures = []
    for name, step in (("an adapter inside the rounding", {"learn_steps": False}), ("the same, steps train too", {"learn_steps": True})):
        run = runs.trained(work, f"qat_lora {name[:3]}", 0, prepare=[{"method": "qat_lora", "spec": "w4g32", **shape, **step}], measure=inside, **sections)
        figures.append((name, run))
    other = {f"QLoRA, then {label}": {**qlora, "answers": qlora[f"{m} w4g32"]} for label, m in ROUNDED.items()}
    out = [runs.level("not trained, rounded to w4g32", [{**figures[0][1], "answers": figures[0][1]["rtn"]}]),
           runs.level("QLoRA on NF4, not exported", [qlora])]
    out += [runs.level(n, [r]) for n, r in [*figures, *other.items()]]
    return out + [runs.gap(f"{n} minus {o}", [r], [q], goal=0.0 if "RTN" in o else None) for n, r in figures for o, q in other.items()]


def answers(model: Any, samples: Any) -> runs.Answers:
    """The loss of each sample's supervised tokens."""
    import torch

    found = []
    for i in range(len(samples)):
        ids, mask = torch.tensor(samples[i].ids).long(), torch.tensor(samples[i].loss_mask)[1:]
        with torch.inference_mode():
            logits = model.eval()(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[mask]
        found.append((float(losses.double().sum()), len(losses)))
    return found


def rounded_to(final: Path | None, setup: Any, method: str, spec: str) -> dict[str, Any]:
    """The base with the adapter in `final` merged into it, as it was trained, then rounded; calibrated on the training samples."""
    from karui.catalogue import resolve
    from karui.qat.run import quantize_loaded, read_config
    from karui.trainers.calibrated import Calibration, rows_of
    from karui.trainers.parity import merged_model

    folder = Path(resolve(runs.MODEL))
    base = setup.recipe.prepare[0].base if final else None
    model: Any = merged_model(folder, None, adapter=final, base_spec=base, batches=True) if final else loaded(folder)
    rows = rows_of(setup.samples, Calibration(method=method, samples=32, length=LENGTH))
    quantize_loaded(model, read_config(folder), method, spec, rows)
    return {"answers": answers(model, setup.held_out)}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="grids,data-free,adapter")
    parser.add_argument("--work", type=Path, help="folder for finished runs; what is in it is not repeated")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, help="of all runs; default: each one's own")
    parser.add_argument("--conditions", type=lambda s: s.split(";"), help="trained kinds of `grids`, ;-separated")
    a = parser.parse_args()
    logging.disable(logging.INFO)
    if a.quick:
        a.only, a.steps, a.conditions = "grids", 6, ["LSQ w3g64"]
    work, figures = runs.folder(a.work), []
    parts = {"grids": grids, "data-free": data_free, "adapter": adapter}
    for part in a.only.split(","):
        figures += parts[part](a, work)
    report(figures, a.json)


if __name__ == "__main__":
    main()
