"""Which samples form an optimizer step, how a step is cut into micro-batches and ranks, and how one becomes a `PackedBatch`.

Everything here is a pure function of its arguments. Exact resume is therefore: plan the epoch again and go on at step k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from karui.configs.errors import KaruiError
from karui.trainers.data.types import IGNORE, PackedBatch, Sample

Micro = list[int]  # sample indices of one micro-batch
Step = list[Micro]  # the micro-batches one rank runs before one optimizer update


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True, window: int | None = None) -> np.ndarray:
    """[num_samples] int64: the order of an epoch.

    Samples are sorted by a 64-bit hash (splitmix64) of seed, epoch and index: no library's random stream is involved, so
    the order is the same under every version and on every machine. With a `window` only neighbours of so many samples change
    places, and the windows their order: what is read from a large file in one stretch then stays close together.
    """
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    with np.errstate(over="ignore"):
        key = _splitmix64(_splitmix64(np.array([seed], np.int64).astype(np.uint64)) + np.uint64(epoch))
        order = np.argsort(_splitmix64(key + np.arange(num_samples, dtype=np.uint64)), kind="stable").astype(np.int64)
        if window is None or window >= num_samples:
            return order
        place = _splitmix64(~key + np.arange(math.ceil(num_samples / window), dtype=np.uint64))
        return order[np.argsort(place[order // window], kind="stable")]


def _splitmix64(value: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): mixes 64 bits, a bijection."""
    z = value + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan(Sequence[Step]):
    """The steps of one epoch for one rank; step k is computed when asked for, so skipping to it costs nothing.

    Step k trains on `order[k * batch:(k + 1) * batch]` over all ranks, whatever the world size and `micro_tokens`. The last
    step of an epoch holds what is left over, between 1 and `batch` samples: no sample is dropped and none is repeated.
    """

    lengths: np.ndarray
    order: np.ndarray
    batch: int
    micro_tokens: int
    rank: int
    world: int
    packing: bool

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.batch)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= k < len(self):
            raise IndexError(f"step {index} of an epoch of {len(self)}")
        bins = _spread(self._micros(self.samples_of(k)), self.lengths, self.world)
        return [bins[at + self.rank] for at in range(0, len(bins), self.world)]

    def __iter__(self) -> Iterator[Step]:
        return (self[k] for k in range(len(self)))

    def samples_of(self, step: int) -> np.ndarray:
        """The samples all ranks together train on in this step."""
        return self.order[step * self.batch : (step + 1) * self.batch]

    def _micros(self, samples: np.ndarray) -> list[Micro]:
        longest_first = samples[np.argsort(-self.lengths[samples], kind="stable")]
        if not self.packing:
            return [[int(i)] for i in longest_first]
        return first_fit(longest_first, self.lengths, self.micro_tokens)


def plan_epoch(lengths: Sequence[int] | np.ndarray, *, batch: int, micro_tokens: int, rank: int = 0, world: int = 1,
               seed: int = 0, epoch: int = 0, shuffle: bool = True, packing: bool = True, window: int | None = None) -> EpochPlan:
    """The optimizer steps of one epoch for one rank, each a list of micro-batches, each a list of sample indices.

    With packing a micro-batch holds samples of at most `micro_tokens` tokens together (first-fit decreasing); a longer
    sample is a micro-batch alone. Without packing every micro-batch is one sample, longest first. All ranks get the same
    number of micro-batches in a step, because collectives must meet: the largest are split as long as there are samples to
    split, and what is missing then is an empty list, which `collate` turns into a filler without loss.

    Args:
        lengths: [N] tokens per sample.
        batch: samples per optimizer step, over all ranks.
        window: see `epoch_order`.

    Raises:
        KaruiError: no samples, or a rank outside the world.
    """
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) == 0:
        raise KaruiError("no samples to plan an epoch over; the data set is empty.")
    if batch < 1 or micro_tokens < 1 or not 0 <= rank < world:
        raise KaruiError(f"plan_epoch: batch {batch} and micro_tokens {micro_tokens} must be at least 1, "
                         f"and rank {rank} must lie in 0..{world - 1}.")
    return EpochPlan(lengths=sizes, order=epoch_order(len(sizes), seed, epoch, shuffle, window), batch=batch,
                     micro_tokens=micro_tokens, rank=rank, world=world, packing=packing)


def total_steps(num_samples: int, *, batch: int, epochs: float | None, steps: int | None) -> int:
    """Optimizer steps of the whole run: `steps` when given, else `epochs` (may be fractional) of ceil(samples / batch)."""
    if steps is not None:
        return steps
    return max(1, math.ceil((epochs or 1.0) * math.ceil(num_samples / batch) - 1e-9))


def first_fit(samples: np.ndarray, lengths: np.ndarray, capacity: int) -> list[Micro]:
    """Bins of at most `capacity` tokens; each sample goes to the first bin with room, a longer one to a bin of its own.

    With `samples` sorted by falling length this is first-fit decreasing: at most 11/9 of the optimal number of bins, plus
    6/9 (Dósa 2007).
    """
    bins: list[Micro] = []
    room: list[int] = []
    for index in samples:
        size = int(lengths[index])
        at = next((b for b, free in enumerate(room) if free >= size), None)
        if at is None:
            bins.append([int(index)])
            room.append(capacity - size)
        else:
            bins[at].append(int(index))
            room[at] -= size
    return bins


def _spread(bins: list[Micro], lengths: np.ndarray, world: int) -> list[Micro]:
    """As many bins as a multiple of `world`, largest first, so that bins that run side by side are of like size."""

    def tokens(micro: Micro) -> int:
        return int(lengths[micro].sum()) if micro else 0

    goal = math.ceil(len(bins) / world) * world
    while len(bins) < goal:
        divisible = [b for b in bins if len(b) > 1]
        if not divisible:
            bins = bins + [[]] * (goal - len(bins))
            break
        largest = max(divisible, key=tokens)
        halves: tuple[Micro, Micro] = ([], [])
        for index in sorted(largest, key=lambda i: -int(lengths[i])):
            min(halves, key=tokens).append(index)
        at = bins.index(largest)
        bins = [*bins[:at], *halves, *bins[at + 1 :]]
    return sorted(bins, key=lambda b: -tokens(b))


def collate(samples: Sequence[Sample]) -> PackedBatch:
    """Lay samples end to end. No samples: one token without loss, for a rank that has nothing to do while others run.

    Position t predicts token t + 1 of its own document, so the target of a document's last position is always -100.
    """
    if not samples:
        one = torch.zeros(1, dtype=torch.int64)
        return PackedBatch(tokens=one, positions=one.clone(), cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
                           targets=torch.full((1,), IGNORE), num_supervised=0, num_samples=0, max_length=1)
    sizes = np.array([len(s) for s in samples], np.int64)
    cu = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.concatenate([s.ids for s in samples]).astype(np.int64)
    mask = np.concatenate([s.loss_mask for s in samples])
    mask[cu[:-1]] = False
    targets = np.full(len(tokens), IGNORE, np.int64)
    targets[:-1] = np.where(mask[1:], tokens[1:], IGNORE)
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(cu[:-1], sizes)
    return PackedBatch(tokens=torch.from_numpy(tokens), positions=torch.from_numpy(positions),
                       cu_seqlens=torch.from_numpy(cu.astype(np.int32)), targets=torch.from_numpy(targets),
                       num_supervised=int(mask.sum()), num_samples=len(samples), max_length=int(sizes.max()))
