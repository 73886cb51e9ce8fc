"""Moving a per-channel factor between a linear and what feeds it, exactly: what AWQ and SmoothQuant stand on.

    linear(x) = (W diag(s)) (x / s), and x / s comes for free by dividing the producer's output channels by s.

Producers found in a block: the norm in front of q, k, v and of gate, up; v_proj for o_proj (grouped-query attention repeats
each value
head, so the factor is shared by the query heads of one value head); up_proj for down_proj. A pair counts only if it is proven
on the block itself: after folding random factors the block's output must stay what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from karui.qat.calibration import Block, Group


@dataclass(frozen=True)
class Pair:
    """A producer of channels and the linears that read them.

    Attributes:
        producer: weight name of a norm [in] or linear [out, in].
        repeat: query heads per value head (1: channels map one to one); head: channels per head.
        offset: 1.0 for norms that scale by (1 + weight), else 0.
    """

    producer: str
    module: nn.Module
    consumers: tuple[str, ...]
    repeat: int = 1
    head: int = 1
    offset: float = 0.0

    def share(self, s: torch.Tensor) -> torch.Tensor:
        """The nearest factor this pair can fold exactly: the geometric mean over channels that come from one producer channel."""
        if self.repeat == 1:
            return s
        grouped = s.log().view(-1, self.repeat, self.head).mean(1, keepdim=True)
        return grouped.exp().expand(-1, self.repeat, -1).reshape(-1)

    def fold(self, s: torch.Tensor, linears: dict[str, nn.Linear]) -> None:
        """Divide the producer by s [in] (already shared) and multiply the consumers' input columns by it, in place."""
        weight: torch.Tensor = self.module.weight.data  # type: ignore[assignment]
        own = s.view(-1, self.repeat, self.head)[:, 0].reshape(-1) if self.repeat > 1 else s
        if weight.ndim == 1:
            weight.copy_((weight + self.offset) / own - self.offset)
        else:
            weight.div_(own[:, None])
        bias = getattr(self.module, "bias", None)
        if isinstance(bias, torch.Tensor):
            bias.data.div_(own)
        for name in self.consumers:
            linears[name].weight.data.mul_(s[None, :])


def pairs(block: Block, groups: list[Group]) -> list[Pair]:
    """Every foldable pair of the block, each proven by running one row with random factors."""
    modules = dict(block.module.named_modules())
    linears = block.linears_all
    found: list[Pair] = []
    for group in groups:
        if group.routed:
            continue
        # a factor must reach every reader of the tensor, also linears outside the targets
        for pair in _candidates(block, group, modules, linears):
            if _proven(block, pair, linears):
                found.append(pair)
                break
    return found


def all_groups(block: Block) -> list[Group]:
    """Groups over all linears of the block, targeted or not."""
    return [g for stage in replace(block, linears=block.linears_all).stages() for g in stage]


def _candidates(block: Block, group: Group, modules: dict[str, nn.Module], linears: dict[str, nn.Linear]) -> list[Pair]:
    width = linears[group.names[0]].in_features
    out: list[Pair] = []
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        full = f"{block.name}.{name}.weight"
        if full in group.names or not isinstance(weight, torch.Tensor):
            continue
        if weight.ndim == 1 and len(weight) == width:
            out.append(Pair(full, module, group.names, offset=_norm_offset(module, width, weight)))
        elif isinstance(module, nn.Linear) and len(group.names) == 1:
            rows = module.out_features
            if rows == width:
                out.append(Pair(full, module, group.names))
            elif width % rows == 0 and (head := getattr(modules.get("self_attn"), "head_dim", None)) and rows % head == 0:
                out.append(Pair(full, module, group.names, repeat=width // rows, head=head))
    return out


def _norm_offset(module: nn.Module, width: int, weight: torch.Tensor) -> float:
    """1.0 when the norm scales by (1 + weight): with the weight at zero its output is not zero."""
    kept = weight.detach().clone()
    weight.data.zero_()
    try:
        with torch.no_grad():
            one_plus = bool(module(torch.ones(1, 1, width, dtype=weight.dtype, device=weight.device)).any())
    except TypeError:  # a norm that wants its gate too (DeltaNet)
        one_plus = False
    weight.data.copy_(kept)
    return 1.0 if one_plus else 0.0


def _proven(block: Block, pair: Pair, linears: dict[str, nn.Linear]) -> bool:
    x = block.inputs[:1].to(block.device)
    touched = [pair.module, *(linears[n] for n in pair.consumers)]
    kept = [{k: v.detach().clone() for k, v in m.state_dict().items()} for m in touched]
    width = linears[pair.consumers[0]].in_features
    factors = torch.rand(width, generator=torch.Generator().manual_seed(0)).to(block.device) + 0.5
    with torch.no_grad():
        before = block.forward(x) - x
        pair.fold(pair.share(factors), linears)
        after = block.forward(x) - x
    for module, state in zip(touched, kept):
        module.load_state_dict(state)
    return float((after - before).norm()) <= 1e-3 * float(before.norm())
