"""Context parallelism: the rows of a packed batch are split over ranks, each with its own part of every document's tokens.

Everything but attention works row by row. In attention a rank holds the queries of its rows and gathers the keys and values of
all (as Llama 3 was trained, arXiv 2407.21783, section 3.3.2); the backward pass sums their gradients and gives each rank its own.
Losses of the ranks add up to the batch's, and so do the gradients of the parameters: both are those of one process.

    run.context_parallel: 4      of 8 ranks, two groups of four: each group takes its share of the samples, four ranks each batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from karui.configs.errors import KaruiError, UnsupportedError
from karui.trainers.data import IGNORE

if TYPE_CHECKING:
    from accelerate import Accelerator

    from karui.configs.recipe import Recipe

QUERY_ROWS = 1024  # rows whose mask over the keys exists at one moment


@dataclass(frozen=True, kw_only=True)
class ContextGroup:
    """The ranks that share a batch.

    Attributes:
        group: their process group.
        rank: this one's number in it, of `size`.
    """

    group: Any
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ContextRows:
    """This rank's rows of one batch, from `begin` up to `end`."""

    ranks: ContextGroup
    begin: int
    end: int


def make_group(recipe: Recipe, accelerator: Accelerator) -> ContextGroup | None:
    """This rank's group; None without context parallelism.

    Raises:
        KaruiError: a number that does not divide the ranks.
        UnsupportedError: an objective or adapter whose rows are not those of the batch.
    """
    size, world = recipe.run.context_parallel, accelerator.num_processes
    if size == 1:
        return None
    if world % size:
        raise KaruiError(f"run.context_parallel is {size}, which does not divide this run's {world} ranks; launch with a "
                         "multiple of it.")
    if recipe.objective.kind != "sft" or any(getattr(step, "method", "") == "prompt" for step in recipe.prepare):
        raise UnsupportedError("run.context_parallel serves objective sft without soft prompts; set it to 1.")
    groups = [dist.new_group(range(at, at + size)) for at in range(0, world, size)]  # made by every rank alike
    number, rank = divmod(accelerator.process_index, size)
    return ContextGroup(group=groups[number], rank=rank, size=size)


def data_ranks(recipe: Recipe, accelerator: Accelerator) -> tuple[int, int]:
    """(rank, world) for the plan of an epoch: ranks of a group get the same micro-batches."""
    size = recipe.run.context_parallel
    return accelerator.process_index // size, accelerator.num_processes // size


def split(
    ranks: ContextGroup, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ContextRows]:
    """(tokens, positions, cu_seqlens, targets) with this rank's rows alone, but the documents' borders in the whole row.

    The row is filled up to a multiple of the ranks with a document that carries no loss.
    """
    missing = -len(tokens) % ranks.size
    if missing:
        tokens = torch.cat((tokens, tokens.new_zeros(missing)))
        targets = torch.cat((targets, targets.new_full((missing,), IGNORE)))
        positions = torch.cat((positions, torch.arange(missing, dtype=positions.dtype, device=positions.device)))
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + missing))
    part = len(tokens) // ranks.size
    rows = ContextRows(ranks=ranks, begin=ranks.rank * part, end=(ranks.rank + 1) * part)
    at = slice(rows.begin, rows.end)
    return tokens[at], positions[at], cu_seqlens, targets[at], rows


def context_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float, rows: ContextRows
) -> torch.Tensor:
    """Attention output [1, t, heads, D] of this rank's rows t, each seeing its own document in the whole row up to itself.

    Args:
        q: [1, heads, t, D]; k: [1, kv_heads, t, D]; v: [1, kv_heads, t, Dv], Dv at most D; already rotated.
        cu_seqlens: borders of the documents in the whole row.
    """
    if (short := k.shape[-1] - v.shape[-1]) > 0:  # latent attention: keys and values are gathered as one tensor
        return context_attention(q, k, torch.nn.functional.pad(v, (0, short)), cu_seqlens, scaling, rows)[..., :-short]
    keys, values = _Gather.apply(torch.cat((k, v), 1), rows.ranks).chunk(2, 1)
    if q.is_cuda:  # with a mask torch's fused kernels take no grouped heads, and its plain one holds all scores in fp32
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    bounds = cu_seqlens.tolist()
    out = []
    for start, stop in zip(bounds, bounds[1:]):
        for first in range(max(start, rows.begin), min(stop, rows.end), QUERY_ROWS):
            last = min(first + QUERY_ROWS, stop, rows.end)
            mask = torch.ones(last - first, last - start, dtype=torch.bool, device=q.device).tril(first - start)
            part = q[:, :, first - rows.begin : last - rows.begin]
            out.append(torch.nn.functional.scaled_dot_product_attention(
                part, keys[:, :, start:last], values[:, :, start:last], attn_mask=mask, scale=scaling,
                enable_gqa=part.shape[1] != keys.shape[1]))
    return torch.cat(out, 2).transpose(1, 2)


class _Gather(torch.autograd.Function):
    """[1, heads, t, D] of every rank -> [1, heads, T, D]; backward: the sum of the ranks' gradients, this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: ContextGroup) -> torch.Tensor:
        ctx.ranks = ranks
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(parts, part.contiguous(), group=ranks.group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = torch.stack([x.contiguous() for x in grads[0].chunk(ctx.ranks.size, 2)])
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=ctx.ranks.group)
        return own, None
