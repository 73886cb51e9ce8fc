"""The training linear: three GEMMs over the oracle's quantizers, as one autograd function.

Every operand is quantized from high precision along its own contraction; where a tensor's codes, transposed, are the codes of
the transpose (one scale per tensor), the input is kept for the backward pass as those codes, one byte per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from karui.kernels.quantize.compat import Compat
from karui.kernels.quantize.fused import NoiseKey
from karui.lowprec.backends import multiply
from karui.lowprec.operand import Coded, encode, encode_both, largest, rebuild, sees, tensors_of, transpose, values
from karui.lowprec.precision import GEMMS, Gemm, GemmFormat, Operand, Precision
from karui.lowprec.state import LowPrecisionState, keep_dtypes

_NOISE = {"dgrad": 0, "wgrad": 1}


@dataclass(frozen=True)
class Plan:
    """One layer's operands at one moment: gemm -> (A, B), gemm -> library, and where noise and state are keyed."""

    operands: dict[Gemm, tuple[Operand, Operand]]
    library: dict[Gemm, Compat]
    backend: str
    layer: int
    seed: int

    @property
    def delayed(self) -> bool:
        return any(operand.delayed for pair in self.operands.values() for operand in pair)

    @property
    def stochastic(self) -> bool:
        return any(operand.stochastic for pair in self.operands.values() for operand in pair)

    @property
    def shares_input(self) -> bool:
        """The input's fprop codes serve wgrad too."""
        a, b = self.operands["fprop"][0], self.operands["wgrad"][1]
        return a == b and a.symmetric and self.library["fprop"] == self.library["wgrad"]


def make_plan(precision: Precision, formats: dict[Gemm, GemmFormat], backend: str, layer: int) -> Plan:
    return Plan(
        operands={g: precision.operands(g, formats[g]) for g in GEMMS},
        library={g: precision.library(formats[g]) for g in GEMMS},
        backend=backend,
        layer=layer,
        seed=precision.seed,
    )


class LowPrecisionLinear(nn.Linear):
    """`nn.Linear` whose GEMMs run in low precision; the same parameters, or codes in their place where the weight is frozen.

    x [..., in] in any float dtype; y [..., out] in the autocast dtype if autocast is on, else x's. The weight is quantized from
    its own dtype (the master weights), not from autocast's.

    Made by `LowPrecision.prepare`. With a frozen weight kept as codes, `weight` is None and the buffers `fprop_*` and
    `dgrad_*` hold what the two GEMMs read.
    """

    weight: Any
    _state: LowPrecisionState
    layer: int
    backend: str
    _plans: dict[tuple[GemmFormat, ...], Plan]
    _kept: dict[Gemm, Coded]
    _one_copy: bool = False  # the codes of W, transposed, are those of its transpose

    @classmethod
    def wrap(cls, linear: nn.Linear, state: LowPrecisionState, layer: int, backend: str) -> LowPrecisionLinear:
        """Take over the parameters of `linear` (not copies)."""
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        new.training = linear.training
        # not a submodule: the state belongs to the model, once
        object.__setattr__(new, "_state", state)
        new.layer, new.backend = layer, backend
        new._plans = {}
        new._kept = {}
        if not linear.weight.requires_grad:
            new._quantize_once(keep=state.precision.frozen == "master")
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            y = _gemms(x, dtype, self.weight, self.bias, self)
        return y.view(*x.shape[:-1], self.out_features)

    def plan(self) -> Plan:
        """What the GEMMs are quantized to at the state's present step."""
        formats = self._state.formats
        key = tuple(formats[g] for g in GEMMS)
        if key not in self._plans:
            self._plans[key] = make_plan(self._state.precision, formats, self.backend, self.layer)
        return self._plans[key]

    def _apply(self, fn: Any, recurse: bool = True) -> LowPrecisionLinear:
        names = [f"{gemm}_{name}" for gemm, coded in self._kept.items() for name in tensors_of(coded)]
        keep_dtypes(self, names, lambda: super(LowPrecisionLinear, self)._apply(fn, recurse))
        return self

    def kept(self, gemm: Gemm) -> Coded | None:
        """A frozen weight's codes for fprop (W) or dgrad (W transposed)."""
        if gemm not in self._kept:
            shared = self.kept("fprop") if gemm == "dgrad" and self._one_copy else None
            return None if shared is None else transpose(shared)
        like = self._kept[gemm]
        return rebuild(like, {name: getattr(self, f"{gemm}_{name}") for name in tensors_of(like)})

    @torch.no_grad()
    def _quantize_once(self, *, keep: bool) -> None:
        """Codes of W and its transpose in the formats of step 0; later switches leave them."""
        plan = self.plan()
        wanted: list[tuple[Gemm, torch.Tensor]] = [("fprop", self.weight), ("dgrad", self.weight.t())]
        if any(plan.operands[gemm][1].format == "high" for gemm, _ in wanted):
            return  # a GEMM in high precision reads the weight itself
        (left, mine), (right, theirs) = ((plan.operands[g][1], plan.library[g]) for g in ("fprop", "dgrad"))
        self._one_copy = left == right and left.symmetric and mine == theirs
        for gemm, w in wanted[: 1 if self._one_copy else 2]:
            coded = encode(w, plan.operands[gemm][1], compat=plan.library[gemm])
            for name, tensor in tensors_of(coded).items():
                self.register_buffer(f"{gemm}_{name}", tensor.detach().contiguous())
            self._kept[gemm] = rebuild(coded, {name: torch.empty(0) for name in tensors_of(coded)})
        if not keep:
            self.weight = None

    def dequantized_weight(self) -> torch.Tensor:
        """W [out, in]: the weight, or what a frozen weight's fprop codes stand for, fp32."""
        if self.weight is not None:
            return self.weight.detach()
        coded = self.kept("fprop")
        assert coded is not None
        return coded.dequantize()

    def extra_repr(self) -> str:
        formats = self._state.formats
        kinds = formats["fprop"] if len(set(formats.values())) == 1 else ", ".join(f"{g}={formats[g]}" for g in GEMMS)
        return f"in_features={self.in_features}, out_features={self.out_features}, {kinds}, backend={self.backend}"


