"""An EAGLE-3 drafting layer in the native kernels: one call per draft. `karui.inference.speculative.eagle3` is the reference."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence

import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.native import library
from karui.kernels.native.arena import Arena
from karui.kernels.native.library import Draft, Drafter, Linear, address
from karui.kernels.native.weights import Packed, pack

_LINEARS = {"fc": "fc", "q": "midlayer.self_attn.q_proj", "k": "midlayer.self_attn.k_proj", "v": "midlayer.self_attn.v_proj",
            "o": "midlayer.self_attn.o_proj", "gate": "midlayer.mlp.gate_proj", "up": "midlayer.mlp.up_proj",
            "down": "midlayer.mlp.down_proj", "head": "lm_head"}
_NORMS = {"embedding_norm": "midlayer.input_layernorm", "stream_norm": "midlayer.hidden_norm",
          "post_norm": "midlayer.post_attention_layernorm", "final_norm": "norm"}


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
        self._lib, arena, held = library.load(), Arena(), []
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
        self.drafter = Drafter(hidden, heads, kv_heads, head_dim, inner, aux, eps, 0,
                               *(matrix(name) for name in _LINEARS.values()), *(address(v) for v in vectors.values()))
        self._held = (held, vectors)
        self.nbytes = sum(t.nbytes for tensors_ in held for t in tensors_)

    def draft(self, embedding: Linear, aux: torch.Tensor, tokens: Sequence[int], positions: Sequence[int], keys: torch.Tensor,
              values: torch.Tensor, past: int, depth: int, width: int, nodes: int,
              least: float = 0.0) -> tuple[list[int], list[int], list[float]]:
        """Run settled rows and draft behind the last.

        Args:
            embedding: the target's, packed.
            aux: [n, A] fp32 streams; tokens, positions: n each, the token behind a row and the row's position.
            keys, values: [at least past + n + depth - 1, kv_heads * head_dim] fp32; rows from `past` on are written.
            depth, width, nodes: `width` candidates at each of up to `depth` depths behind the chain of the likeliest; the `nodes`
                likeliest are kept.
            least: a draft that promises fewer accepted tokens is empty.
        Returns:
            the nodes' target tokens, parents (before their children, -1 for the root) and log-probabilities of their paths.
        """
        n = len(tokens)
        assert aux.shape == (n, self.drafter.aux) and min(len(keys), len(values)) >= past + n + depth - 1
        assert 1 <= width <= self.drafter.head.n
        index = torch.tensor([list(tokens), list(positions)], dtype=torch.int32)
        aux = aux.contiguous()
        out, chances = torch.empty(2, nodes, dtype=torch.int32), torch.empty(nodes)
        step = Draft(n, past, depth, width, nodes, least, address(index[0]), address(index[1]), address(aux), address(keys),
                     address(values), address(out[0]), address(out[1]), address(chances))
        count = self._lib.draft(C.byref(self.drafter), C.byref(embedding), C.byref(step))
        return out[0, :count].tolist(), out[1, :count].tolist(), chances[:count].tolist()
