"""Distillation: what a teacher adds to labels in a fixed budget, how fast rollouts are, what a draft brings.

    python benchmarks/distill.py [--quick] [--json OUT] [--plot OUT.png] [--only student,on-policy,rollouts,draft,reshape] [--bundle DRAFTED]

student   SmolLM2-135M with 15 of its 30 layers (`--choice`), healed on `--steps` steps of 4 x 128 tokens of wikitext2_valid.txt; figure: mean
          loss of the labels on the first `--words` words of wikitext2_test.txt. Products in bf16. The teacher is SmolLM2-135M itself after
          as many steps on the same text ("teacher correction", Minitron: what it says of text of another kind than its own teaches the
          student less than the text does); `--as-it-is` leaves that out. Same steps, order of data and learning rate for labels alone, KLD
          alone, label + KLD (0.5 + 1), label + KLD + hidden states at the kept layers (1 + 1 + 10 (1 - cos)), KLD from the teacher's 50
          likeliest tokens and a tail (cached), the same with labels, and KLD from 50 tokens drawn from the teacher (cached; unbiased);
          `--seeds` orders of the data. A difference counts when it is larger than twice the standard error of the paired differences
          over seeds.
on-policy the same student on `--steps` steps of 4 GSM8K answers, text that the teacher is surer of: KLD on the data's answers; KLD from 50
          tokens and a tail; KLD for half of the steps, then reverse KLD on its own answers (64 tokens); that in two thirds of the steps.
          Figures: reverse KL to the teacher, nats a token, on text that each student draws itself for 32 test questions, which is what
          it meets when it is used; and the labels' loss.
rollouts  tokens/s of the student's own text, sampled at temperature 1, top_p 1: the engine as `objective: on-policy` drives it,
          weights pushed before every batch and `--steps-at-once` steps written together, against the call in TRL's GKDTrainer on one
          step's padded batch (KARUI_PEERS), with its defaults and with gradient checkpointing off, without which it keeps no KV
          cache; median of `--rounds`.
draft     tokens/s, tokens per verification and per step, and identity of the text with each draft in `--bundle` (a bundle made by
          `karui train draft-eagle3` or `draft-medusa`), against plain decoding of the same bundle, in turn, greedy, GSM8K test questions.
reshape   SmolLM2-135M with another attention or feed-forward layer (`prepare:` steps of docs/architecture.md), healed on `--steps` steps of
          256 tokens by label + KLD (0.5 + 1) from a teacher that has had as many steps on the same text; learning rate 1e-4, the
          teacher's, or 6e-4 (`--lr`) for what starts more than two nats above the model. Figures: parameters, KV bytes a token (fp16;
          with windows those of a text of 8,192 tokens, per token), mean loss of the labels on the held-out text right after the change
          and after healing. Goals: heads merged by their mean end below those of which the first stays (arXiv 2305.13245, figure 4); a
          mixture of whole copies starts at the dense model's loss.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import DATA, Figure, arguments, peer_python, report  # noqa: E402
from runs import folder as work_folder  # noqa: E402

CONDITIONS: dict[str, dict[str, Any]] = {
    "labels": {"kind": "sft"},
    "kld": {"kind": "distil"},
    "label+kld": {"kind": "distil", "label": 0.5},
    "label+kld+features": {"kind": "distil", "label": 1.0, "features": [{"loss": "cosine", "layers": "kept", "weight": 10.0}]},
    "kld top-50": {"kind": "distil", "rows": "topk", "k": 50, "cache": "auto"},
    "label+kld top-50": {"kind": "distil", "label": 0.5, "rows": "topk", "k": 50, "cache": "auto"},
    "kld sampled-50": {"kind": "distil", "rows": "sampled", "k": 50, "cache": "auto"},
}
PAIRS = [("kld", "labels"), ("label+kld", "labels"), ("label+kld+features", "labels"), ("kld", "label+kld"), ("kld top-50", "kld"),
         ("label+kld top-50", "label+kld"), ("kld sampled-50", "kld")]
OWN_TEXT = {"kind": "on-policy", "divergence": "reverse_kl", "parameter": None, "off_policy_first": 0.5, "max_new_tokens": 64,
            "unfinished": "keep", "max_drift": 5.0}


def student(a: Any) -> tuple[list[Figure], dict[str, Any]]:
    """Every condition with every seed; returns figures and the curves."""
    work = work_folder(a.work)
    data = _wikitext(a, work, 128)
    teacher = {} if a.as_it_is else {"teacher": str(work / "teacher" / "final")}
    figures = [] if a.as_it_is else [_corrected(a, work / "teacher", data)]
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(a.seeds):
        for name in [n for n in CONDITIONS if not a.conditions or n in a.conditions]:
            objective = CONDITIONS[name] | (teacher if CONDITIONS[name]["kind"] == "distil" else {})
            runs.setdefault(name, []).append(_healed(a, work, name, seed, objective, data, a.steps))
    losses = {name: [r["eval_loss"] for r in done] for name, done in runs.items()}
    curves = {name: done[0]["curve"] for name, done in runs.items()}
    before = next(iter(runs.values()))[0]["before"]
    figures.append(Figure(name="held-out loss, pruned and not healed", ours=before, unit="nats"))
    figures += [_mean(f"held-out loss, {name}", values) for name, values in losses.items()]
    for one, other in PAIRS:
        if one in losses and other in losses:
            figures.append(_gap(f"{one} minus {other}", losses[one], losses[other], goal=0.0 if other == "labels" else None))
    return figures, {"losses": losses, "curves": curves}


def _wikitext(a: Any, work: Path, length: int) -> dict[str, Any]:
    """A recipe's `data:`; enough text for `--steps` steps of 512 tokens, and `--words` held-out words."""
    for name, source, words in (("train", "wikitext2_valid.txt", 512 * a.steps * 2), ("eval", "wikitext2_test.txt", a.words)):
        text = " ".join((DATA / source).read_text(encoding="utf-8").split(" ")[:words])
        if not (work / f"{name}.txt").is_file() or (work / f"{name}.txt").read_text(encoding="utf-8") != text:
            (work / f"{name}.txt").write_text(text, encoding="utf-8")
    return {"train": str(work / "train.txt"), "eval": str(work / "eval.txt"), "format": "text", "max_length": length}


