"""`karui plan RECIPE --nodes N --gpu NAME`: memory per rank for each way of spreading a run, and where it stops fitting.

From the parts of `karui.trainers.estimate` for one process, with R ranks, F bytes of floating-point weights and adapters, C bytes
of a quantized base's codes, T bytes of trained weights, G of gradients, O of optimizer states:

               weights   gradients   optimizer   buffers
    ddp        F + C     G           O           G: the buckets that are summed over ranks
    fsdp2      F/R + C   G/R         O/R         root and two layers gathered, and their gradients
    zero1      F + C     G           (O + T)/R   a bucket; T: the engine steps a copy of the trained weights
    zero2      F + C     G/R         (O + T)/R   a bucket, and the largest trained matrix's gradient
    zero3      F/R + C   G/R         (O + T)/R   as fsdp2, and a bucket

Activations, logits and working memory are those of a micro-batch, divided by `run.context_parallel`. Tests hold weights,
gradients and optimizer to what two ranks held, and activations to what autograd kept. Not counted: the allocator's slack, the
device's own context.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.lowprec.plan import Gpu, find_gpu
from karui.trainers.estimate import BYTES, ModelShape, Outline, Trained, memory, outline, weight_bytes
from karui.trainers.zero import BUCKET

WAYS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by part. `activations` include logits and working memory of the largest micro-batch.

    Attributes:
        most_tokens: tokens of the largest micro-batch that fits beside the rest; 0: the rest alone does not.
    """

    way: str
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    most_tokens: int = 0

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        return self.states + self.activations


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """A recipe on `ranks` GPUs of a kind; one `RankMemory` for each way."""

    gpu: Gpu
    ranks: int
    tokens: int
    ways: tuple[RankMemory, ...]

    def fits(self, found: RankMemory) -> bool:
        return found.peak <= self.gpu.memory_gb * 1e9


def plan_ranks(
    recipe: Recipe, gpu: str, *, nodes: int = 1, per_node: int = 8, tokens: int | None = None, model: Outline | None = None
) -> RankPlan:  # fmt: skip
    """Plan a recipe on nodes of GPUs that need not be there.

    Args:
        per_node: GPUs of a node.
        tokens: of a micro-batch; None: the recipe's `optim.micro_tokens`.
        model: the recipe's, when it was made before.

    Raises:
        KaruiError: an unknown GPU, no ranks, or ranks that `run.context_parallel` does not divide.
    """
    card, ranks = find_gpu(gpu), nodes * per_node
    if ranks < 1 or ranks % recipe.run.context_parallel:
        raise KaruiError(f"{nodes} nodes of {per_node} GPUs are {ranks} ranks, which must be at least 1 and a multiple of "
                         f"run.context_parallel={recipe.run.context_parallel}.")
    model = model or outline(recipe)
    shape, trained = model.shape, model.trained
    count = tokens or recipe.optim.micro_tokens
    room = card.memory_gb * 1e9
    ways = [rank_memory(recipe, shape, trained, way=way, ranks=ranks, tokens=count) for way in WAYS]
    return RankPlan(gpu=card, ranks=ranks, tokens=count,
                    ways=tuple(replace(w, most_tokens=_most_tokens(recipe, shape, trained, int(room - w.states))) for w in ways))


def rank_memory(recipe: Recipe, shape: ModelShape, trained: Trained, *, way: str, ranks: int, tokens: int) -> RankMemory:
    """The formulas above for one way; `tokens` of a micro-batch, all supervised."""
    dtype = BYTES[recipe.model.dtype]
    one = memory(recipe, shape, trained, tokens=tokens, supervised=tokens)
    codes = weight_bytes(shape.linears, trained.base, dtype) if trained.base.format != "none" else 0
    floats = one.weights + one.adapter - codes
    learned = one.gradients  # a gradient has its parameter's dtype
    root = (shape.parameters - shape.body) * dtype
    layers = 2 * max(0, floats - root) // max(1, shape.layers)
    gathered = root + layers + ((root + layers) if trained.full else 2 * learned // max(1, shape.layers))
    bucket = 4 * min(BUCKET, learned // 4)
    split = {
        "ddp": (floats, one.gradients, one.optimizer, one.gradients),
        "fsdp2": (floats // ranks, one.gradients // ranks, one.optimizer // ranks, gathered),
        "zero1": (floats, one.gradients, (one.optimizer + learned) // ranks, bucket),
        "zero2": (floats, one.gradients // ranks, (one.optimizer + learned) // ranks, bucket + _largest(shape, trained, dtype)),
        "zero3": (floats // ranks, one.gradients // ranks, (one.optimizer + learned) // ranks, gathered + bucket),
    }
    if ranks == 1:
        split["ddp"] = (floats, one.gradients, one.optimizer, 0)
    weights, gradients, optimizer, buffers = split[way]
    return RankMemory(way=way, weights=weights + codes, gradients=gradients, optimizer=optimizer, buffers=buffers,
                      activations=_moving(recipe, shape, trained, tokens))


def _largest(shape: ModelShape, trained: Trained, dtype: int) -> int:
    if trained.full:
        return max(shape.head, max((x.size for x in shape.linears), default=0)) * dtype
    return max((trained.rank * max(x.out, x.width) for x in shape.linears if x.name in trained.targets), default=0) * 4


def _moving(recipe: Recipe, shape: ModelShape, trained: Trained, tokens: int) -> int:
    """What grows with the micro-batch, on one of the ranks that share it."""
    own = -(-tokens // recipe.run.context_parallel)
    one = memory(recipe, shape, trained, tokens=own, supervised=own)
    return one.activations + max(one.logits + one.head, one.working)


def _most_tokens(recipe: Recipe, shape: ModelShape, trained: Trained, room: int) -> int:
    low, high = 0, 1
    while high < 1 << 32 and _moving(recipe, shape, trained, high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _moving(recipe, shape, trained, middle) <= room else (low, middle)
    return low


COLUMNS = ("way", "weights", "gradients", "optimizer", "buffers", "activations", "peak", "", "most tokens")


def rows(plan: RankPlan) -> list[list[str]]:
    """The plan as a table, GB per rank."""
    return [[w.way, *(f"{x / 1e9:.2f}" for x in (w.weights, w.gradients, w.optimizer, w.buffers, w.activations, w.peak)),
             "fits" if plan.fits(w) else "does not fit", f"{w.most_tokens:,}"] for w in plan.ways]


def title(plan: RankPlan) -> str:
    """What stands above the table."""
    return (f"{plan.ranks} ranks of {plan.gpu.name} ({plan.gpu.memory_gb:g} GB), micro-batches of {plan.tokens:,} tokens; GB per "
            "rank, predicted; most tokens: of a micro-batch that still fits")


def as_json(plan: RankPlan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    ways = [{**asdict(w), "peak": w.peak, "fits": plan.fits(w)} for w in plan.ways]
    return {"gpu": asdict(plan.gpu), "ranks": plan.ranks, "tokens": plan.tokens, "ways": ways}