# A compiler may contract a division and a product into one rounding, which moves codes across their midpoints, and inductor
# fails on the blocks of 32. The quantizers therefore run as they are written, between the compiled parts of the model.
@torch.compiler.disable
def _gemms(
    x: torch.Tensor, dtype: torch.dtype, w: torch.Tensor | None, bias: torch.Tensor | None, module: LowPrecisionLinear
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    y = _LowPrecisionGemms.apply(rows, w, module, module.plan(), module._state, module.training, module._state.inputs.of(x))
    return y if bias is None else y + bias.to(y.dtype)


class _LowPrecisionGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor | None,
        module: LowPrecisionLinear,
        plan: Plan,
        state: LowPrecisionState,
        training: bool,
        made: dict[Any, Any],
    ) -> torch.Tensor:
        left, right = plan.operands["fprop"]
        # what no operand reads is not copied: each small kernel costs a GPU what it takes to start one
        scale = state.scale[plan.layer].clone() if plan.delayed else None
        step = state.step.clone() if plan.stochastic else None
        slot, x_amax = state.staged[plan.layer, 0] if training else None, None
        if sees_it := _sees(x, left, plan, "fprop"):
            known = made.get((x.dtype, "seen"))
            if slot is not None and known is not None:  # by another layer that reads x
                torch.maximum(slot, known, out=slot)
                slot = None
        else:
            slot = None
            if (x.dtype, "amax") not in made:
                made[x.dtype, "amax"] = largest(x)
            x_amax = made[x.dtype, "amax"]
            if training:
                state.record(plan.layer, 0, x_amax)
        keeps_codes = ctx.needs_input_grad[1] and plan.shares_input
        a, coded = _shared(made, x, left, plan, "fprop", amax=x_amax, scale=_of(scale, 0), keep=keeps_codes, seen=slot)
        if sees_it and slot is not None:
            made[x.dtype, "seen"] = slot
        b = module.kept("fprop")
        if b is None:
            assert w is not None
            w_amax = largest(w) if right.delayed else None
            if training and w_amax is not None:
                state.record(plan.layer, 1, w_amax)
            b, _ = _operand(w, right, plan, "fprop", amax=w_amax, scale=_of(scale, 1))
        ctx.module, ctx.plan, ctx.state, ctx.training, ctx.like = module, plan, state, training, None
        ctx.weight_dtype = None if w is None else w.dtype
        saved: list[torch.Tensor | None] = []
        if keeps_codes:
            assert coded is not None
            ctx.like = rebuild(coded, {name: torch.empty(0) for name in tensors_of(coded)})
            saved = list(tensors_of(coded).values())
        elif ctx.needs_input_grad[1]:
            saved = [x]
        ctx.save_for_backward(w if ctx.needs_input_grad[0] else None, scale, step, *saved)
        return multiply(a, b, plan.backend, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        w, scale, step, *saved = ctx.saved_tensors
        plan: Plan = ctx.plan
        dx = dw = amax = seen = None
        first: Gemm = "dgrad" if ctx.needs_input_grad[0] else "wgrad"
        if _sees(dy, plan.operands[first][0], plan, first):
            seen = ctx.state.staged[plan.layer, 2] if ctx.training else None
        else:
            amax = largest(dy)
            if ctx.training:
                ctx.state.record(plan.layer, 2, amax)
        both = _both_of_dy(dy, plan, step, amax, seen) if ctx.needs_input_grad[0] and ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            left, right = plan.operands["dgrad"]
            a = both[0] if both else _operand(dy, left, plan, "dgrad", amax=amax, scale=_of(scale, 2), step=step, seen=seen)[0]
            b = ctx.module.kept("dgrad")
            if b is None:
                b, _ = _operand(w.t(), right, plan, "dgrad", scale=_of(scale, 1))
            dx = multiply(a, b, plan.backend, dy.dtype)
        if ctx.needs_input_grad[1]:
            left, right = plan.operands["wgrad"]
            own = seen if first == "wgrad" else None
            a = both[1] if both else _operand(dy.t(), left, plan, "wgrad", amax=amax, scale=_of(scale, 2), step=step, seen=own)[0]
            if ctx.like is not None:
                b = transpose(rebuild(ctx.like, dict(zip(tensors_of(ctx.like), saved))))
            else:
                made = ctx.state.saved_inputs.of(saved[0])
                b, _ = _shared(made, saved[0].t(), right, plan, "wgrad", scale=_of(scale, 0))
            dw = multiply(a, b, plan.backend, ctx.weight_dtype)
        return dx, dw, None, None, None, None, None


def _shared(
    made: dict[Any, Any], x: torch.Tensor, operand: Operand, plan: Plan, gemm: Gemm, *, scale: torch.Tensor | None, **how: Any
) -> tuple[Coded, Coded | None]:
    """`_operand` of a layer's input, taken from what was `made` of that tensor where it is the same."""
    if operand.stochastic or (operand.delayed and x.device.type != "cpu"):
        return _operand(x, operand, plan, gemm, scale=scale, **how)
    key = (x.dtype, operand, plan.library[gemm], plan.backend, how.get("keep", False))
    given, found = made.get(key, (None, None))
    if found is None or (operand.delayed and scale is not None and not torch.equal(given, scale)):
        found = _operand(x, operand, plan, gemm, scale=scale, **how)
        made[key] = (scale, found)
    return found


def _operand(
    x: torch.Tensor, operand: Operand, plan: Plan, gemm: Gemm, *, amax: torch.Tensor | None = None, scale: torch.Tensor | None,
    step: torch.Tensor | None = None, keep: bool = False, seen: torch.Tensor | None = None,
) -> tuple[Coded, Coded | None]:  # fmt: skip
    """(what the backend multiplies, the codes where `keep` asks for them)."""
    noise = _noise_of(operand, plan, gemm, step)
    how: dict[str, Any] = dict(compat=plan.library[gemm], amax=amax, scale=scale, noise=noise)
    if plan.backend == "emulate":
        return values(x, operand, keep=keep, **how)
    coded = encode(x, operand, **how, seen=seen)
    return coded, coded


def _noise_of(operand: Operand, plan: Plan, gemm: Gemm, step: torch.Tensor | None) -> NoiseKey | None:
    if not operand.stochastic:
        return None
    assert step is not None
    return NoiseKey(plan.seed, step, plan.layer, _NOISE[gemm])


def _both_of_dy(dy: torch.Tensor, plan: Plan, step: torch.Tensor | None, amax: torch.Tensor | None,
                seen: torch.Tensor | None) -> tuple[Coded, Coded] | None:  # fmt: skip
    """dy for dgrad and dy^T for wgrad from one reading, where a kernel does it."""
    if plan.backend == "emulate":
        return None
    (rows, _), (cols, _) = plan.operands["dgrad"], plan.operands["wgrad"]
    noise = _noise_of(rows, plan, "dgrad", step), _noise_of(cols, plan, "wgrad", step)
    return encode_both(dy, rows, cols, compat=(plan.library["dgrad"], plan.library["wgrad"]), noise=noise, amax=amax, seen=seen)


def _sees(x: torch.Tensor, operand: Operand, plan: Plan, gemm: Gemm) -> bool:
    """Whether coding `x` notes its largest magnitude, so that no pass of its own looks for it."""
    return plan.backend != "emulate" and sees(x, operand, plan.library[gemm])


def _of(scale: torch.Tensor | None, role: int) -> torch.Tensor | None:
    return None if scale is None else scale[role]