def _corrected(a: Any, folder: Path, data: dict[str, Any], batch: int = 4) -> Figure:
    """Fine-tune the teacher on the students' text, in `folder`/final, unless it is there."""
    from karui.configs.recipe import Recipe
    from karui.trainers.run import run_recipe

    recipe = Recipe.build({
        "name": "teacher", "model": "smollm2-135m", "data": data, "prepare": [],
        "optim": {"lr": 1e-4, "batch": batch, "steps": a.steps, "micro_tokens": 512, "warmup": 0.1},
        "run": {"output": str(folder), "seed": a.seeds, "threads": a.threads, "matmul": a.matmul}, "track": {"to": "none"}})
    known = folder / "loss.json"
    if not known.is_file():
        metrics = run_recipe(recipe).metrics
        known.write_text(json.dumps([metrics["eval_loss_before"], metrics["eval_loss"]]))
    before, after = json.loads(known.read_text())
    return Figure(name="held-out loss, teacher", ours=after, unit="nats", better="lower", note=f"{before:.4f} before it read the students' text")


def _mean(name: str, values: list[float]) -> Figure:
    note = f"seeds: {', '.join(f'{v:.4f}' for v in values)}"
    return Figure(name=name, ours=statistics.fmean(values), unit="nats", better="lower", note=note)


