"""Native CPU kernels: C++17, compiled on first use, called through ctypes. No dependency on torch's ABI and no OpenMP.

    available()          whether they can serve (compiles them on the first call); `unavailable()` says why not
    load(isa)            the `Library` for an instruction set; KARUI_ISA=avx512|avx2|neon|generic forces one
    pack, linear         a weight in the kernels' layout, and one product with it
    argmax, top_k        over rows of logits
    sample               one token per row of logits
    quiet_torch()        keep torch's own threads asleep while the team works

`karui.inference.models.native.NativeRunner` runs whole engine steps with them. Activations: with `activation_bits=8` the input of
each integer linear is quantized symmetrically to int8, scale = max|x| / 127 and code = round(x / scale), over blocks of 32
inputs (or per token when the weight's spec says a8); products within a block are exact integers, blocks are summed in fp32 in a
fixed order. With 16, weights are dequantized on the fly and everything is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from karui.kernels.native.build import chosen_isa, isas
from karui.kernels.native.library import Library, address, available, load, unavailable
from karui.kernels.native.weights import Packed, linear, pack

__all__ = [
    "Library", "Packed", "argmax", "available", "chosen_isa", "isas", "linear", "load", "pack", "quiet_torch", "sample",
    "top_k", "unavailable",
]


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[L, V] fp32 -> int32 [L], the first of equal largest values, as `torch.argmax` of a row finds it."""
    x = logits.float().contiguous()
    out = torch.empty(x.shape[0], dtype=torch.int32)
    load().argmax(address(x), x.shape[0], x.shape[1], address(out))
    return out


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, V] fp32 -> values fp32 and indices int32, both [L, k], largest first, the lower index first among equals."""
    x = logits.float().contiguous()
    k = min(k, x.shape[1])
    values, indices = torch.empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int32)
    load().top_k(address(x), x.shape[0], x.shape[1], k, address(values), address(indices))
    return values, indices


DRAW = np.dtype([("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("u", "f8")])
"""`Draw` of sampling.h."""


def sample(logits: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token per row: logits fp32 [L, V], draws `DRAW` [L] -> tokens int32 [L], their probabilities fp32 [L].

    Temperature (0: the first of equal largest), top-k (0: all; ties stay), top-p, min-p, then the token at quantile `u` of what
    is left. A row depends on nothing but itself.
    """
    x, draws = np.ascontiguousarray(logits, dtype=np.float32), np.ascontiguousarray(draws, dtype=DRAW)
    assert x.ndim == 2 and len(x) == len(draws)
    tokens, probabilities = np.empty(len(x), dtype=np.int32), np.empty(len(x), dtype=np.float32)
    load().sample(x.ctypes.data, x.shape[0], x.shape[1], draws.ctypes.data, tokens.ctypes.data, probabilities.ctypes.data)
    return tokens, probabilities


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Torch on one thread inside, restored after.

    Threads of torch's OpenMP pool spin for a while after each parallel operation and then take cores from the team: a step
    takes twice as long. Wrap a decoding loop in this, or set OMP_WAIT_POLICY=PASSIVE before torch is imported.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
