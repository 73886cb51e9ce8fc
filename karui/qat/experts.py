"""Fused experts taken apart: one linear per projection and expert, so that every method sees and quantizes them like any other.

transformers 5 keeps the experts of a mixture as two 3-D parameters, `gate_up_proj` [experts, 2 f, h] and `down_proj`
[experts, h, f] (gpt-oss: both transposed, rows of gate and up in turn, and a bias for each). They are no `nn.Linear`, so a search
for linears passes them by, and most of the model would silently stay in high precision.

    unfuse: mlp.experts.gate_up_proj, mlp.experts.down_proj  ->  mlp.experts.{e}.gate_proj / up_proj / down_proj.weight (.bias)

The new weights are views of the old parameters: no memory is added. The names are those of the qwen2_moe family's
checkpoints on disk (mixtral's own files say block_sparse_moe.experts.{e}.w1 / w3 / w2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from karui.configs.errors import UnsupportedError


class Expert(nn.Module):
    """down(act(gate x) * (up x)) on the tokens routed here, [tokens, h] -> [tokens, h].

    Args:
        gate_up: [2 f, h], the rows of gate in front of those of up, or in `turn`; bias [2 f] alike, or None.
        down: [h, f]; bias [h] or None.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None = None,
                 down_bias: torch.Tensor | None = None, turn: bool = False) -> None:
        super().__init__()
        half = gate_up.shape[0] // 2
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if turn else (slice(half), slice(half, None))
        for name, rows in (("gate_proj", gate), ("up_proj", up)):
            setattr(self, name, _linear(gate_up[rows], None if gate_up_bias is None else gate_up_bias[rows]))
        self.down_proj = _linear(down, down_bias)


class Experts(nn.ModuleList):
    """The experts of one block; takes the place of the fused module and computes what it computed.

    forward(hidden [tokens, h], top_k_index [tokens, k] int64, top_k_weights [tokens, k]) -> [tokens, h].
    """

    def __init__(self, fused: Any) -> None:
        turn = not getattr(fused, "is_concatenated", True)
        weights = [fused.gate_up_proj.data, fused.down_proj.data]
        if getattr(fused, "is_transposed", False):
            weights = [w.mT for w in weights]
        biases = [getattr(fused, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")]
        super().__init__(
            Expert(gate_up, down, *(None if b is None else b[e] for b in biases), turn=turn)  # type: ignore[misc,arg-type]
            for e, (gate_up, down) in enumerate(zip(*weights)))
        # gated activation of the fused module, by which some families clamp or scale; kept out of the module tree
        gated: Any = fused._apply_gate
        self._gate: Any = (lambda x: gated(_in_turn(x))) if turn else gated
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            if hasattr(fused, name):
                delattr(fused, name)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        expert: Any
        for index, expert in enumerate(self):
            token, slot = (top_k_index == index).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            x = hidden[token]
            y = expert.down_proj(self._gate(torch.cat([expert.gate_proj(x), expert.up_proj(x)], dim=-1)))
            out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out


def unfuse(model: nn.Module) -> list[str]:
    """Replace every fused experts module by `Experts`, in place; returns their names (empty for a dense model).

    Raises:
        UnsupportedError: experts in a layout that is not two matrices each (norms behind them), or another 3-D parameter in the
            model's blocks that no method would reach.
    """
    names = []
    for name, module in list(model.named_modules()):
        if not isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) or module.gate_up_proj.ndim != 3:
            continue
        odd = ["has_post_expert_norm"] if getattr(module, "has_post_expert_norm", False) else []
        odd += [] if getattr(module, "has_gate", True) else ["not has_gate"]
        if odd or not hasattr(module, "_apply_gate") or getattr(module.down_proj, "ndim", 0) != 3:
            raise UnsupportedError(
                f"{name}: fused experts of {type(module).__name__} ({', '.join(odd) or 'unknown layout'}) cannot be quantized; "
                "experts with gate, up and down matrices can (mixtral, qwen2_moe, qwen3_moe, deepseek, gpt-oss and their like)."
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Experts(module))
        names.append(name)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and ".layers." in f".{name}" and "conv" not in name:
            raise UnsupportedError(
                f"{name} is a 3-D parameter {list(parameter.shape)} that no method reaches; quantizing the rest "
                "would silently leave it in high precision, so this model is refused."
            )
    return names


def is_expert(name: str) -> bool:
    """Whether a linear or weight belongs to one expert of a mixture, which sees only the tokens routed to it."""
    parts = name.split(".")
    return any(a == "experts" and b.isdigit() for a, b in zip(parts, parts[1:]))


def is_router(name: str) -> bool:
    """Whether a linear chooses or weighs experts, or the keys of sparse attention: small, and its choices are sensitive to
    rounding, so it stays as it is."""
    return name.removesuffix(".weight").rpartition(".")[2] in ("gate", "router", "shared_expert_gate", "weights_proj")


def left_alone(name: str) -> str:
    """Why a linear of the blocks stays in high precision whatever the targets, or an empty string."""
    if is_router(name):
        return "router: small, and its choices are sensitive to rounding"
    if name.removesuffix(".weight").endswith(("linear_attn.in_proj_ba", "linear_attn.in_proj_a", "linear_attn.in_proj_b")):
        return "decay and strength of a recurrent state: small, and errors in them add up over a text"
    return ""


def _in_turn(halves: torch.Tensor) -> torch.Tensor:
    """[.., gate; up] -> gate and up in turn."""
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.data, requires_grad=False)
    return linear