def _gap(name: str, these: list[float], those: list[float], goal: float | None) -> Figure:
    """The mean difference over seeds, and whether it is beyond their noise."""
    gaps = [x - y for x, y in zip(these, those)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    mean = statistics.fmean(gaps)
    verdict = "one seed: no verdict" if len(gaps) < 2 else "separable" if abs(mean) > 2 * error else "not separable"
    return Figure(name=name, ours=mean, unit="nats", better="lower", goal=goal, note=f"standard error {error:.4f} over {len(gaps)} seeds: {verdict}")


def on_policy(a: Any) -> list[Figure]:
    """Off-policy, also from 50 tokens and a tail, half of it on-policy, and that in fewer updates; every seed."""
    work = work_folder(a.work)
    for name, source, rows in (("train", "gsm8k_train.jsonl", 4 * a.steps), ("eval", "gsm8k_test.jsonl", 48)):
        lines = (DATA / source).read_text(encoding="utf-8").splitlines()[:rows]
        (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = {"train": str(work / "train.jsonl"), "eval": str(work / "eval.jsonl"), "prompt": "question", "completion": "answer", "max_length": 256}
    off, fewer = f"kld, {a.steps} updates", a.steps * 2 // 3
    conditions: dict[str, tuple[dict[str, Any], int]] = {
        off: ({"kind": "distil"}, a.steps),
        f"kld top-50, {a.steps} updates": ({"kind": "distil", "rows": "topk", "k": 50, "cache": "auto"}, a.steps),
        f"half on-policy, {a.steps} updates": (OWN_TEXT, a.steps),
        f"half on-policy, {fewer} updates": (OWN_TEXT, fewer)}
    runs = {name: [_healed(a, work, name, seed, objective, data, steps, own_text=True) for seed in range(a.seeds)]
            for name, (objective, steps) in conditions.items()}
    figures = []
    for key, label in (("own_text", "reverse KL on its own text"), ("eval_loss", "held-out loss")):
        found = {name: [r[key] for r in done] for name, done in runs.items()}
        figures += [_mean(f"{label}, {name}", values) for name, values in found.items()]
        figures += [_gap(f"{label}, {name} minus {off}", values, found[off], goal=0.0 if key == "own_text" and "on-policy" in name else None)
                    for name, values in found.items() if name != off]
    return figures


def _questions(start: int, count: int) -> list[str]:
    """Of GSM8K's test rows."""
    return [json.loads(line)["question"] for line in (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[start : start + count]]


def _prompts(tokenizer: Any, questions: list[str]) -> list[Any]:
    """The token ids of each question as a chat's first turn."""
    import numpy as np

    chats = [[{"role": "user", "content": q}] for q in questions]
    return [np.array(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"]) for c in chats]


def _own_text_kl(folder: Path, questions: int = 32, tokens: int = 64) -> float:
    """Mean over positions of KL(student || teacher), full distributions, on what the student in `folder` draws for test questions."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.configs.quantspec import QuantSpec
    from karui.configs.recipe import ModelSection
    from karui.trainers.model import load_model
    from karui.trainers.objectives.engine_sampler import EngineSampler

    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    student: Any = load_model(ModelSection(name=str(folder))).eval()
    teacher: Any = load_model(ModelSection(name="smollm2-135m")).eval()
    prompts = _prompts(tokenizer, _questions(100, questions))
    sampler = EngineSampler(student, spec=QuantSpec.parse("none"), end=[tokenizer.eos_token_id], max_context=512)
    drawn = sampler.generate(prompts, list(range(questions)), [tokens] * questions)
    total, count = 0.0, 0
    for prompt, own in zip(prompts, drawn):
        ids = torch.tensor([[*prompt, *own.tokens]])
        with torch.inference_mode():
            ours, theirs = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (student, teacher))
        total += float((ours.exp() * (ours - theirs)).sum(-1).double().sum())
        count += len(ours)
    return total / count


def _healed(a: Any, work: Path, name: str, seed: int, objective: dict[str, Any], data: dict[str, Any], steps: int,
            own_text: bool = False, prepare: list[dict[str, Any]] | None = None, batch: int = 4,
            lr: float | None = None, curve: bool = True) -> dict[str, Any]:
    """One run, or what is known of it: results are kept by everything that defines them."""
    from karui.configs.recipe import Recipe
    from karui.trainers.loop import read_log
    from karui.trainers.run import run_recipe

    recipe = Recipe.build({
        "name": "bench", "model": "smollm2-135m",
        "data": data,
        "prepare": [{"method": "prune-layers", "keep_layers": 15, "choice": a.choice, "samples": 8}] if prepare is None else prepare,
        "objective": objective,
        "optim": {"lr": lr or a.lr, "batch": batch, "steps": steps, "micro_tokens": 512, "warmup": 0.1},
        "run": {"output": str(work / f"{name}-{seed}".replace(" ", "_")), "seed": seed, "threads": a.threads, "matmul": a.matmul,
                "eval_every": max(1, steps // 4) if seed == 0 and curve else None},
        "track": {"to": "none"}})
    identity = {k: v for k, v in recipe.dump().items() if k not in ("run", "track")}
    digest = hashlib.sha256(json.dumps([identity, seed, a.matmul], sort_keys=True, default=str).encode()).hexdigest()[:16]
    kept = work / f"{digest}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    before = resource.getrusage(resource.RUSAGE_SELF)
    done = run_recipe(recipe)
    after = resource.getrusage(resource.RUSAGE_SELF)
    result = {"name": name, "seed": seed, "eval_loss": done.metrics["eval_loss"], "before": done.metrics["eval_loss_before"],
              "tokens": done.metrics["tokens"], "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
              "curve": [(r["step"], r["eval_loss"]) for r in read_log(done.folder) if "eval_loss" in r]}
    if own_text:
        assert done.final is not None, "an interrupted run has no student"
        result["own_text"] = _own_text_kl(done.final)
    for big in done.folder.rglob("*.safetensors"):
        big.unlink()
    kept.write_text(json.dumps(result), encoding="utf-8")
    print(f"{name}, seed {seed}: {result['eval_loss']:.4f} after {result['tokens']} tokens, {result['cpu_s']:.0f} s of processor time", flush=True)
    return result


CHANGES: dict[str, list[dict[str, Any]]] = {
    "unchanged": [],
    "MQA, mean": [{"method": "merge-kv-heads", "kv_heads": 1}],
    "MQA, first": [{"method": "merge-kv-heads", "kv_heads": 1, "pooling": "first"}],
    "MLA, rank 128": [{"method": "mla", "rank": 128, "samples": 32}],
    "MLA, rank 64": [{"method": "mla", "rank": 64, "samples": 32}],
    "window 64, 1 of 4 global": [{"method": "sliding-window", "window": 64, "every": 4}],
    "4 experts, 2 a token": [{"method": "upcycle-moe", "experts": 4, "top_k": 2}],
    "8 thin experts, 6 a token": [{"method": "upcycle-moe", "experts": 8, "top_k": 6, "split": 8}],
}

VIOLENT = ("MQA, mean", "MQA, first", "8 thin experts, 6 a token")  # start more than two nats above the model


def reshape(a: Any) -> list[Figure]:
    """Every change: what it saves, and the loss before and after healing."""
    from transformers import AutoConfig

    from karui.catalogue import resolve
    from karui.configs.recipe import Recipe
    from karui.distill.reshape import size_of
    from karui.trainers.stages import planned

    work = work_folder(a.work)
    data = _wikitext(a, work, 256)
    figures = [_corrected(a, work / "teacher-256", data, batch=1)]
    objective = {"kind": "distil", "label": 0.5, "teacher": str(work / "teacher-256" / "final")}
    before: dict[str, float] = {}
    after: dict[str, list[float]] = {}
    for name, steps in CHANGES.items():
        if a.conditions and name not in a.conditions:
            continue
        rate = a.lr if name in VIOLENT else 1e-4
        done = [_healed(a, work, name, seed, objective, data, a.steps, prepare=steps, batch=1, lr=rate, curve=False)
                for seed in range(a.seeds)]
        recipe = Recipe.build({"model": "smollm2-135m", "data": data, "prepare": steps})
        size = size_of(planned(recipe, AutoConfig.from_pretrained(resolve("smollm2-135m")))[0])
        note = f"{size.parameters / 1e6:.1f} M parameters" + (f", {size.active / 1e6:.1f} M a token" if size.active < size.parameters else "")
        before[name], after[name] = done[0]["before"], [r["eval_loss"] for r in done]
        figures += [Figure(name=f"KV cache, {name}", ours=size.kv_bytes(8192) / 8192, unit="bytes/token", better="lower", note=note),
                    Figure(name=f"held-out loss, {name}, not healed", ours=before[name], unit="nats", better="lower"),
                    _mean(f"held-out loss, {name}", after[name])]
    if {"MQA, mean", "MQA, first"} <= after.keys():
        figures.append(_gap("MQA, mean minus first", after["MQA, mean"], after["MQA, first"], goal=0.0))
    if "4 experts, 2 a token" in after:
        figures.append(Figure(name="mixture's start against the dense model", ours=_mixture_gap(work / "eval.txt"), unit="nats", better="lower",
                              goal=1e-5, note="in fp32; above, products are rounded as --matmul says, those of experts are not"))
    return figures


def _mixture_gap(text: Path, tokens: int = 1024) -> float:
    """How far the losses of the dense model and of its mixture are apart on the text's first tokens, in fp32."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.configs.recipe import ModelSection
    from karui.distill.reshape import upcycle
    from karui.trainers.model import load_model

    dense: Any = load_model(ModelSection(name="smollm2-135m")).eval()
    ids = torch.tensor([load_tokenizer(resolve("smollm2-135m"))(text.read_text(encoding="utf-8"))["input_ids"][:tokens]])
    with torch.inference_mode():
        losses = [float(m(ids, labels=ids).loss) for m in (dense, upcycle.convert(dense, 4, 2))]
    return abs(losses[0] - losses[1])


def rollouts(a: Any) -> list[Figure]:
    """Ours, then TRL's."""
    import torch

    from karui.catalogue import load_tokenizer, resolve
    from karui.configs.quantspec import QuantSpec
    from karui.configs.recipe import ModelSection
    from karui.trainers.model import load_model
    from karui.trainers.objectives.engine_sampler import EngineSampler

    folder = resolve("smollm2-135m")
    tokenizer = load_tokenizer(folder)
    questions = _questions(0, a.batch)
    prompts = _prompts(tokenizer, questions)
    torch.set_num_threads(a.threads)
    model: Any = load_model(ModelSection(name="smollm2-135m")).eval()
    samplers = {spec: EngineSampler(model, spec=QuantSpec.parse(spec), end=[-1], max_context=512) for spec in a.engines.split(",")}
    rates: dict[str, list[float]] = {spec: [] for spec in samplers}
    ours = prompts * a.steps_at_once
    for turn in range(a.rounds):
        for name, sampler in samplers.items():
            begin = time.perf_counter()
            sampler.push(model, turn)
            pushed = time.perf_counter() - begin
            drawn = sampler.generate(ours, [turn * 1000 + i for i in range(len(ours))], [a.new_tokens] * len(ours))
            assert all(len(d.tokens) == a.new_tokens for d in drawn)
            rates[name].append(len(ours) * a.new_tokens / (time.perf_counter() - begin))
            print(f"{name}: weights pushed in {pushed:.2f} s of {time.perf_counter() - begin:.2f} s", flush=True)
        print({k: round(v[-1], 1) for k, v in rates.items()}, flush=True)
    peers = {f"TRL GKDTrainer, batch {len(questions)}{', KV cache' if cache else ' (its defaults)'}": _trl(a, folder, questions, cache)
             for cache in (True, False)}
    note = f"{len(ours)} at once, {a.new_tokens} new tokens each, weights pushed before each batch"
    return [Figure(name=f"rollouts, {spec} weights in the engine", ours=statistics.median(rates[spec]), peer=peer, peer_name=label, goal=5.0,
                   unit="tokens/s", note=f"{note}; peer: {label}" + ("" if peer else ", not installed"))
            for label, peer in peers.items() for spec in samplers]


def _trl(a: Any, folder: Path, questions: list[str], cache: bool) -> float | None:
    """Median tokens/s of TRL's own rollouts, None without its environment."""
    python = peer_python("trl")
    if python is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        asked, out = Path(scratch) / "questions.json", Path(scratch) / "out.json"
        asked.write_text(json.dumps(questions))
        script = str(Path(__file__).parent / "peers" / "trl_gkd_rollouts.py")
        subprocess.run([str(python), script, str(folder), str(asked), str(out), "--batch", str(len(questions)), "--new-tokens",
                        str(a.new_tokens), "--rounds", str(a.rounds if cache else 1), "--threads", str(a.threads),
                        *(["--cache"] if cache else [])], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return statistics.median(json.loads(out.read_text())["tokens_per_s"])


TITLES = {"eagle3": "EAGLE-3", "medusa": "Medusa"}


def draft(a: Any) -> list[Figure]:
    """Plain decoding and each of the bundle's drafts, in turn."""
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams
    from karui.inference.speculative.config import SpeculationConfig
    from karui.inference.speculative.factory import FILES

    methods = [m for m in TITLES if a.bundle is not None and (a.bundle / FILES[m]).is_file() and a.method in (None, m)]
    if not methods:
        which = TITLES.get(a.method, "a draft")
        return [Figure(name=f"{which} against plain decoding", ours=None, unit="tokens/s",
                       note=f"no --bundle with {which}: karui train draft-{a.method or 'eagle3'} makes one")]
    configs = {"eagle3": SpeculationConfig(method="eagle3", k=a.depth, width=a.width, nodes=a.nodes or 3, least=a.least, adaptive=False),
               "medusa": SpeculationConfig(method="medusa", k=a.nodes or 3, adaptive=False)}
    engines = {"plain": Engine.load(a.bundle, max_context=512, max_sequences=1)}
    engines |= {m: Engine.load(a.bundle, max_context=512, max_sequences=1, speculation=configs[m]) for m in methods}
    questions = _questions(0, a.questions)
    seconds: dict[str, float] = dict.fromkeys(engines, 0.0)
    tokens, same = 0, dict.fromkeys(methods, True)
    for question in questions:
        texts = {}
        for name, engine in engines.items():
            ids = engine.encode_chat([{"role": "user", "content": question}])
            begin = time.perf_counter()
            out = engine.generate([Request(prompt=ids, params=SamplingParams(max_tokens=a.new_tokens))])[0]
            seconds[name] += time.perf_counter() - begin - (out.ttft_s or 0.0)
            texts[name] = out.token_ids
        same = {m: same[m] and texts[m] == texts["plain"] for m in methods}
        tokens += len(texts["plain"]) - 1
    figures = []
    for m in methods:
        found, title = engines[m].speculation.statistics, TITLES[m]  # type: ignore[union-attr]
        steps = engines[m].stats.num_steps - len(questions)  # a prompt is one step
        shape = f"depth {a.depth}, width {a.width}, {configs[m].nodes} nodes" if m == "eagle3" else f"{configs[m].length(native=True)} nodes"
        note = f"{shape}; greedy text {'identical' if same[m] else 'DIFFERENT'} on {len(questions)} questions; by depth {found.by_depth} of {found.drafts}"
        asked = m == "eagle3"
        figures += [
            Figure(name=f"{title} tokens per verification", ours=found.tokens_per_step, goal=2.0 if asked else None, unit="tokens", note=note),
            Figure(name=f"{title} tokens per step, plain ones too", ours=tokens / steps, unit="tokens"),
            Figure(name=f"{title} decode", ours=tokens / seconds[m], peer=tokens / seconds["plain"], peer_name="plain decode, same bundle",
                   goal=1.3 if asked else None, unit="tokens/s"),
            Figure(name=f"{title} greedy text identical", ours=float(same[m]), goal=1.0, unit="1 = yes")]
    return figures


def plot(curves: dict[str, list[tuple[int, float]]], losses: dict[str, list[float]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, points in curves.items():
        left.plot(*zip(*points), marker="o", label=name)
    left.set(xlabel="step", ylabel="held-out loss (nats)", title="seed 0")
    left.legend()
    for at, (_name, values) in enumerate(losses.items()):
        right.plot([at] * len(values), values, "o")
    right.set_xticks(range(len(losses)), list(losses), rotation=20, ha="right")
    right.set(ylabel="held-out loss at the end", title="every seed")
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="write curves and end losses here")
    parser.add_argument("--only", help="default: all but reshape, of which --quick leaves on-policy out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--words", type=int, default=6000, help="of held-out text")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--matmul", default="bf16", choices=("fp32", "bf16x3", "bf16-backward", "bf16"), help="`run.matmul`, of student and teacher")
    parser.add_argument("--as-it-is", action="store_true", help="the teacher has not read the students' text")
    parser.add_argument("--conditions", type=lambda s: s.split(";"), help="only these, ;-separated")
    parser.add_argument("--choice", default="influence", help="which layers the student keeps, as prune-layers spells it")
    parser.add_argument("--work", type=Path, help="folder for finished runs; what is in it is not repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="prompts of a step; 8 is TRL's default micro-batch, which it generates in")
    parser.add_argument("--steps-at-once", type=int, default=4, help="steps the engine writes for at once (objective.staleness + 1)")
    parser.add_argument("--engines", default="none,w8,w4g32", help="grids of the sampler")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--bundle", type=Path, help="a bundle with an EAGLE-3 draft or Medusa heads")
    parser.add_argument("--method", choices=tuple(TITLES), help="only this one of the bundle's drafts")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--least", type=float, help="accepted tokens that a draft must promise; default: the engine's")
    parser.add_argument("--nodes", type=int, help="drafted tokens that are verified; default 3")
    a = parser.parse_args()
    logging.disable(logging.INFO)
    if a.quick:
        a.seeds, a.steps, a.rounds, a.questions, a.new_tokens = 1, 8, 1, 4, 48
        a.conditions = a.conditions or ["labels", "kld", "label+kld"]
    figures: list[Figure] = []
    extra: dict[str, Any] = {}
    wanted = (a.only or ("student,rollouts,draft" if a.quick else "student,on-policy,rollouts,draft")).split(",")
    if "student" in wanted:
        found, extra = student(a)
        figures += found
        if a.plot:
            plot(extra["curves"], extra["losses"], a.plot)
    if "on-policy" in wanted:
        figures += on_policy(a)
    if "rollouts" in wanted:
        figures += rollouts(a)
    if "draft" in wanted:
        figures += draft(a)
    if "reshape" in wanted:
        figures += reshape(a)
    report(figures, a.json, **extra)


if __name__ == "__main__":
    main()
