"""Reference: updates of many adapters row by row against float64, one row and one adapter at a time."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.lora_rows import Stack, lora_rows

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def case(dtype, k, parts, rank, gain, device, rng, slots=3):
    n = sum(parts)
    part = torch.cat([torch.full((size,), i, dtype=torch.int32) for i, size in enumerate(parts)]).to(device)
    make = lambda *shape: torch.randn(*shape, generator=rng, device=device).to(dtype)  # noqa: E731
    return Stack(make(slots, len(parts) * rank, k) / k**0.5, make(slots, n, rank), part,
                 torch.rand(slots, n, generator=rng, device=device) + 0.5 if gain else None)  # fmt: skip


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("k", "parts", "rank", "gain"), [(33, (70, 9, 9), 3, False), (300, (130,), 16, True), (64, (5, 40), 1, True)])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_each_row_has_its_own(dtype, k, parts, rank, gain, backend, device, rng):
    stack, slots = case(dtype, k, parts, rank, gain, device, rng), [2, -1, 0, 0, 1]
    x, y = (torch.randn(5, width, generator=rng, device=device).to(dtype) for width in (k, sum(parts) + 3))
    y = y[:, 3:]  # rows that lie apart
    before = y.clone()
    lora_rows(y, x, torch.tensor(slots, dtype=torch.int32, device=device), stack, backend)
    for t, s in enumerate(slots):
        want = before[t].double()
        if s >= 0:
            begin = 0
            for p, size in enumerate(parts):
                low = stack.a[s, p * rank:(p + 1) * rank].double() @ x[t].double()
                want[begin:begin + size] += stack.b[s, begin:begin + size].double() @ low
                begin += size
            want *= 1 if stack.gain is None else stack.gain[s].double()
            assert (y[t].double() - want).abs().max() <= BOUND[dtype] * want.abs().max()
        else:
            assert torch.equal(y[t], before[t])


def test_bad_input(device, rng):
    stack = case(torch.float32, 8, (6,), 2, False, device, rng)
    with pytest.raises(KaruiError, match="do not belong to"):
        lora_rows(torch.zeros(2, 6), torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32), stack)
    empty = torch.zeros(0, 6)
    lora_rows(empty, torch.zeros(0, 8), torch.zeros(0, dtype=torch.int32), stack, "triton")
