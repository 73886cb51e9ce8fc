"""Prefill here, decode there: the keys and values of a prompt, taken out of one engine's prefix cache and put into another's
(disaggregated prefill as in DistServe, arXiv 2401.09670, and Mooncake, arXiv 2407.00079).

    first = prefiller.generate(Request(prompt=ids, params=SamplingParams(max_tokens=1)))[0]
    prefiller.export_prefix(ids).save("prompt.safetensors")
    ...
    decoder.import_prefix(Prefix.load("prompt.safetensors"))
    output = decoder.generate(Request(prompt=ids, params=params))[0]

The decoding engine finds the blocks as if it had computed them: what it has left of the prompt is the last block, and its answer
is the one that the prefilling engine would have given, bit for bit where both have the same runner. Keys are kept as the cache
has them, so both need the same `kv_dtype`; runners may differ. Prompts of adapters are not handed over.

Legend: T tokens, G kv heads, D head_dim.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.inference.cache.groups import num_dead
from karui.inference.cache.kv import DTYPES, SCALED, STAGED, stored_width
from karui.inference.cache.pool import DEAD, group_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from karui.inference.batch import Runner
    from karui.inference.cache.groups import LayerGroups
    from karui.inference.cache.pool import BlockPool
    from karui.inference.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """The beginning of a prompt with its keys and values.

    Attributes:
        tokens: T token ids, a whole number of the blocks that they were taken from.
        data: [P, layers, T, G, D] keys and values (P = 2) or latents (P = 1), in the dtype of the cache.
        scale: fp32 [P, layers, T, G] of int8 and fp8 caches, else None.
        kv_dtype: the cache's format.
        model: identity of the bundle that the engine was loaded from, "" where it was none.
        version: of its weights.
        cache_salt: the requests'.
        block_size: of the cache that they were taken from.
        starts: of each layer, the first token whose keys are there: layers with a window have those that what follows sees, and
            zeros before. Empty: all are there.
    """

    tokens: tuple[int, ...]
    data: torch.Tensor
    scale: torch.Tensor | None
    kv_dtype: str
    model: str
    version: str
    cache_salt: str
    block_size: int
    starts: tuple[int, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        from safetensors.torch import save_file

        tensors = {"data": self.data.view(torch.uint8) if self.kv_dtype == "fp8" else self.data}
        tensors |= {} if self.scale is None else {"scale": self.scale}
        facts = {"tokens": self.tokens, "kv_dtype": self.kv_dtype, "model": self.model,
                 "version": self.version, "cache_salt": self.cache_salt, "block_size": self.block_size, "starts": self.starts}
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, {"karui_prefix": json.dumps(facts)})

    @staticmethod
    def load(path: str | Path) -> Prefix:
        """The inverse of `save`. Raises `CorruptError` for anything else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["karui_prefix"])
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
            kind = DTYPES[facts["kv_dtype"]]
            data, text = tensors.pop("data"), ("kv_dtype", "model", "version", "cache_salt")
            if facts["kv_dtype"] == "fp8" and data.dtype == torch.uint8:
                data = data.view(kind)
            made = Prefix(tokens=tuple(int(t) for t in facts["tokens"]), data=data, scale=tensors.pop("scale", None),
                          block_size=int(facts["block_size"]), starts=tuple(int(t) for t in facts.get("starts", ())),
                          **{name: str(facts[name]) for name in text})
            shape = made.data.shape
            if tensors or made.data.dtype != kind or len(shape) != 5 or shape[0] not in (1, 2) or (
                    shape[2] != len(made.tokens)) or len(made.starts) not in (0, shape[1]) or (
                    (made.scale is not None) != (made.kv_dtype in SCALED)) or (
                    made.scale is not None and (made.scale.shape != shape[:4] or made.scale.dtype != torch.float32)):
                raise ValueError("shapes or dtypes do not belong together")
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{path} is not a prefix written by `Prefix.save`: {error}") from error
        return made

    def check(self, config: ModelConfig, kv_dtype: str, model: str, version: str, block_size: int) -> None:
        """Raise `KaruiError` unless an engine of these can use it. Bundles are compared where both sides came from one."""
        sides, heads, width = config.cache_shape
        shape = (sides, config.num_layers, len(self.tokens), heads, stored_width(width, self.kv_dtype))
        if tuple(self.data.shape) != shape:
            raise KaruiError(f"this prefix is of another model: its keys are {tuple(self.data.shape)}, this model's {shape}.")
        if self.kv_dtype != kv_dtype:
            raise KaruiError(f"this prefix is in {self.kv_dtype}, the engine's cache in {kv_dtype}; load the engine with "
                             f"kv_dtype={self.kv_dtype!r}.")
        if kv_dtype in STAGED and self.block_size != block_size:
            raise KaruiError(f"this prefix was made in blocks of {self.block_size} tokens, which its {kv_dtype} keys depend on; "
                             f"load the engine with block_size={self.block_size}.")
        if self.version != version or (self.model != model and "" not in (self.model, model)):
            raise KaruiError("this prefix was computed with other weights than the engine has: another bundle, or an update in "
                             "between.")


