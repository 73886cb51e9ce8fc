"""How many KV blocks a byte budget buys, said in words."""

from __future__ import annotations

import logging
import re

import torch

from karui.configs.errors import KaruiError
from karui.inference.batch import Runner
from karui.inference.cache.groups import LayerGroups, one_group

logger = logging.getLogger(__name__)

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
CPU_DEFAULT_BYTES = 2 << 30
STEP_BYTES = 1 << 30
"""What a GPU keeps for a step's own tensors: logits of hundreds of rows, a weight that is decoded for many rows, graphs."""

CACHED_PAGES, CACHED_SHARE = 1024, 1 / 16
"""Recurrent states that the prefix cache keeps: so many, within this share of the budget, but at least one per sequence."""


def parse_bytes(size: int | str) -> int:
    """Bytes of a number or a text such as "2GiB" or "500MB". Raises `KaruiError` for anything else and for less than one byte."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if match is None or match[2].lower() not in _UNITS or (value := int(float(match[1]) * _UNITS[match[2].lower()])) < 1:
        raise KaruiError(f"memory {size!r} is not a size; write a number of bytes or a text such as '2GiB' or '500MB'.")
    return value


def default_budget(device: torch.device) -> int:
    """A quarter of the free memory, 2 GiB at most, on a CPU; on a GPU what is free after the weights less a tenth, or less
    `STEP_BYTES` where that is more, half at most."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has freed counts as free
        free = torch.cuda.mem_get_info(device)[0]
        return free - max(free // 10, min(STEP_BYTES, free // 2))
    import psutil

    return min(CPU_DEFAULT_BYTES, psutil.virtual_memory().available // 4)


def plan_states(runner: Runner, memory: int | str | None, max_sequences: int, drafted: int) -> tuple[int, int, int | str | None]:
    """(pages of recurrent states, sequences that can run at once, memory left for keys and values) of a hybrid model; of another
    one 0 and what was given.

    Each running sequence has two pages, and one per token of a draft; more are for the prefix cache. Pages take half of the
    budget at most. Raises `KaruiError` when that does not hold two pages.
    """
    per_page = getattr(runner, "state_bytes", 0)
    if not per_page:
        return 0, max_sequences, memory
    budget = default_budget(torch.device(getattr(runner, "device", "cpu"))) if memory is None else parse_bytes(memory)
    cached = max(max_sequences, min(CACHED_PAGES, int(budget * CACHED_SHARE) // per_page))
    pages = min(max_sequences * (2 + drafted) + cached, budget // 2 // per_page - 1)
    if pages < 2:
        raise KaruiError(f"KV memory: {budget:,} bytes, of which recurrent states may take half, do not hold the three pages of "
                         f"{per_page:,} bytes that one sequence of this model needs. Raise memory.")
    sequences = min(max_sequences, max(1, pages // 3))  # where memory is short a third is still for drafts and the prefix cache
    logger.info("recurrent states: %d pages of %d bytes, whatever the context: two for each of %d sequences, %d for drafts and "
                "the prefix cache", pages, per_page, sequences, pages - 2 * sequences)
    if sequences < max_sequences:
        logger.info("%d sequences run at once instead of %d: the memory holds no more recurrent states", sequences, max_sequences)
    return pages, sequences, budget - (pages + 1) * per_page  # and the page of zeros


def groups(runner: Runner, kv_dtype: str) -> LayerGroups:
    """The runner's groups of layers; all together, with all their keys, where it has none."""
    found = getattr(runner, "kv_groups", None)
    return one_group(runner.config.num_kv_layers) if found is None else found(kv_dtype)


def plan(runner: Runner, kv_dtype: str, memory: int | str | None, max_context: int | None, model_context: int,
         max_sequences: int, block_size: int, max_tokens: int = 0, groups: LayerGroups | None = None) -> tuple[int, int, int]:
    """(number of blocks, context length, how many blocks can be unfinished at once where a format keeps those besides, else 0).

    Raises `KaruiError` when the budget cannot hold what was asked for. max_tokens: rows of a step.
    """
    if max_context is not None and not 2 <= max_context <= model_context:
        raise KaruiError(f"max_context is {max_context:,}; this model's positions reach from 2 to {model_context:,}.")
    groups = one_group(runner.config.num_kv_layers) if groups is None else groups
    layers, count = runner.config.num_kv_layers, len(groups)
    staged_of = getattr(runner, "kv_staged_bytes_per_token", lambda _: 0)
    # of a token in a block, which is as many layers as a group has
    per_token, staged = (size * groups.size // layers for size in (runner.kv_bytes_per_token(kv_dtype), staged_of(kv_dtype)))
    budget = default_budget(torch.device(getattr(runner, "device", "cpu"))) if memory is None else parse_bytes(memory)
    # Each running sequence has an unfinished block, and one more that its rows of a step begin, besides the blocks they fill.
    unfinished = count * (2 * max_sequences + -(-max_tokens // block_size)) if staged else 0
    affordable = budget // ((per_token + staged) * block_size)
    if affordable > unfinished:
        affordable = (budget - unfinished * staged * block_size) // (per_token * block_size)
    if hasattr(runner, "agree"):
        affordable = runner.agree(affordable)
    wanted = max_context or model_context
    each = groups.most_blocks(wanted, max_tokens, block_size)
    blocks = min(affordable, max(max_sequences * each, 2 * count))
    capacity = groups.capacity(blocks, max_tokens, block_size, -(-wanted // block_size) * block_size)
    beside = f" and {staged:,} more in unfinished blocks" if staged else ""
    apart = f" of a group of layers, of which there are {count}" if count > 1 else ""
    sizes = (f"{budget:,} bytes at {per_token:,} bytes per token{apart}{beside} ({kv_dtype}) hold "
             f"{affordable * block_size // count:,} tokens")
    if blocks < 2 * count or (max_context is not None and capacity < max_context):
        least = groups.most_blocks(max_context or 2 * block_size, max_tokens, block_size)
        raise KaruiError(f"KV memory: {sizes}; one context of {max(wanted if max_context else 2 * block_size, 2):,} tokens needs "
                         f"{(per_token + staged) * least * block_size:,} bytes. "
                         "Raise memory, lower max_context, or choose a smaller kv_dtype.")
    context = min(wanted, capacity)
    logger.info("KV cache: %s; using %d blocks of %d tokens, context up to %d, weights %d bytes",
                sizes, blocks, block_size, context, runner.weight_bytes())
    if (all_keys := count * -(-context // block_size)) > (held := groups.most_blocks(context, max_tokens, block_size)):
        logger.info("layers with a window give blocks back: a context of %d tokens holds %d blocks at most, not %d", context,
                    held, all_keys)
    if context < wanted:
        logger.info("context limited to %d tokens of the model's %d by the KV memory", context, model_context)
    return blocks, context, min(unfinished, blocks)
