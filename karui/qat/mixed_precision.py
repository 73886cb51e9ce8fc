"""Mixed precision by sensitivity: which grid each linear gets, so that a budget of bits buys the least loss.

    sensitivity   D_g,s = what the loss rises by with only the linears of tie group g on grid s
    plan          minimise  sum_g D_g,s(g)   subject to   sum_g bits_g,s(g) <= budget            a multiple-choice knapsack

Increases are measured, one group and grid at a time, over calibration rows (HAWQ has a curvature in their place, arXiv
1905.03696); they are taken to add up. The knapsack is solved exactly by dynamic programming over the budget in units of the
greatest common divisor of all sizes. Linears that a runtime fuses share one grid: q, k, v; gate, up; all experts of a block.
Otherwise bits that differ inside a fused weight break the export (auto-round 2174, vLLM 47473).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.qat.rtn import RTNConfig, rounded

TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MAX_UNITS = 2_000_000  # cells of the table per group


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Linears that share one grid.

    Attributes:
        name: the block's path and what is tied, e.g. `model.layers.0.self_attn.q+k+v`.
        weights: weight names.
        sizes: [out, in] of each.
    """

    name: str
    weights: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]

    def bits(self, spec: QuantSpec) -> int:
        """Stored bits on that grid, scales and zero points included."""
        return sum(stored_bits(size, spec) for size in self.sizes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the knapsack chose.

    Attributes:
        specs: weight name -> grid.
        increase: sum of the measured loss increases, in nats per token.
        bits: stored bits of all weights in the plan; budget_bits: what was allowed; weights: how many values these are.
        rows: per tie group its name, grid, stored bits and loss increase.
    """

    specs: dict[str, QuantSpec]
    increase: float
    bits: int
    budget_bits: int
    weights: int
    rows: tuple[tuple[str, str, int, float], ...]

    @property
    def bits_per_weight(self) -> float:
        return self.bits / self.weights

    def dump(self) -> dict[str, Any]:
        """JSON-able, for a manifest."""
        return {
            "bits_per_weight": round(self.bits_per_weight, 4), "bits": self.bits, "budget_bits": self.budget_bits,
            "loss_increase": self.increase,
            "groups": [{"name": n, "spec": s, "bits": b, "loss_increase": d} for n, s, b, d in self.rows],
        }  # fmt: skip

    def table(self) -> str:
        """To print."""
        width = max(len(n) for n, *_ in self.rows)
        lines = [f"{n:<{width}}  {s:<8} {b / 8e3:>10,.1f} kB  loss {d:+.5f}" for n, s, b, d in self.rows]
        total = f"{self.bits_per_weight:.3f} bits per weight, {self.bits / 8e6:,.2f} of {self.budget_bits / 8e6:,.2f} MB"
        return "\n".join([*lines, f"{total}, loss {self.increase:+.5f} if increases add up"])


def stored_bits(size: tuple[int, int], spec: QuantSpec) -> int:
    """Bits of a weight [out, in]: codes, scales, zero points."""
    out, width = size
    code = {"ternary": 2, "binary": 1, "none": 16}.get(spec.format, spec.bits)
    if spec.format == "none":
        return out * width * 16
    scales = 1 if spec.granularity == "tensor" else out * (width // spec.group_size if spec.group_size else 1)
    scale = {"float16": 16, "bfloat16": 16, "float32": 32, "e8m0": 8, "e4m3": 8}[spec.scale_dtype]
    return out * width * code + scales * (scale + (0 if spec.symmetric else 8))


def tie_groups(linears: Mapping[str, nn.Linear]) -> list[Tie]:
    """The linears (by weight name) in groups that must share a grid, in the model's order."""
    found: dict[str, list[str]] = {}
    for name in linears:
        found.setdefault(_tie_of(name), []).append(name)
    return [
        Tie(name=k, weights=tuple(v), sizes=tuple((linears[n].out_features, linears[n].in_features) for n in v))
        for k, v in found.items()
    ]  # fmt: skip


def _tie_of(name: str) -> str:
    path = name.removesuffix(".weight")
    experts = re.match(r"(.*\.experts)\.\d+\.", path)
    if experts:
        return experts[1]
    parent, _, last = path.rpartition(".")
    for tie in TIES:
        if last in tie:
            return f"{parent}.{'+'.join(t.removesuffix('_proj') for t in tie)}"
    return path


class Kept(Protocol):
    """A mapping of what was measured; `save` is called after every tie group."""

    def __contains__(self, key: object) -> bool: ...
    def __getitem__(self, key: tuple[str, str]) -> float: ...
    def __setitem__(self, key: tuple[str, str], value: float) -> None: ...
    def save(self) -> None: ...


def measure(
    model: nn.Module,
    ties: Sequence[Tie],
    specs: Sequence[QuantSpec],
    increase: Callable[[Tie], float],
    progress: Callable[[int, int], None] | None = None,
    kept: Kept | None = None,
) -> dict[tuple[str, str], float]:
    """(tie name, grid) -> loss increase; the model ends unchanged.

    `increase` scores the model as it stands, changed in the linears of one tie only, in nats per token. What is in `kept` is not
    measured again.

    The codes are rounding to nearest with a scale search, whatever method quantizes later: only their order matters.

    Raises:
        KaruiError: an increase that is not finite (names the group and the grid).
    """
    found: dict[tuple[str, str], float] = {}
    total = len(ties) * len(specs)
    for i, tie in enumerate(ties):
        modules: list[Any] = [model.get_submodule(n.removesuffix(".weight")) for n in tie.weights]
        high = [m.weight.detach().clone() for m in modules]
        for j, spec in enumerate(specs):
            key = tie.name, str(spec)
            if spec.format == "none":
                found[key] = 0.0
            elif kept is not None and key in kept:
                found[key] = kept[key]
            else:
                with torch.no_grad():
                    for name, m, w in zip(tie.weights, modules, high):
                        m.weight.copy_(_values(w, spec, name))
                found[key] = increase(tie)
                if not math.isfinite(found[key]):
                    raise KaruiError(
                        f"mixed precision: {tie.name} on {spec} raises the loss by {found[key]}; leave that grid out, or mend "
                        "the model where it gives such numbers by itself."
                    )
                if kept is not None:
                    kept[key] = found[key]
            if progress is not None:
                progress(i * len(specs) + j + 1, total)
        with torch.no_grad():
            for m, w in zip(modules, high):
                m.weight.copy_(w)
        if kept is not None:
            kept.save()
    return found


def _values(w: torch.Tensor, spec: QuantSpec, name: str) -> torch.Tensor:
    return rounded(w.float(), spec, RTNConfig(steps=12), name).dequantize()


def budget_of(text: str, weights: int) -> int:
    """A budget in bits from its spelling: `2.5` or `2.5bits` per weight, `40MB`, `500kB`, `123456B`.

    Raises:
        KaruiError: another spelling, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(bits?|[kMG]?B)?\s*", text)
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if not match or value <= 0:
        raise KaruiError(f"budget {text!r}: write bits per weight (2.5) or bytes of the quantized linears (40MB, 500kB).")
    unit = match[2] or "bits"
    if unit.startswith("bit"):
        return int(value * weights)
    return int(value * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit] * 8)


def choose_plan(
    ties: Sequence[Tie], specs: Sequence[QuantSpec], increases: Mapping[tuple[str, str], float], budget_bits: int
) -> Plan:
    """The exact minimum of the summed increases within the budget.

    Raises:
        KaruiError: even the smallest grid everywhere is over the budget (says what it needs), or nothing to choose from.
    """
    if not ties or not specs:
        raise KaruiError("mixed precision: no linears or no grids to choose from.")
    cost = [[tie.bits(s) for s in specs] for tie in ties]
    least = sum(map(min, cost))
    weights = sum(o * i for tie in ties for o, i in tie.sizes)
    if least > budget_bits:
        raise KaruiError(
            f"mixed precision: a budget of {budget_bits / weights:.3f} bits per weight ({budget_bits / 8e6:.2f} MB) is below "
            f"what the smallest grids take, {least / weights:.3f} ({least / 8e6:.2f} MB); raise it or offer a smaller grid."
        )
    gain = [[increases[tie.name, str(s)] for s in specs] for tie in ties]
    picked = _knapsack(cost, gain, min(budget_bits, sum(map(max, cost))))
    rows = tuple((t.name, str(specs[c]), cost[i][c], gain[i][c]) for i, (t, c) in enumerate(zip(ties, picked)))
    return Plan(
        specs={n: specs[c] for t, c in zip(ties, picked) for n in t.weights}, increase=sum(r[3] for r in rows),
        bits=sum(r[2] for r in rows), budget_bits=budget_bits, weights=weights, rows=rows,
    )  # fmt: skip


def _knapsack(cost: list[list[int]], gain: list[list[float]], budget: int) -> list[int]:
    """Index of the choice per group. Exact: costs above each group's cheapest are counted in their common divisor."""
    least = [min(c) for c in cost]
    extra = [[c - low for c in row] for row, low in zip(cost, least)]
    unit = math.gcd(*(e for row in extra for e in row)) or 1
    room = (budget - sum(least)) // unit
    if room > _MAX_UNITS:
        raise KaruiError(
            f"mixed precision: the sizes have only {unit} bits in common, which needs a table of {room:,} columns; "
            "offer grids with one group size, so that sizes are multiples of one another."
        )
    inf = float("inf")
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken = []
    for row, gains in zip(extra, gain):
        offers = torch.full((len(row), room + 1), inf, dtype=torch.float64)
        for c, (e, g) in enumerate(zip(row, gains)):
            if (u := e // unit) <= room:
                offers[c, u:] = best[: room + 1 - u] + g
        best, choice = offers.min(0)
        taken.append(choice)
    picked, at = [], room
    for row, choice in zip(reversed(extra), reversed(taken)):
        c = int(choice[at])
        picked.append(c)
        at -= row[c] // unit
    return picked[::-1]