def check_plain(config: ModelConfig) -> None:
    """Raise `UnsupportedError` for a model whose keys and values are not all that a prefix is."""
    if config.recurrent is not None:
        raise UnsupportedError(f"prefixes of {config.model_type} are not handed over: behind them lies a recurrent state, which "
                               "the format does not hold. Run the prompt where it is decoded.")


def read(
    pool: BlockPool, runner: Runner, groups: LayerGroups, tokens: Sequence[int], namespace: Hashable
) -> tuple[int, torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """(how many tokens, data, scale, starts) of the longest cached beginning of `tokens`, see `Prefix`.

    Raises:
        KaruiError: none is cached.
    """
    blocks, names = pool.match_groups([*tokens, 0], namespace, groups.windows)  # a match leaves the last token out
    if not names:
        raise KaruiError(f"the prefix cache holds no block of this prompt of {len(tokens)} tokens (a block has "
                         f"{pool.block_size}); run it first, with max_tokens=1 for its first token.")
    size, count, starts = pool.block_size, len(names) * pool.block_size, [0] * len(groups.places)
    whole: list[torch.Tensor] = []
    for group, own in enumerate(blocks):
        first, layers = own.count(DEAD) * size, groups.layers(group)
        for part, found in enumerate(runner.read_slots(_slots(own[first // size:], size))):
            if found is None:
                continue
            if len(groups) == 1 and not first:
                whole.append(found)
                continue
            if len(whole) <= part:
                whole.append(torch.zeros(found.shape[0], len(starts), count, *found.shape[3:], dtype=found.dtype))
            _bytes(whole[part])[:, layers, first:] = _bytes(found)[:, :len(layers)]
        for layer in layers:
            starts[layer] = first
    return count, whole[0], whole[1] if len(whole) > 1 else None, tuple(starts) if any(starts) else ()


def write(pool: BlockPool, runner: Runner, groups: LayerGroups, prefix: Prefix, namespace: Hashable) -> int:
    """Put a checked prefix into the cache, as far as there are free blocks; returns how many tokens of it are there then. Where
    layers have a window that is all of it or nothing, because what is needed lies at its end.

    Raises:
        KaruiError: it lacks keys that this engine's layers keep.
    """
    size, name = pool.block_size, pool.index.root(namespace)
    count = len(prefix.tokens) // size
    dead = [num_dead(window, count * size, size) for window in groups.windows]
    if lacking := [layer for layer, (group, _) in enumerate(groups.places)
                   if prefix.starts and prefix.starts[layer] > dead[group] * size]:
        raise KaruiError(f"this prefix has the keys of layer {lacking[0]} from token {prefix.starts[lacking[0]]} on alone, and "
                         f"the engine keeps those from {dead[groups.places[lacking[0]][0]] * size} on: export it from an engine "
                         "with the same runner and block_size.")
    names: list[Any] = []
    for i in range(count):
        name = pool.index.name(name, prefix.tokens[i * size:(i + 1) * size])
        names.append(name)
    held: list[int] = []
    missing: list[tuple[int, int]] = []  # number in the prefix, group
    for i in range(count):
        for group, first in enumerate(dead):
            block = pool.index.find(group_name(names[i], group)) if i >= first else DEAD
            if block is None:
                missing.append((i, group))
            elif block != DEAD:
                pool.share(block)  # so that the next to be taken is not this one
                held.append(block)
    if len(missing) > pool.num_free:
        count = 0 if any(dead) else missing[pool.num_free][0]
    fresh = [(group, i, pool.take()) for i, group in missing if i < count]
    held += [block for _, _, block in fresh]
    for group in range(len(groups)):
        at, to = [i for g, i, _ in fresh if g == group], [block for g, _, block in fresh if g == group]
        if not at:
            continue
        rows, layers = _slots(at, size).long(), groups.layers(group)
        runner.write_slots(_slots(to, size), _part(prefix.data, layers, rows, groups.size),
                           None if prefix.scale is None else _part(prefix.scale, layers, rows, groups.size))
    for group, i, block in fresh:
        pool.enter(group_name(names[i], group), block)
    pool.release(held)
    return count * size


def _part(x: torch.Tensor, layers: list[int], rows: torch.Tensor, size: int) -> torch.Tensor:
    """x [P, all layers, T, ...] at some layers and rows, zeros behind them up to `size` layers."""
    picked = _bytes(x)[:, :, rows] if len(layers) == x.shape[1] else _bytes(x)[:, layers][:, :, rows]
    if size > len(layers):
        picked = torch.cat([picked, picked.new_zeros(len(picked), size - len(layers), *picked.shape[2:])], 1)
    return picked.view(x.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _slots(blocks: Sequence[int], size: int) -> torch.Tensor:
    return torch.tensor([block * size + i for block in blocks for i in range(size)], dtype=torch.int32)
