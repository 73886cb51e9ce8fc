"""Sparse attention (DSA, arXiv 2512.02556) given to a real model: what long texts lose by attending to a few keys, and by whose choice.

    python benchmarks/sparse_attention.py [--quick] [--json OUT] [--work FOLDER]

SmolLM2-135M gets latent attention with half of its KV cache and is healed on texts of `--length` tokens of wikitext2_valid.txt (label 0.5 +
KLD from the model it was); then an indexer, which `--warm` steps of dense warm-up train alone; then `--sparse` steps train both, every token
attending to `--top` keys. Beside it the healed model trained densely on the same `--sparse` steps. A step is one text.

Figures on `--windows` texts of wikitext2_test.txt, tokens beyond the first `--top` of each: the mean loss with every choice of keys, and the
share of the attention's mass (summed over heads) that lies on the chosen keys, out of what the best `--top` keys hold ("recall"), mean over
layers. Choices: the indexer as trained; as it began (the attention's own heads, or drawn); the most recent keys; the keys with the most mass.
Goals: the trained indexer loses at most a quarter of what the window of as many keys loses, and of what the drawn indexer does; the sparse
model ends within 0.05 nats of the dense one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch  # noqa: E402
from figures import DATA, Figure, arguments, report  # noqa: E402
from runs import folder as work_folder  # noqa: E402

Choice = Callable[..., list[torch.Tensor | None]]


def stage(a: Any, work: Path, name: str, model: str, **sections: Any) -> str:
    """The final folder of a run; a finished one is not repeated."""
    from karui.configs.recipe import Recipe
    from karui.trainers.run import run_recipe

    recipe = Recipe.build({
        "name": "bench", "model": model, "data": data(a, work), **sections, "track": {"to": "none"},
        "run": {"output": str(work / f"{name}-{digest(model, sections, a.length, a.seed, a.matmul)}"), "seed": a.seed, "threads": a.threads,
                "matmul": a.matmul}})
    final = recipe.output / "final"
    if not final.is_dir():
        metrics = run_recipe(recipe).metrics
        print(f"{name}: {metrics['tokens']} tokens in {metrics['seconds']:.0f} s, loss {metrics['loss']:.4f}", flush=True)
    return str(final)


def digest(*identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]


def began(a: Any, work: Path, model: str) -> str:
    """The folder of a model with an indexer that nothing has trained, its heads the attention's."""
    from karui.catalogue import load_tokenizer
    from karui.distill.reshape import sparse

    folder = work / f"began-{digest(model, a.top, a.heads, a.width, a.samples, a.length)}"
    if not folder.is_dir():
        tokenizer = load_tokenizer(Path(model))
        ids = torch.tensor(tokenizer(DATA.joinpath("wikitext2_valid.txt").read_text(encoding="utf-8")[:100_000])["input_ids"])
        made: Any = sparse.convert(load(model), a.top, a.heads, a.width, rows=list(ids[: a.samples * a.length].split(a.length)))
        save(made, tokenizer, folder)
    return str(folder)


def drawn(a: Any, work: Path, copied: str) -> str:
    """The same, its indexers drawn as transformers draws them."""
    from karui.catalogue import load_tokenizer
    from karui.trainers.sparse import indexers

    folder = work / f"drawn-{digest(copied, a.seed)}"
    if not folder.is_dir():
        model, draw = load(copied), torch.Generator().manual_seed(a.seed)
        with torch.no_grad():
            for parameter in (p for m in indexers(model) for p in m.parameters() if p.ndim == 2):
                parameter.normal_(std=model.config.initializer_range, generator=draw)
        save(model, load_tokenizer(Path(copied)), folder)
    return str(folder)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def data(a: Any, work: Path) -> dict[str, Any]:
    text = DATA.joinpath("wikitext2_valid.txt").read_text(encoding="utf-8")
    path = work / "train.txt"
    path.write_text(text, encoding="utf-8")
    return {"train": str(path), "format": "text", "max_length": a.length}


def optim(a: Any, steps: int, lr: float) -> dict[str, Any]:
    return {"lr": lr, "batch": 1, "steps": steps, "micro_tokens": a.length, "warmup": 0.1}


def texts(a: Any) -> list[torch.Tensor]:
    from karui.catalogue import load_tokenizer, resolve

    whole = DATA.joinpath("wikitext2_test.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(resolve("smollm2-135m"))(whole, add_special_tokens=False)["input_ids"]
    return list(torch.tensor(ids[: a.windows * a.length]).view(a.windows, a.length))


@contextmanager
def choosing(how: str) -> Iterator[dict[str, list[float]]]:
    """Attention over keys that `how` chooses; yields what it holds of the mass, and the most that as many keys could."""
    from karui.trainers import sparse

    real, projected = sparse.choose, sparse.LeanSparse._projected
    held: dict[str, list[float]] = {"chosen": [], "best": []}
    last: list[torch.Tensor] = []

    def project(self: Any, *given: Any) -> Any:
        q, k, v = projected(self, *given)
        last[:] = [q[0], k[0], torch.tensor(self.module.scaling)]
        return q, k, v

    def choose(iq: torch.Tensor, ik: torch.Tensor, iw: torch.Tensor, cu: torch.Tensor, top: int) -> list[torch.Tensor | None]:
        q, k, scaling = last
        at = torch.arange(q.shape[1])
        mass = torch.stack([(x @ y.T * scaling).masked_fill(at > at[:, None], float("-inf")).softmax(-1) for x, y in zip(q, k)]).mean(0)
        best = mass.topk(top, -1).indices
        keys = real(iq, ik, iw, cu, top)[0] if how == "indexer" else (at[:, None] - torch.arange(top)).clamp_min(0) if how == "recent" else best
        assert keys is not None
        for name, one in (("chosen", keys.long()), ("best", best)):
            seen = torch.zeros_like(mass, dtype=torch.bool).scatter_(1, one, True)
            held[name].append(float((mass * seen)[top:].sum(-1).mean()))
        return [None] if how == "dense" else [keys.int()]

    sparse.choose, sparse.LeanSparse._projected = choose, project  # type: ignore[assignment,method-assign]
    try:
        yield held
    finally:
        sparse.choose, sparse.LeanSparse._projected = real, projected  # type: ignore[method-assign]


@torch.inference_mode()
def measure(a: Any, model: Any, how: str) -> tuple[float, float]:
    """(mean loss, recall) beyond the first `top` tokens."""
    total = 0.0
    with choosing(how) as held:
        for ids in texts(a):
            logits = model(ids[None], use_cache=False).logits[0, a.top : -1].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[a.top + 1 :]))
    return total / a.windows, sum(held["chosen"]) / max(1e-9, sum(held["best"]))


