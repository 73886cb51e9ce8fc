"""The dry run: everything that can be known about a run before it starts, as a value, without loading the weights.

Samples, tokens, what was cut or left out, one sample with its mask, parameters, memory by part, operations, predicted time,
steps, exports. Formulas: `karui.trainers.estimate`. Rendering: `karui.trainers.preflight_view`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.configs.steps import Ia3Step, LoraStep, MergeHeadsStep, PromptStep, VeraStep, WindowStep
from karui.trainers.compact import compact
from karui.trainers.data import SampleSet, collate, plan_epoch, read_data, total_steps
from karui.trainers.data.dataset import describe
from karui.trainers.estimate import (
    Memory,
    ModelShape,
    Trained,
    forward_flops,
    memory,
    shape_of,
    skeleton,
    step_flops,
    step_traffic,
    trained_by,
    weight_bytes,
)
from karui.trainers.schedule import warmup_steps

if TYPE_CHECKING:
    from karui.kernels.matmul import Precision

# On a CPU malloc keeps pieces that were freed and do not fit the next step's sizes: this share of what a micro-batch takes.
# SmolLM2-135M, LoRA and QLoRA, three steps of four samples on two threads: with it both predictions are within 10 %.
SLACK = 0.35
COMPUTED_MICROS = 8  # the largest micro-batches, of which the rows that are computed are counted
PLANNED_STEPS = 2000  # of the first epoch, looked at for the largest micro-batch and the mean step


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts. `frozen` includes weights on a grid; `total` = trained + frozen."""

    total: int
    trained: int
    frozen: int
    adapter: int
    embedding: int


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What this machine was measured to do just now: matrix products of the model's shape, in the forward and in the backward
    pass (`run.matmul`), and a stream over memory."""

    flops_per_s: float
    backward_flops_per_s: float
    bytes_per_s: float
    device: str


@dataclass(frozen=True, kw_only=True)
class Export:
    """A bundle that will be written and about how large its weights will be."""

    spec: str
    output: str
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a run will do. All memory in bytes per rank, all times in seconds.

    Attributes:
        train, evaluation: source, format, notes and `Counts` of the sets; evaluation is empty without one.
        lengths: (from, to, samples) per bar of the histogram, `to` excluded.
        sample: the first training sample as (text, supervised) pieces.
        steps: optimizer steps of the run; `last_step_samples`: samples in the last step of an epoch.
        micro_batches: mean number per step over all ranks; `largest_micro_tokens`: tokens of the largest.
        baseline_bytes: what the process held when this was made (interpreter and libraries).
        slack_bytes: what the allocator keeps besides, see `SLACK`.
        peak_bytes: baseline + memory.peak + slack.
        available_bytes: free memory of the machine or device now, baseline included.
        step_flops, step_seconds, total_seconds: mean step; prediction from `rate`, evaluations included in the total.
        warnings: what a person should look at before starting.
    """

    name: str
    model: str
    train: dict[str, Any]
    evaluation: dict[str, Any]
    lengths: tuple[tuple[int, int, int], ...]
    sample: tuple[tuple[str, bool], ...]
    parameters: Parameters
    prepare: tuple[str, ...]
    memory: Memory
    baseline_bytes: int
    slack_bytes: int
    peak_bytes: int
    available_bytes: int
    world: int
    batch: int
    steps: int
    steps_per_epoch: int
    last_step_samples: int
    warmup_steps: int
    micro_batches: float
    largest_micro_tokens: int
    step_tokens: float
    step_flops: float
    rate: Rate
    step_seconds: float
    total_seconds: float
    exports: tuple[Export, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; json.dumps takes it."""
        return asdict(self)


def dry_run(recipe: Recipe, *, world: int = 1) -> Preflight:
    """The preflight of a recipe: reads the model's config and tokenizer and the data, no weights."""
    from karui.catalogue import load_model_config, resolve
    from karui.trainers.stages import planned

    folder = resolve(recipe.model.name)
    config, told = planned(recipe, load_model_config(folder))
    tokenizer, train, evaluation = read_data(recipe.data, folder)
    found = preflight(recipe, config, tokenizer, train, evaluation, world=world)
    return replace(found, notes=(*told, *found.notes))


def preflight(recipe: Recipe, config: Any, tokenizer: Any, train: SampleSet, evaluation: SampleSet | None = None, *,
              world: int = 1, rate: Rate | None = None) -> Preflight:
    """Work out what a run will do.

    Args:
        config: the model's transformers config.
        world: ranks.
        rate: the machine's speed; None: measured now (about half a second).

    Raises:
        KaruiError: adapter targets that match nothing, a rank too large, an empty training set.
    """
    model = skeleton(config)
    shape = shape_of(model)
    trained = trained_by(recipe, model, shape)
    steps = total_steps(len(train), batch=recipe.optim.batch, epochs=recipe.optim.epochs, steps=recipe.optim.steps)
    load = _load(recipe, train, world, steps)
    rate = rate or measure_rate(shape, load.largest_tokens, matmul=recipe.run.matmul, dtype=_computed_in(recipe))
    counts: dict[str, float] = dict(tokens=load.tokens, supervised=load.supervised, squared_lengths=load.squared)
    flops = step_flops(recipe, shape, trained, **counts)
    forward = forward_flops(shape, trained, **counts) * (2 if recipe.run.recompute == "full" else 1)
    traffic = step_traffic(recipe, shape, trained, tokens=load.tokens, micros=load.micros)
    products = forward / rate.flops_per_s + (flops - forward) / rate.backward_flops_per_s
    step_seconds = (products + traffic / rate.bytes_per_s) / world
    held_out = evaluation if evaluation is not None and len(evaluation) else None
    used = memory(recipe, shape, trained, tokens=load.largest_rows, supervised=load.largest_supervised)
    baseline, available = _machine()
    slack = round(SLACK * (used.activations + max(used.logits + used.head, used.working))) if rate.device == "cpu" else 0
    per_epoch = -(-len(train) // recipe.optim.batch)
    parts: dict[str, Any] = dict(
        name=recipe.name, model=recipe.model.name, train=describe(train), evaluation=describe(held_out) if held_out else {},
        lengths=histogram(train.lengths), sample=pieces(train, tokenizer), parameters=_parameters(shape, trained),
        prepare=tuple(_step_text(s) for s in recipe.prepare), memory=used, baseline_bytes=baseline,
        slack_bytes=slack, peak_bytes=baseline + used.peak + slack, available_bytes=available, world=world,
        batch=recipe.optim.batch, steps=steps,
        steps_per_epoch=per_epoch, last_step_samples=len(train) - (per_epoch - 1) * recipe.optim.batch,
        warmup_steps=warmup_steps(recipe.optim, steps), micro_batches=load.micros, largest_micro_tokens=load.largest_tokens,
        step_tokens=load.tokens, step_flops=flops, rate=rate, step_seconds=step_seconds,
        total_seconds=steps * step_seconds + _evaluation_seconds(recipe, shape, trained, held_out, steps, rate, world),
        exports=_exports(recipe, shape), notes=(*train.notes, *load.notes))
    return Preflight(**parts, warnings=_warnings(recipe, shape, parts))


@dataclass(frozen=True, kw_only=True)
class _Load:
    """Means over the steps that were planned, over all ranks, and the largest micro-batch of any rank; `largest_rows`: what of it
    a rank computes."""

    tokens: float
    supervised: float
    squared: float
    micros: float
    largest_tokens: int
    largest_rows: int
    largest_supervised: int
    notes: tuple[str, ...]


def _load(recipe: Recipe, train: SampleSet, world: int, steps: int) -> _Load:
    lengths = train.lengths
    starts = np.asarray(train.offsets[:-1])
    supervised = np.add.reduceat(np.asarray(train.loss_mask, np.int64), starts) if len(train) else np.zeros(0, np.int64)
    groups = max(1, world // recipe.run.context_parallel)
    plans = [plan_epoch(lengths, batch=recipe.optim.batch, micro_tokens=recipe.optim.micro_tokens, rank=rank, world=groups,
                        seed=recipe.run.seed, epoch=0, shuffle=recipe.data.shuffle, packing=recipe.data.packing,
                        window=recipe.data.shuffle_window)
             for rank in range(groups)]
    looked_at = min(len(plans[0]), PLANNED_STEPS, steps)
    micros = [np.array(m) for plan in plans for step in islice(plan, looked_at) for m in step if m]
    sizes = [(int(lengths[m].sum()), int(supervised[m].sum())) for m in micros]
    largest = max(sizes)
    by_size = sorted(range(len(micros)), key=lambda i: -sizes[i][0])[:COMPUTED_MICROS]
    computed = max(_computed(recipe, train, micros[i]) for i in by_size)
    notes = []
    if looked_at < min(len(plans[0]), steps):
        notes.append(f"largest micro-batch and means: from the first {looked_at} of {len(plans[0])} steps of an epoch")
    if largest[0] > recipe.optim.micro_tokens:
        notes.append(f"a sample of {largest[0]} tokens is longer than optim.micro_tokens={recipe.optim.micro_tokens} "
                     "and runs alone")
    return _Load(tokens=sum(s[0] for s in sizes) / looked_at, supervised=sum(s[1] for s in sizes) / looked_at,
                 squared=float(sum((lengths[m].astype(float) ** 2).sum() for m in micros)) / looked_at,
                 micros=len(micros) / looked_at, largest_tokens=largest[0], largest_rows=computed[0],
                 largest_supervised=computed[1], notes=tuple(notes))


def _computed(recipe: Recipe, train: SampleSet, micro: np.ndarray) -> tuple[int, int]:
    """Rows and supervised rows that a rank computes of a micro-batch: without those that change nothing, or its share of them."""
    batch = collate([train[int(i)] for i in micro])
    share = recipe.run.context_parallel
    if recipe.objective.kind != "sft" or share > 1:
        return -(-batch.num_tokens // share), -(-batch.num_supervised // share)
    row = compact(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
    return len(row.tokens), batch.num_supervised


def _computed_in(recipe: Recipe) -> str:
    """The dtype of a GPU's matrix products; FP8's are counted as bf16's."""
    named = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}
    return named.get(recipe.run.precision, recipe.model.dtype)


def measure_rate(
    shape: ModelShape, tokens: int, seconds: float = 0.2, matmul: Precision = "fp32", dtype: str = "float32"
) -> Rate:
    """Matrix products [tokens, H] x [H, F] and back, and a stream `a + b` over 64 MB, on the training device.

    Args:
        tokens: of a micro-batch; a CPU reaches its rate with 512 of them, a GPU with 8192.
        matmul, dtype: what products are computed in on a CPU and on a GPU.

    Raises:
        KaruiError: a GPU without room for this.
    """
    import torch

    from karui.kernels.matmul import matmul as product
    from karui.kernels.matmul import matmul_precision

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, most = (getattr(torch, dtype), 8192) if device == "cuda" else (torch.float32, 512)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def per_second(work: float, run: Any) -> float:
        run()
        wait()
        begin, done = time.perf_counter(), 0
        while done < 2 or time.perf_counter() - begin < seconds:
            run()
            wait()
            done += 1
        return work * done / (time.perf_counter() - begin)

    try:
        x, up, down = (torch.randn(*size, device=device, dtype=kind) for size in (
            (min(max(tokens, 16), most), shape.hidden), (shape.ffn, shape.hidden), (shape.hidden, shape.ffn)))
        a, b = torch.ones(2**24, device=device), torch.ones(2**24, device=device)
    except torch.OutOfMemoryError as error:
        raise KaruiError(f"the GPU has no room for the preflight's measurement ({error}); see with nvidia-smi who holds its "
                         "memory.") from error

    def products(backward: bool) -> float:
        return per_second(4.0 * x.shape[0] * shape.hidden * shape.ffn,
                          lambda: product(product(x, up.T, backward=backward), down.T, backward=backward))

    with matmul_precision(matmul if device == "cpu" else "fp32"):
        forward = products(False)
        backward = products(True) if matmul in ("bf16-backward", "bf16x3") else forward
    return Rate(flops_per_s=forward, backward_flops_per_s=backward, device=device,
                bytes_per_s=per_second(3.0 * 4 * 2**24, lambda: torch.add(a, b, out=a)))


def histogram(lengths: np.ndarray, bars: int = 10) -> tuple[tuple[int, int, int], ...]:
    """(from, to, samples) over equal, whole-numbered widths; `to` excluded. Their counts add up to the samples."""
    if len(lengths) == 0:
        return ()
    low, high = int(lengths.min()), int(lengths.max()) + 1
    width = max(1, -(-(high - low) // bars))
    edges = range(low, high + width, width)
    return tuple((a, a + width, int(((lengths >= a) & (lengths < a + width)).sum())) for a in edges if a < high)


def pieces(samples: SampleSet, tokenizer: Any, index: int = 0, max_tokens: int = 400) -> tuple[tuple[str, bool], ...]:
    """A sample as text, cut where supervision begins and ends; at most `max_tokens` tokens."""
    if not len(samples):
        return ()
    sample = samples[index]
    ids, mask = sample.ids[:max_tokens].tolist(), sample.loss_mask[:max_tokens]
    cuts = [0, *(np.flatnonzero(np.diff(mask.astype(np.int8))) + 1).tolist(), len(ids)]
    return tuple((str(tokenizer.decode(ids[a:b], skip_special_tokens=False, clean_up_tokenization_spaces=False)), bool(mask[a]))
                 for a, b in zip(cuts, cuts[1:]))


def _parameters(shape: ModelShape, trained: Trained) -> Parameters:
    learned = trained.trained(shape)
    total = shape.parameters + trained.adapter
    return Parameters(total=total, trained=learned, frozen=total - learned, adapter=trained.adapter,
                      embedding=shape.head * (1 if shape.tied else 2))


def _exports(recipe: Recipe, shape: ModelShape) -> tuple[Export, ...]:
    from karui.trainers.estimate import Linear

    dtype = 4
    matrices = 1 if shape.tied else 2
    blocks = (*shape.linears, *shape.experts)
    rest = (shape.parameters - sum(x.size for x in blocks) - matrices * shape.head) * dtype
    embedding = (Linear(name="embedding", out=shape.vocab, width=shape.hidden),) * matrices
    return tuple(
        Export(spec=str(e.spec), output=str(e.target(recipe.output)),
               weight_bytes=weight_bytes(blocks, e.spec, dtype) + weight_bytes(embedding, e.embedding, dtype) + rest)
        for e in recipe.export)


def _evaluation_seconds(recipe: Recipe, shape: ModelShape, trained: Trained, held_out: SampleSet | None, steps: int, rate: Rate,
                        world: int) -> float:
    if held_out is None:
        return 0.0
    times = 2 + ((steps - 1) // recipe.run.eval_every if recipe.run.eval_every else 0)
    counts = held_out.counts
    flops = forward_flops(shape, trained, tokens=counts.tokens, supervised=counts.supervised_tokens,
                          squared_lengths=float((held_out.lengths.astype(float) ** 2).sum()))
    return times * flops / rate.flops_per_s / world


def _machine() -> tuple[int, int]:
    """(what this process holds now, what a run may hold in all) in bytes, of the device that trains."""
    import psutil
    import torch

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        return held, free + held
    held = psutil.Process().memory_info().rss
    return held, psutil.virtual_memory().available + held


def _step_text(step: Any) -> str:
    if isinstance(step, LoraStep):
        base = "" if step.base.format == "none" else f" on a {step.base} base"
        targets = step.targets if isinstance(step.targets, str) else ", ".join(step.targets)
        extra = "".join([", DoRA" * step.dora, f", starts by {step.init}" * (step.init != "kaiming"),
                         f", B learns {step.lr_ratio:g} times as fast" * (step.lr_ratio != 1),
                         f", and whole: {', '.join(step.train_also)}" * bool(step.train_also)])
        return f"{step.method}: rank {step.rank}, alpha {step.alpha:g}, {targets}{base}{extra}"
    return f"{getattr(step, 'method', type(step).__name__)}"


_BESIDE = {"distil": "the teacher", "on-policy": "the teacher and the rollouts"}


def _warnings(recipe: Recipe, shape: ModelShape, parts: dict[str, Any]) -> tuple[str, ...]:
    train = parts["train"]
    out = []

    def share(count: int) -> str:
        return f"{count} of {train['rows']} rows ({100 * count / max(1, train['rows']):.1f} %)"

    if train["dropped_overlong"]:
        out.append(f"{share(train['dropped_overlong'])} are longer than data.max_length={recipe.data.max_length} and are left "
                   f"out (the longest has {train['longest']} tokens)")
    if train["truncated"]:
        out.append(f"{share(train['truncated'])} are cut to data.max_length={recipe.data.max_length} tokens")
    if train["unsupervised"]:
        out.append(f"{share(train['unsupervised'])} have no token that carries loss and are left out")
    if train["duplicates"]:
        out.append(f"{share(train['duplicates'])} repeat an earlier sample token by token")
    if parts["peak_bytes"] > parts["available_bytes"]:
        out.append(f"predicted peak memory {parts['peak_bytes'] / 1e9:.1f} GB is more than the "
                   f"{parts['available_bytes'] / 1e9:.1f} GB there are; lower optim.micro_tokens or "
                   "data.max_length, or set run.recompute=full")
    if not shape.known:
        out.append("this architecture is not of the shape the formulas describe; its memory and time may differ")
    known = (LoraStep, VeraStep, Ia3Step, PromptStep, MergeHeadsStep, WindowStep)
    if unknown := [s for s in recipe.prepare if not isinstance(s, known)]:
        out.append(f"memory, time and parameters of {', '.join(_step_text(s) for s in unknown)} are not predicted")
    kind = recipe.objective.kind
    if kind in _BESIDE:
        out.append(f"memory and time of {_BESIDE[kind]} (objective {kind}) are not predicted")
    elif kind != "sft":
        out.append(f"objective {kind} trains no weight of the model: parameters, memory and time are those of training it whole")
    return tuple(out)


def render(found: Preflight) -> Any:
    """The preflight for a terminal: a rich renderable."""
    from karui.trainers.preflight_view import view

    return view(found)


