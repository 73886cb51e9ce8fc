"""EfficientQAT (Chen et al., arXiv 2407.11062): Block-AP for every block, then E2E-QP for the whole model.

    E2E-QP    value = (q - z) s     codes q and zero points z fixed, only the step sizes s train, end to end
              d loss / d s = sum over the group of  (q - z) * d loss / d value

The loss is d KL(unquantized || quantized) + (1 - d) cross entropy of the text, over the calibration rows. The unquantized model
does not run again: its last hidden states come out of Block-AP, and the head turns them into its distribution, so that the
teacher costs one product with the head. Departures: distillation (the paper has d = 0); norm weights train along (`norms`), as
they stay in high precision anyway; learning rates are shares of s, as in Block-AP. The better of start and end, by that loss
over the same rows, is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import nn

from karui.catalogue.logits import capped, logit_softcap, scaled
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import DTYPES, grouped
from karui.qat import block_ap
from karui.qat.autoround import in_bfloat16
from karui.qat.block_ap import BlockAPConfig
from karui.qat.calibration import Block, decoder_of
from karui.qat.lsq import Stored
from karui.qat.types import LayerReport

log = logging.getLogger(__name__)
CHUNK = 256  # tokens whose logits exist at one moment


class EfficientQATConfig(BlockAPConfig):
    """Block-AP's settings, then those of E2E-QP: e2e_epochs over the rows, e2e_batch rows per step, e2e_lr as a share of the step
    size, distil: d above; norms: norm weights train too, at norm_lr. A rate that is None is 1e-3, from 4 bits on 2.5e-4."""

    e2e_epochs: int = Field(1, ge=0)
    e2e_batch: int = Field(2, ge=1)
    e2e_lr: float | None = Field(None, gt=0)
    distil: float = Field(1.0, ge=0, le=1)
    norms: bool = True
    norm_lr: float | None = Field(None, gt=0)


CONFIG = EfficientQATConfig


def quantize_block(block: Block, config: EfficientQATConfig) -> None:
    """Block-AP; the second phase follows in `finish_model`."""
    block_ap.quantize_block(block, config)


class _Dequantize(torch.autograd.Function):
    """(step [R, G], codes int8 [R, G, n] less zero) -> value [R, G, n]; gradient for the step only."""

    @staticmethod
    def forward(ctx: Any, step: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes)
        return codes * step.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        return (grads[0] * codes).sum(-1), None


class StepLinear(nn.Linear):
    """A linear on fixed codes whose step sizes train: `a` [R, G] around 1; the value is bit-equal to `qtensor().dequantize()`."""

    def __init__(self, linear: nn.Linear, q: QTensor) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        del self.weight
        self.bias = linear.bias
        self.q = q
        shift = 0 if q.zero is None else q.zero.to(torch.int16).unsqueeze(-1)
        self.codes = (grouped(q.codes.to(torch.int16), q.spec) - shift).to(torch.int16 if q.spec.bits == 8 else torch.int8)
        self.scale = q.scale.float()
        self.a = nn.Parameter(torch.ones_like(self.scale))

    def step(self) -> torch.Tensor:
        step: torch.Tensor = Stored.apply(self.scale * self.a, self.q.spec)
        return step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = _Dequantize.apply(self.step(), self.codes).view(self.q.shape)
        return nn.functional.linear(x, value, self.bias)

    @torch.no_grad()
    def qtensor(self) -> QTensor:
        q = self.q
        return QTensor(codes=q.codes, scale=self.step().to(DTYPES[q.spec.scale_dtype]), zero=q.zero, spec=q.spec, shape=q.shape)


def swap_in(model: nn.Module, codes: Mapping[str, QTensor]) -> dict[str, StepLinear]:
    """Put a `StepLinear` in place of every named weight's linear; the new ones by weight name."""
    found = {}
    for name, q in codes.items():
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(parent)
        found[name] = StepLinear(getattr(owner, last), q)
        setattr(owner, last, found[name])
    return found


@torch.no_grad()
def swap_out(model: nn.Module, linears: Mapping[str, StepLinear]) -> dict[str, QTensor]:
    """Ordinary linears again, holding the dequantized values; the codes by weight name."""
    codes = {name: m.qtensor() for name, m in linears.items()}
    for name, m in linears.items():
        linear = nn.Linear(m.in_features, m.out_features, bias=m.bias is not None, device="meta")
        linear.weight, linear.bias = nn.Parameter(codes[name].dequantize(), requires_grad=False), m.bias
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    return codes


