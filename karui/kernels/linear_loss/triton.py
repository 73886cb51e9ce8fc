"""Distillation losses of a chunk of rows: a chunk of student logits becomes losses and, in place or beside, their gradient.

    p = softmax(teacher / T), q = softmax(student / T), m = (1 - b) q + b p
    forward_kl  sum p log(p / q)                            d/dz = T (q - p)
    reverse_kl  sum q log(q / p)                            d/dz = T q (log(q / p) - reverse_kl)
    jsd         b sum p log(p / m) + (1-b) sum q log(q / m)   d/dz = T (1-b) q (log(q / m) - sum q log(q / m))

all times T^2 (Hinton et al., arXiv 1503.02531; generalized JSD as in GKD, arXiv 2306.13649, eq. 1). Three passes over a row:
both softmax sums online, the loss, the gradient; the probabilities are never stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.configs.errors import KaruiError
from karui.kernels.linear_loss import RowLoss
from karui.kernels.triton_support.offline import WIDE_LOADS, Case

KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


@triton.jit
def _log_shares(ptr, at, vocabulary, inverse_temperature, top, log_sum):
    z = tl.load(ptr + at, at < vocabulary, float("-inf")).to(tl.float32) * inverse_temperature
    return z - top - log_sum


@triton.jit
def _log_sum(ptr, vocabulary, inverse_temperature, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(ptr + start + cols, start + cols < vocabulary, float("-inf")).to(tl.float32) * inverse_temperature
        bigger = tl.maximum(largest, x)
        total = tl.where(bigger == float("-inf"), 0.0, total * tl.exp(largest - bigger) + tl.exp(x - bigger))
        largest = bigger
    top = tl.max(largest)
    return top, tl.log(tl.sum(total * tl.exp(largest - top)))


@triton.jit
def _rows(student_ptr, teacher_ptr, grad_ptr, loss_ptr, student_stride, teacher_stride, grad_stride, vocabulary, temperature,
          beta, KIND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    grad_ptr += row * grad_stride
    inverse = 1.0 / temperature
    cols = tl.arange(0, BLOCK)
    top_q, sum_q = _log_sum(student_ptr, vocabulary, inverse, BLOCK)
    top_p, sum_p = _log_sum(teacher_ptr, vocabulary, inverse, BLOCK)
    loss = tl.zeros([BLOCK], tl.float32)
    inner = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + cols
        log_q = _log_shares(student_ptr, at, vocabulary, inverse, top_q, sum_q)
        log_p = _log_shares(teacher_ptr, at, vocabulary, inverse, top_p, sum_p)
        p, q = tl.exp(log_p), tl.exp(log_q)
        if KIND == 0:
            loss += tl.where(p > 0, p * (log_p - log_q), 0.0)
        elif KIND == 1:
            loss += tl.where(q > 0, q * (log_q - log_p), 0.0)
        else:
            log_m = tl.log((1.0 - beta) * q + beta * p)
            toward = tl.where(q > 0, q * (log_q - log_m), 0.0)
            loss += beta * tl.where(p > 0, p * (log_p - log_m), 0.0) + (1.0 - beta) * toward
            inner += toward
    total = tl.sum(loss)
    pull = total if KIND == 1 else tl.sum(inner)
    tl.store(loss_ptr + row, total * temperature * temperature)
    for start in range(0, vocabulary, BLOCK):
        at = start + cols
        log_q = _log_shares(student_ptr, at, vocabulary, inverse, top_q, sum_q)
        log_p = _log_shares(teacher_ptr, at, vocabulary, inverse, top_p, sum_p)
        p, q = tl.exp(log_p), tl.exp(log_q)
        if KIND == 0:
            gradient = q - p
        elif KIND == 1:
            gradient = tl.where(q > 0, q * (log_q - log_p - pull), 0.0)
        else:
            log_m = tl.log((1.0 - beta) * q + beta * p)
            gradient = (1.0 - beta) * tl.where(q > 0, q * (log_q - log_m - pull), 0.0)
        tl.store(grad_ptr + at, (gradient * temperature).to(grad_ptr.dtype.element_ty), at < vocabulary)


def divergence(kind: str, teacher: torch.Tensor, student: torch.Tensor, grad: torch.Tensor, temperature: float,
               beta: float) -> torch.Tensor:  # fmt: skip
    """Losses fp32 [c] of logits [c, V], times T^2; `grad` [c, V], which may be `student` itself, gets d loss / d student."""
    if teacher.shape != student.shape:
        raise KaruiError(f"teacher rows {tuple(teacher.shape)} do not match the student's {tuple(student.shape)}.")
    teacher, student = (x if x.stride(-1) == 1 else x.contiguous() for x in (teacher, student))
    rows, vocabulary = student.shape
    losses = torch.empty(rows, dtype=torch.float32, device=student.device)
    block = min(triton.next_power_of_2(vocabulary), 4096)
    if rows:
        _rows[(rows,)](student, teacher, grad, losses, student.stride(0), teacher.stride(0), grad.stride(0), vocabulary,
                       temperature, beta, KIND=KINDS[kind], BLOCK=block, num_warps=8 if block > 1024 else 4)  # fmt: skip
    return losses


def divergence_rows(kind: str, teacher_logits: torch.Tensor, *, temperature: float = 1.0, beta: float = 0.5) -> RowLoss:
    """A `RowLoss` for `linear_loss`: the divergence of teacher [N, V] (any float dtype) and student at each row, times T^2.

    Raises:
        KaruiError: an unknown kind, a temperature that is not positive, a jsd's beta outside (0, 1).
    """
    if kind not in KINDS:
        raise KaruiError(f"divergence kernel: {kind!r} is not known; use one of {', '.join(KINDS)}.")
    if temperature <= 0 or (kind == "jsd" and not 0 < beta < 1):
        raise KaruiError(f"temperature must be positive and beta in (0, 1); got {temperature} and {beta}.")

    def rows(start: int, stop: int, logits: torch.Tensor) -> torch.Tensor:
        return divergence(kind, teacher_logits[start:stop], logits, logits, temperature, beta)

    return rows


def offline_cases() -> list[Case]:
    signature = {"student_ptr": "*fp32", "teacher_ptr": "*bf16", "grad_ptr": "*fp32", "loss_ptr": "*fp32",
                 "student_stride": "i32", "teacher_stride": "i32", "grad_stride": "i32", "vocabulary": "i32",
                 "temperature": "fp32", "beta": "fp32"}  # fmt: skip
    return [Case(f"linear_loss {kind}", _rows, signature, {"KIND": k, "BLOCK": 4096}, WIDE_LOADS, num_warps=8,
                 quick=(90,) if kind == "jsd" else (), on="one" if kind == "jsd" else "asked")
            for kind, k in KINDS.items()]  # fmt: skip