def load(name: str) -> Any:
    from karui.configs.recipe import ModelSection
    from karui.trainers.model import load_model

    return load_model(ModelSection(name=name)).eval()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--top", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heal", type=int, default=24)
    parser.add_argument("--warm", type=int, default=24)
    parser.add_argument("--sparse", type=int, default=12)
    parser.add_argument("--from-drawn", action="store_true", help="also train the drawn indexer")
    parser.add_argument("--samples", type=int, default=8, help="texts that calibrate what is changed")
    parser.add_argument("--lr", type=float, default=1e-4, help="of the model; its indexers learn at --index-lr")
    parser.add_argument("--index-lr", type=float, default=1e-3)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matmul", default="bf16", choices=("fp32", "bf16x3", "bf16-backward", "bf16"), help="`run.matmul`")
    parser.add_argument("--work", type=Path, help="folder for finished runs; what is in it is not repeated")
    a = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(a.threads)
    if a.quick:
        a.length, a.top, a.heal, a.warm, a.sparse, a.windows = 512, 32, 4, 12, 4, 2
    report(figures(a), a.json)


def figures(a: Any) -> list[Figure]:
    work = work_folder(a.work)
    healing = {"kind": "distil", "label": 0.5, "teacher": "smollm2-135m"}
    scale = a.index_lr / a.lr
    healed = stage(a, work, "healed", "smollm2-135m", prepare=[{"method": "mla", "rank": 128, "samples": a.samples}], objective=healing,
                   optim=optim(a, a.heal, a.lr))
    copied = began(a, work, healed)
    random = drawn(a, work, copied)
    found: list[Figure] = []
    losses: dict[str, float] = {}

    def add(name: str, folder: str, how: str) -> None:
        loss, recall = measure(a, load(folder), how)
        losses[name] = loss
        found.append(Figure(name=name, ours=loss, unit="nats", better="lower", note="" if how == "dense" else f"recall {recall:.3f}"))
        print(f"{name}: {loss:.4f}, recall {recall:.3f}", flush=True)

    add("healed, dense", copied, "dense")
    add(f"healed, {a.top} keys of the indexer as it began", copied, "indexer")
    add(f"healed, {a.top} keys of a drawn indexer", random, "indexer")
    add(f"healed, the {a.top} most recent keys", copied, "recent")
    add(f"healed, the {a.top} keys with the most mass", copied, "best")
    alone = {"indexer": {"warm_up": 1.0, "lr_scale": 1.0}}
    warm = stage(a, work, "warm", copied, objective=alone, optim=optim(a, a.warm, a.index_lr))
    add(f"healed, {a.top} keys of the trained indexer", warm, "indexer")
    sparse = stage(a, work, "sparse", warm, objective={**healing, "indexer": {"lr_scale": scale}}, optim=optim(a, a.sparse, a.lr))
    add("trained sparsely, its indexer", sparse, "indexer")
    dense = stage(a, work, "dense", healed, objective=healing, optim=optim(a, a.sparse, a.lr))
    losses["dense"] = measure_dense(a, dense)
    found.append(Figure(name="trained densely as many steps, dense", ours=losses["dense"], unit="nats", better="lower"))
    print(f"trained densely as many steps: {losses['dense']:.4f}", flush=True)
    add("trained sparsely, dense", sparse, "dense")
    add("trained sparsely, the most recent keys", sparse, "recent")
    if a.from_drawn:
        warm_random = stage(a, work, "warm-drawn", random, objective=alone, optim=optim(a, a.warm, a.index_lr))
        add(f"healed, {a.top} keys of a trained indexer that began drawn", warm_random, "indexer")
    base, ours = losses["healed, dense"], losses[f"healed, {a.top} keys of the trained indexer"]
    for peer in (f"healed, the {a.top} most recent keys", f"healed, {a.top} keys of a drawn indexer"):
        found.append(Figure(name=f"loss added by the trained indexer against: {peer}", ours=ours - base, peer=losses[peer] - base,
                            peer_name=peer, goal=0.25, better="lower", unit="nats"))
    found.append(Figure(name="trained sparsely minus trained densely", ours=losses["trained sparsely, its indexer"] - losses["dense"],
                        goal=0.05, better="lower", unit="nats"))
    return found


@torch.inference_mode()
def measure_dense(a: Any, folder: str) -> float:
    """Of a model without an indexer."""
    model, total = load(folder), 0.0
    for ids in texts(a):
        logits = model(ids[None], use_cache=False).logits[0, a.top : -1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[a.top + 1 :]))
    return total / a.windows


if __name__ == "__main__":
    main()