class DistilledLoss(torch.autograd.Function):
    """(hidden [T, H], head [V, H], teacher hidden [T, H] or None, targets [T], d, soft cap or None) -> mean loss; gradient for
    hidden only.

    With p = d softmax(teacher) + (1 - d) onehot(target):  loss = sum p (log p~ - log softmax(student)), where p~ is the teacher's
    distribution in its share and 1 in the target's: d KL + (1 - d) cross entropy.  d loss / d logits = softmax(student) - p.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor | None, targets: torch.Tensor, share: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        count, grad = len(hidden), torch.empty_like(hidden, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for i in range(0, count, CHUNK):
            part, rows = slice(i, i + CHUNK), torch.arange(len(targets[i : i + CHUNK]), device=hidden.device)
            logits = capped((hidden[part].to(head.dtype) @ head.T).float(), softcap)
            student = torch.log_softmax(logits, -1)
            delta = student.exp()
            if share < 1 or teacher is None:
                total -= (1 - share) * student[rows, targets[part]].double().sum()
                delta[rows, targets[part]] -= 1 - share
            if share > 0 and teacher is not None:
                wanted = torch.log_softmax(capped((teacher[part].to(head.dtype) @ head.T).float(), softcap), -1)
                likely = wanted.exp()
                total += share * (likely * wanted.sub_(student)).sum(-1).double().sum()
                delta.sub_(likely, alpha=share)
            if softcap is not None:
                delta -= delta * (logits / softcap).square_()
            grad[part] = (delta.to(head.dtype) @ head).float()
        ctx.save_for_backward(grad.div_(count))
        return (total / count).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grads[0], None, None, None, None, None


class EndToEnd:
    """The second phase at work: `loss` of some rows, `train`, and the swapped-in linears.

    Args:
        teacher: [samples, length, width] hidden states of the unquantized model in front of its final norm.
    """

    def __init__(
        self, model: nn.Module, done: dict[str, Any], rows: torch.Tensor, teacher: torch.Tensor, config: EfficientQATConfig
    ) -> None:
        self.model, self.rows, self.teacher, self.config = model, rows, teacher, config
        base, _, self.prefix = decoder_of(model)
        self.base: Any = base
        self.device = next(model.parameters()).device
        self.half = in_bfloat16(config.precision, self.device)
        self.head: torch.Tensor = model.get_output_embeddings().weight.detach()  # type: ignore[operator]
        self.softcap = logit_softcap(base.config)
        norm: Any = base.norm
        self.norm = norm
        self.norms = {
            f"{n}.weight": weight for n, m in model.named_modules()
            if config.norms and isinstance(weight := getattr(m, "weight", None), nn.Parameter) and weight.ndim == 1
        }  # fmt: skip
        with torch.no_grad():
            self.final = norm.weight.clone() if f"{self.prefix.rpartition('.')[0]}.norm.weight" in self.norms else None
        codes = {n: q.to(self.device) for n, q in done.items() if isinstance(q, QTensor) and q.spec.format == "int"}
        self.linears = swap_in(model, codes)

    def loss(self, pick: torch.Tensor, half: bool | None = None) -> torch.Tensor:
        half = self.half if half is None else half
        rows = self.rows[pick].to(self.device)
        head = self.head.bfloat16() if half else self.head.float()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            hidden = scaled(self.base(input_ids=rows, use_cache=False).last_hidden_state[:, :-1], self.base.config)
        wanted = None
        if self.config.distil:
            with torch.no_grad():
                wanted = scaled(self._teacher(self.teacher[pick, :-1].to(self.device)), self.base.config)
        value: torch.Tensor = DistilledLoss.apply(
            hidden.flatten(0, 1).float(), head, None if wanted is None else wanted.flatten(0, 1), rows[:, 1:].flatten(),
            self.config.distil, self.softcap,
        )  # fmt: skip
        return value

    def _teacher(self, hidden: torch.Tensor) -> torch.Tensor:
        """Through the final norm as it was at the start."""
        if self.final is None:
            return self.norm(hidden)
        out: torch.Tensor = torch.func.functional_call(self.norm, {"weight": self.final}, (hidden,))
        return out

    @torch.no_grad()
    def judged(self) -> float:
        """The loss over the first rows, in float32."""
        few = min(8, len(self.rows))
        return sum(float(self.loss(torch.tensor([i]), half=False)) for i in range(few)) / few

    def train(self, seed: int, progress: Any = None) -> None:
        config, generator = self.config, torch.Generator().manual_seed(seed)
        for p in self.norms.values():
            p.requires_grad_(True)
        usual = 1e-3 if max(m.q.spec.bits for m in self.linears.values()) < 4 else 2.5e-4
        groups = [{"params": [m.a for m in self.linears.values()], "lr": config.e2e_lr or usual}]
        if self.norms:
            groups.append({"params": list(self.norms.values()), "lr": config.norm_lr or usual})
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        steps = config.e2e_epochs * math.ceil(len(self.rows) / config.e2e_batch)
        warmup = max(1, round(0.03 * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1, (i + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(i / steps, 1.0))))
        )
        at = 0
        for _ in range(config.e2e_epochs):
            order = torch.randperm(len(self.rows), generator=generator)
            for i in range(0, len(order), config.e2e_batch):
                loss = self.loss(order[i : i + config.e2e_batch])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                at += 1
                if progress is not None:
                    progress(at, steps, float(loss.detach()))
        for p in self.norms.values():
            p.requires_grad_(False)


def finish_model(
    model: nn.Module, done: dict[str, Any], report: list[LayerReport], rows: torch.Tensor, teacher: torch.Tensor,
    config: EfficientQATConfig, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """E2E-QP in place: new scales in `done`, new norm weights in the model and in `done`; returns facts."""
    if config.e2e_epochs == 0:
        return {}
    run = EndToEnd(model, done, rows, teacher, config)
    norms = {n: p.detach().clone() for n, p in run.norms.items()}
    before = run.judged()
    run.train(seed, lambda at, total, loss: log.info("E2E-QP step %d of %d: loss %.4f", at, total, loss))
    after = run.judged()
    if not after <= before:
        log.warning("E2E-QP made the loss worse (%.4f -> %.4f) and is left out", before, after)
        with torch.no_grad():
            for m in run.linears.values():
                m.a.fill_(1)
            for n, p in run.norms.items():
                p.copy_(norms[n])
    done |= {n: q.to("cpu") for n, q in swap_out(model, run.linears).items()}
    if after <= before:
        done |= {n: p.detach().cpu().clone() for n, p in run.norms.items()}
    facts = {"e2e_loss_before": before, "e2e_loss": min(before, after), "e2e_tokens": config.e2e_epochs * rows.numel()}
    report[:] = [
        LayerReport(**{**r.dump(), "method": "efficient_qat"}) if r.method == "block_ap" else r for r in report
    ]  # fmt: skip
    return facts
