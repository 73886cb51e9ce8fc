"""Every way to speculate, on a task that its drafts were trained for and on one that repeats its prompt.

    python benchmarks/speculation.py [--quick] [--json OUT] [--bundle DRAFTED ...] [--draft-model PATH] [--only ngram,lookahead,...]
                                     [--questions 8] [--new-tokens 96] [--rounds 3] [--threads 2] [--clock wall|processor] [--shapes]

The first `--bundle` is the model (none: SmolLM2-135M on w4g32, rounded to nearest, int8 head); EAGLE-3's layer and Medusa's heads are
taken from the first bundle of the same weights that has them (`karui train draft-eagle3`, `draft-medusa`). `--draft-model` is a small model
with the same tokens. Tasks: GSM8K test questions through the chat template, and the editing task of benchmarks/runtime.py, both greedy.

Decoding alone is timed, from a request's first tokens to its last. In every round all methods answer a prompt one after the other; a prompt
counts with the quickest round, the first round is not counted (the cost model learns what rows cost). The peer is plain decoding of the
same engine. A text that differs from plain decoding's ends the run with an error. `--clock processor` counts the process's own time, for a
machine that others use too; it needs `--threads 1`. `--shapes` adds lookahead in several shapes that never rests: rows and tokens a step.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from distill import _questions  # noqa: E402
from figures import Figure, arguments, report  # noqa: E402
from runtime import EDITING, MODEL  # noqa: E402

SHAPES = ("lookahead:3,2,2", "lookahead:4,3,3", "lookahead:5,7,7")
GOALS = {("maths", "medusa"): 1.3, ("maths", "eagle3"): 1.3, ("editing", "ngram"): 1.8}
NEVER_SLOWER = 0.97
"""Goal of what has none of its own: what does not pay rests."""


@dataclass
class Run:
    """One method on one task: its engine's counts, and seconds of each prompt's rounds."""

    seconds: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    same: bool = True
    drafts: int = 0
    emitted: int = 0
    by_depth: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        return self.tokens / sum(min(rounds) for rounds in self.seconds)


def spellings(a: Any) -> dict[str, Any]:
    """Method -> (bundle, configuration)."""
    from karui.inference.speculative.config import SpeculationConfig
    from karui.inference.speculative.factory import FILES

    wanted = {"ngram": SpeculationConfig(method="ngram", k=8), "lookahead": SpeculationConfig.parse("lookahead")}
    if a.draft_model:
        wanted["draft"] = SpeculationConfig(method="draft", path=str(a.draft_model), k=a.draft_tokens)
    wanted |= {"medusa": SpeculationConfig(method="medusa", k=a.medusa_nodes), "eagle3": SpeculationConfig(method="eagle3", k=3)}
    if a.shapes:
        wanted |= {f"{s}, always": replace(SpeculationConfig.parse(s), adaptive=False) for s in SHAPES}
    found: dict[str, Any] = {"plain": (a.bundle[0], None)}
    for name, config in wanted.items():
        if a.only and name.partition(":")[0].partition(",")[0] not in a.only.split(","):
            continue
        holds = [b for b in a.bundle if name not in FILES or (b / FILES[name]).is_file()]
        if holds:
            found[name] = (holds[0], config)
    return found


def measure(a: Any, engines: dict[str, Any], prompts: list[list[int]], new_tokens: int) -> dict[str, Run]:
    """All methods on all prompts, in turn."""
    from karui.inference.requests import Request, SamplingParams

    clock = time.process_time if a.clock == "processor" else time.perf_counter
    runs = {name: Run() for name in engines}
    for turn in range(a.rounds + 1):
        for at, prompt in enumerate(prompts):
            texts = {}
            for name, engine in engines.items():
                run, arrivals = runs[name], []
                before = _counts(engine)
                request = Request(prompt=prompt, params=SamplingParams(max_tokens=new_tokens),
                                  on_delta=lambda delta, seen=arrivals: seen.append(clock()))  # fmt: skip
                texts[name] = engine.generate([request])[0].token_ids
                run.same &= texts[name] == texts["plain"]
                if not turn:
                    run.seconds.append([])
                    continue
                run.seconds[at].append(arrivals[-1] - arrivals[0])
                if turn == 1:
                    run.tokens += len(texts[name]) - 1
                after = _counts(engine)
                run.steps += after[0] - before[0] - 1  # a prompt is one step
                run.drafts += after[1] - before[1]
                run.emitted += after[2] - before[2]
                depth = max(len(run.by_depth), len(after[3]))
                old = before[3] + (0,) * (len(after[3]) - len(before[3]))
                gained = tuple(x - y for x, y in zip(after[3], old))
                run.by_depth = tuple(sum(p) for p in zip(*(x + (0,) * (depth - len(x)) for x in (run.by_depth, gained))))
    return runs


def _counts(engine: Any) -> tuple[int, int, int, tuple[int, ...]]:
    """Steps, verifications, tokens they emitted, and how many accepted a token at each depth."""
    if engine.speculation is None:
        return engine.stats.num_steps, 0, 0, ()
    s = engine.speculation.statistics
    return engine.stats.num_steps, s.drafts, s.emitted, tuple(s.by_depth)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--bundle", type=Path, action="append", default=[])
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--draft-tokens", type=int, default=3, help="drafted by the draft model")
    parser.add_argument("--medusa-nodes", type=int, default=3)
    parser.add_argument("--only", help="methods, ,-separated")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--shapes", action="store_true")
    a = parser.parse_args()
    if a.clock == "processor" and a.threads != 1:
        parser.error("--clock processor needs --threads 1: threads that wait for one another take processor time, too")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.threads])
    if a.quick:
        a.questions, a.new_tokens, a.rounds = 3, 64, 1

    from karui.catalogue import resolve
    from karui.inference.bundle import open_model
    from karui.inference.bundle.export import export_model
    from karui.inference.engine import Engine
    from karui.inference.speculative.target import TargetIdentity

    with tempfile.TemporaryDirectory() as scratch:
        if not a.bundle:
            a.bundle = [Path(scratch) / "bundle"]
            export_model(resolve(MODEL), "w4g32", a.bundle[0], embedding_spec="w8")
        weights = {TargetIdentity.of(open_model(b), None).weights for b in a.bundle}
        if len(weights) > 1:
            raise SystemExit(f"the bundles hold different weights: {', '.join(map(str, a.bundle))}")
        made = spellings(a)
        engines = {name: Engine.load(bundle, max_context=1024, max_sequences=1, memory="64MiB", speculation=config)
                   for name, (bundle, config) in made.items()}  # fmt: skip
        encode = engines["plain"].encode_chat
        tasks = {"maths": ([encode([{"role": "user", "content": q}]) for q in _questions(0, a.questions)], a.new_tokens),
                 "editing": ([encode([{"role": "user", "content": EDITING}])], 2 * a.new_tokens)}  # fmt: skip
        figures, wrong = [], []
        for task, (prompts, new_tokens) in tasks.items():
            runs = measure(a, engines, prompts, new_tokens)
            plain = runs.pop("plain")
            for name, run in runs.items():
                always = name.endswith(", always")
                shares = ", ".join(f"{n / run.drafts:.2f}" for n in run.by_depth) if run.drafts else "none drafted"
                per_step, per_draft = run.tokens * a.rounds / run.steps, run.emitted / max(1, run.drafts)
                note = (f"{per_step:.2f} tokens a step, {per_draft:.2f} a verification, {run.drafts} of {run.steps} steps verify; "
                        f"accepted at least 1, 2, ..: {shares}; text {'identical' if run.same else 'DIFFERENT'}")
                if always:
                    speculation: Any = engines[name].speculation
                    note += f"; {len(speculation._probe.parents)} rows of window beside the guesses"
                goal = None if always else GOALS.get((task, name), NEVER_SLOWER)
                figures.append(Figure(name=f"{task}: {name}", ours=run.rate, peer=plain.rate, peer_name="plain decoding", goal=goal,
                                      unit="tokens/s", note=note))  # fmt: skip
                if not run.same:
                    wrong.append(f"{name} on {task}")
        absent = [m for m in ("draft", "medusa", "eagle3") if m not in made and (not a.only or m in a.only.split(","))]
        figures += [Figure(name=m, ours=None, unit="tokens/s", note="not given: see --bundle and --draft-model") for m in absent]
    report(figures, a.json, threads=a.threads, clock=a.clock, rounds=a.rounds)
    if wrong:
        raise SystemExit(f"other tokens than plain decoding's: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
