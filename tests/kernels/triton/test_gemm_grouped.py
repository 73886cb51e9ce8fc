"""Reference: rows sorted by expert against a sort, grouped products, values and gradients, against float64 autograd over one product per
expert."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_grouped import gemm_grouped, group_rows, reference


def rows_of(*counts, device):
    """The expert of each row, in order."""
    return torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))


@pytest.mark.parametrize(("rows", "experts"), [(0, 3), (1, 1), (5, 40), (300, 3), (1100, 6)])
def test_rows_by_expert(rows, experts, device, rng):
    chosen = torch.randint(0, experts, (rows,), generator=rng, device=device)
    chosen[chosen == experts // 2] = 0  # one without rows
    got, want = (group_rows(chosen, experts, backend) for backend in ("triton", "torch"))
    assert got.block == want.block == (16 if rows < 300 else 64)
    for name in ("order", "place", "offsets", "tiles"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(chosen[got.order], chosen.sort().values) and torch.equal(got.order[got.place], torch.arange(rows, device=device))
    assert torch.equal(got.offsets.diff(), torch.bincount(chosen, minlength=experts).int())
    covered = [row for expert, first, end in got.tiles.tolist() for row in range(first, end) if chosen[got.order[row]] == expert]
    assert sorted(covered) == list(range(rows)) and all(end - first <= got.block for _, first, end in got.tiles.tolist())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize(("counts", "n", "k"), [((3, 0, 70), 17, 24), ((0, 1), 130, 65), ((90, 100), 33, 40)])
def test_values_and_gradients(counts, n, k, dtype, bound, device, rng):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("experts in fp32 stay with torch")
    groups = group_rows(rows_of(*counts, device=device), len(counts), "triton")
    x = torch.randn(sum(counts), k, generator=rng, device=device).to(dtype).requires_grad_()
    w = torch.randn(len(counts), n, k, generator=rng, device=device).to(dtype).requires_grad_()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    y, want = gemm_grouped(x, w, groups, "triton"), reference.gemm_grouped(x64, w64, groups.offsets)
    grad = torch.randn(y.shape, generator=rng, device=device).to(dtype)
    y.backward(grad)
    want.backward(grad.double())
    for a, b in ((y, want), (x.grad, x64.grad), (w.grad, w64.grad)):
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape and (a.double() - b).abs().max() <= bound * b.abs().max()


def test_frozen_experts_keep_no_rows(device, rng):
    groups, kept = group_rows(rows_of(2, 3, device=device), 2, "triton"), []
    x, w = torch.randn(5, 8, generator=rng, device=device).requires_grad_(), torch.randn(2, 4, 8, generator=rng, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        gemm_grouped(x, w, groups, "triton").sum().backward()
    assert kept == [w.shape] and torch.allclose(x.grad[0], w[0].sum(0), atol=1e-5)


def test_refusals():
    groups = group_rows(torch.tensor([0, 1]), 2)
    with pytest.raises(KaruiError, match="2 rows and 2 experts"):
        gemm_grouped(torch.ones(2, 3), torch.ones(1, 4, 3), groups)
    with pytest.raises(KaruiError, match="cast one"):
        gemm_grouped(torch.ones(2, 3), torch.ones(2, 4, 3).half(), groups)
    with pytest.raises(KaruiError, match=r"integers \[R\]"):
        group_rows(torch.ones(2, 3), 2)
