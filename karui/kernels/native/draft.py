"""An EAGLE-3 drafting layer in the native kernels: one call per draft. `karui.inference.speculative.eagle3` is the reference."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.native import library
from karui.kernels.native.arena import Arena
from karui.kernels.native.build import build
from karui.kernels.native.library import Linear, address
from karui.kernels.native.weights import Packed, pack

SOURCES = ("draft.cpp", "ops.h", "gemm.h", "simd.h", "weights.h")
_LINEARS = {"fc": "fc", "q": "midlayer.self_attn.q_proj", "k": "midlayer.self_attn.k_proj", "v": "midlayer.self_attn.v_proj",
            "o": "midlayer.self_attn.o_proj", "gate": "midlayer.mlp.gate_proj", "up": "midlayer.mlp.up_proj",
            "down": "midlayer.mlp.down_proj", "head": "lm_head"}
_NORMS = {"embedding_norm": "midlayer.input_layernorm", "stream_norm": "midlayer.hidden_norm",
          "post_norm": "midlayer.post_attention_layernorm", "final_norm": "norm"}
_SHAPE = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "aux")


class _Drafter(C.Structure):
    """`Drafter` of draft.cpp."""

    _fields_: ClassVar[Any] = [
        *((n, C.c_int32) for n in _SHAPE), ("eps", C.c_float), ("padding", C.c_int32), *((n, Linear) for n in _LINEARS),
        *((n, C.c_void_p) for n in ("inv_freq", *_NORMS, "ids"))]


class _Draft(C.Structure):
    """`Draft` of draft.cpp."""

    _fields_: ClassVar[Any] = [
        *((n, C.c_int32) for n in ("rows", "past", "depth", "top")),
        *((n, C.c_void_p) for n in ("tokens", "positions", "aux", "keys", "values", "out_tokens", "out_log_probs"))]


@cache
def _library() -> Any:
    lib = C.CDLL(str(build(library.load().isa, SOURCES)))
    lib.karui_draft.restype, lib.karui_draft.argtypes = None, [C.c_void_p] * 3
    for which, structure in enumerate((_Drafter, _Draft)):
        assert lib.karui_draft_sizes(which) == C.sizeof(structure), f"{structure.__name__} differs between C++ and Python"
    return lib


class DraftLayer:
    """The packed layer.

    Args:
        tensors: weights by the published names of an EAGLE-3 head, `d2t` among them.
        heads, kv_heads, head_dim, eps, theta: of the layer; head_dim even and up to 512.
        spec: grid of its matrices, "none" for fp32.
    Raises:
        UnsupportedError: a head_dim that the kernels do not serve.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, heads: int, kv_heads: int, head_dim: int, eps: float, theta: float,
                 spec: QuantSpec) -> None:
        from karui.kernels.quantize import quantize

        if head_dim > 512 or head_dim % 2:
            raise UnsupportedError(f"head_dim {head_dim} is not supported by the native draft: even and at most 512.")
        self._lib, arena, held = _library(), Arena(), []
        self.row = kv_heads * head_dim

        def matrix(name: str) -> Linear:
            weight = tensors[f"{name}.weight"].float()
            packed: Packed = pack(library.load(), name, weight if spec.format == "none" else quantize(weight, spec, name=name),
                                  arena=arena)
            held.append(packed.tensors)
            return packed.linear

        half = head_dim // 2
        vectors = {"inv_freq": theta ** (-torch.arange(half, dtype=torch.float32) / half),
                   **{k: tensors[f"{name}.weight"].float().contiguous() for k, name in _NORMS.items()},
                   "ids": tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))}
        hidden, aux = tensors["fc.weight"].shape
        inner = tensors["midlayer.mlp.gate_proj.weight"].shape[0]
        self._drafter = _Drafter(hidden, heads, kv_heads, head_dim, inner, aux, eps, 0,
                                 *(matrix(name) for name in _LINEARS.values()), *(address(v) for v in vectors.values()))
        self._held = (held, vectors)
        self.nbytes = sum(t.nbytes for tensors_ in held for t in tensors_)

    def draft(self, embedding: Linear, aux: torch.Tensor, tokens: Sequence[int], positions: Sequence[int], keys: torch.Tensor,
              values: torch.Tensor, past: int, depth: int, top: int) -> tuple[list[list[int]], list[list[float]]]:
        """Run settled rows and draft a chain behind the last.

        Args:
            embedding: the target's, packed.
            aux: [n, A] fp32 streams; tokens, positions: n each, the token behind a row and the row's position.
            keys, values: [at least past + n + depth - 1, kv_heads * head_dim] fp32; rows from `past` on are written.
        Returns:
            per depth, the `top` likeliest target tokens behind the chain of the likeliest, and their log-probabilities.
        """
        n = len(tokens)
        assert aux.shape == (n, self._drafter.aux) and min(len(keys), len(values)) >= past + n + depth - 1
        assert 1 <= top <= self._drafter.head.n
        index = torch.tensor([list(tokens), list(positions)], dtype=torch.int32)
        aux = aux.contiguous()
        out, chances = torch.empty(depth, top, dtype=torch.int32), torch.empty(depth, top)
        step = _Draft(n, past, depth, top, address(index[0]), address(index[1]), address(aux), address(keys), address(values),
                      address(out), address(chances))
        self._lib.karui_draft(C.byref(self._drafter), C.byref(embedding), C.byref(step))
        return out.tolist(), chances.tolist()
