"""Which linear layers of a model train in low precision, and the reason for each that does not."""

from __future__ import annotations

import math

from torch import nn

from karui.configs.errors import KaruiError, nearest
from karui.lowprec.precision import LayerPolicy, Precision

_ROUTERS = ("router", "gate", "shared_expert_gate", "switch", "wg")
_HEADS = ("lm_head", "embed_out", "output_layer", "score", "classifier", "v_head")
_FIRST, _LAST, _LAST_SHARE = 2, 8, 0.15


def decide(model: nn.Module, precision: Precision) -> dict[str, str]:
    """Every `nn.Linear` by full name -> why it stays in high precision, or "" where it trains in low precision.

    Raises:
        KaruiError: a name in `skip` or `only` that fits no linear; an odd dimension with padding off; nothing left.
    """
    policy = precision.policy
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    _check_names(policy, linears)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    block_of, count = _blocks(model, linears)
    first, last = _ends(policy, precision, count)
    reasons: dict[str, str] = {}
    for name, module in linears.items():
        leaf, block = name.rpartition(".")[2], block_of.get(name)
        if module is head or leaf in _HEADS:
            reason = "output head"
        elif id(module.weight) in embeddings:
            reason = "shares its weight with the embedding"
        elif leaf in _ROUTERS:
            reason = "router"
        elif ".lora_" in f".{name}":
            reason = "adapter"
        elif not module.weight.is_floating_point():
            reason = f"its weight is stored as {module.weight.dtype}"
        elif any(_fits(name, s) for s in policy.skip):
            reason = "named in policy.skip"
        elif policy.only and not any(_fits(name, o) for o in policy.only):
            reason = "not named in policy.only"
        elif block is not None and block < first:
            reason = f"one of the first {first} blocks"
        elif block is not None and block >= count - last:
            reason = f"one of the last {last} blocks"
        elif min(module.in_features, module.out_features) < policy.min_features:
            reason = f"narrower than {policy.min_features}"
        else:
            reason = ""
            if not precision.pad:
                _check_multiple(name, module, precision)
        reasons[name] = reason
    if not any(r == "" for r in reasons.values()):
        raise KaruiError(
            f"no linear layer of {type(model).__name__} would train in {precision.recipe}: "
            + "; ".join(sorted({r for r in reasons.values()}) or ["it has none"])
            + "."
        )
    return reasons


def padding(module: nn.Linear, precision: Precision) -> str:
    """What is padded along the contractions over the layer's own dimensions, as text; "" for nothing."""
    multiple = _multiple(precision)
    out = []
    for label, size in (("in", module.in_features), ("out", module.out_features)):
        if size % multiple:
            out.append(f"{label} {size} -> {size + -size % multiple}")
    return ", ".join(out)


def _multiple(precision: Precision) -> int:
    formats = precision.at(0)
    return max(o.multiple for g in formats for o in precision.operands(g, formats[g]))


def _check_multiple(name: str, module: nn.Linear, precision: Precision) -> None:
    if text := padding(module, precision):
        raise KaruiError(
            f"{name}: {precision.recipe} needs multiples of {_multiple(precision)}, and padding is off ({text}); "
            f"set pad: true, or name the layer in policy.skip."
        )


def _ends(policy: LayerPolicy, precision: Precision, count: int) -> tuple[int, int]:
    """(first, last) blocks that stay high: the policy's, else a 4-bit recipe's defaults scaled to `count` blocks."""
    first = last = 0
    if precision.four_bit and count > 2:
        first, last = min(_FIRST, math.ceil(count / 20)), min(_LAST, math.ceil(count * _LAST_SHARE))
    return (
        first if policy.first_blocks is None else policy.first_blocks,
        last if policy.last_blocks is None else policy.last_blocks,
    )


def _blocks(model: nn.Module, linears: dict[str, nn.Linear]) -> tuple[dict[str, int], int]:
    """The block index of each linear, and how many blocks there are: the outermost list that holds the most linears."""
    best: tuple[int, int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            inside = sum(n.startswith(f"{name}.") for n in linears)
            if inside and (best is None or (inside, -name.count(".")) > best[:2]):
                best = (inside, -name.count("."), name, module)
    if best is None:
        return {}, 0
    prefix = f"{best[2]}."
    return {n: int(n[len(prefix) :].split(".")[0]) for n in linears if n.startswith(prefix)}, len(best[3])


def _fits(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted) or name.startswith(wanted + ".")


def _check_names(policy: LayerPolicy, linears: dict[str, nn.Linear]) -> None:
    for wanted in (*policy.skip, *policy.only):
        if not any(_fits(n, wanted) for n in linears):
            leaves = sorted({n.rpartition(".")[2] for n in linears})
            raise KaruiError(
                f"low-precision policy names {wanted!r}, which is no linear layer here; there are: {', '.join(leaves)}."
                f"{nearest(wanted, leaves)}"
            )
