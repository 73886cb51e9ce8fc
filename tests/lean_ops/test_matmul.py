"""The products of training against float64, on every instruction set: odd shapes, strides, accumulation, low-rank updates, bf16."""

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.kernels.linear import linear
from karui.kernels.lora import gated_lora_linear, lora_linear
from karui.kernels.matmul import add_matmul, current_precision, low_rank_matmul, matmul, matmul_precision
from karui.kernels.native import available, isas
from karui.kernels.native import train as native

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler here")


@pytest.fixture(params=["avx512, no amx", *isas()] if "avx512" in isas() else isas())
def isa(request, monkeypatch):
    """The kernels of one instruction set, for products of any size."""
    monkeypatch.setenv("KARUI_ISA", request.param.split(",")[0])
    monkeypatch.setattr(native, "SMALLEST", 0)
    native._library.cache_clear()
    if "no amx" in request.param:
        monkeypatch.setattr(native._library(), "best_bf16", min(native._library().best_bf16, 1))
    yield request.param
    native._library.cache_clear()


def operands(m, k, n, kind, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(k, m, generator=g).T if "t" in kind[0] else torch.randn(m, k, generator=g)
    b = torch.randn(n, k, generator=g).T if "t" in kind[1] else torch.randn(k, n, generator=g)
    return a, b


def close(got, want, terms):
    """Within the rounding of a float32 sum of so many products of normal values."""
    return float((got.double() - want).abs().max()) < 3e-6 * terms**0.5


@pytest.mark.parametrize("kind", ["nn", "nt", "tn", "tt"])
def test_products_of_odd_shapes(isa, kind):
    for m in (1, 5, 8, 13, 14, 15, 29, 43):
        for n in (32, 33, 47, 64, 330):
            for k in (16, 17, 100, 289, 577):
                a, b = operands(m, k, n, kind)
                assert native.product_usable(a, b)
                want = a.double() @ b.double()
                assert close(matmul(a, b), want, k), (m, n, k)
                out = torch.ones(m, n)
                assert add_matmul(out, a, b) is out and close(out, want + 1, k), (m, n, k)
                wide = torch.full((m, n + 5), 7.0)
                assert close(matmul(a, b, out=wide[:, :n]), want, k) and bool((wide[:, n:] == 7).all())


@pytest.mark.parametrize("kind", ["nn", "nt", "tn", "tt"])
def test_products_of_bf16_operands(isa, kind):
    for m in (8, 13, 29, 43):
        for n in (32, 33, 64, 330):
            for k in (16, 17, 289, 577, 1155):
                a, b = operands(m, k, n, kind)
                want = a.bfloat16().double() @ b.bfloat16().double()
                with matmul_precision("bf16"):
                    assert close(matmul(a, b), want, 4 * k), (m, n, k)
                    out = torch.ones(m, n)
                    assert close(add_matmul(out, a, b), want + 1, 4 * k), (m, n, k)
                    u, v = operands(k, 5, n, kind, seed=1)
                    low = a.bfloat16().double() @ u.bfloat16().double()
                    assert close(low_rank_matmul(a, b, u, v, 1.0)[0], want + low @ v.double(), 16 * k), (m, n, k)


@pytest.mark.parametrize("kind", ["nn", "nt", "tn", "tt"])
def test_products_of_split_operands(isa, kind):
    for m in (1, 13, 32, 43):
        for n in (32, 33, 330):
            for k in (16, 17, 289, 577, 1155):
                a, b = operands(m, k, n, kind)
                want = a.double() @ b.double()
                with matmul_precision("bf16x3"):
                    got, out = matmul(a, b), torch.ones(m, n)
                    u, v = operands(k, 5, n, kind, seed=1)
                    updated = want + a.double() @ u.double() @ v.double()
                    for x, y in ((got, want), (add_matmul(out, a, b), want + 1), (low_rank_matmul(a, b, u, v, 1.0)[0], updated)):
                        assert (x.double() - y).abs().max() < 3e-5 * y.abs().max(), (m, n, k)
                    rounded = matmul(a, b, backward=True)
                error, error_of_bf16 = ((x.double() - want).abs().mean() for x in (got, rounded))
                assert error < error_of_bf16 / 100, (m, n, k)


def test_only_the_backward_pass_is_rounded(isa):
    a, b = operands(40, 64, 50, "nt")
    with matmul_precision("bf16-backward"):
        assert current_precision() == "bf16-backward"
        exact, rounded = matmul(a, b), matmul(a, b, backward=True)
    assert torch.equal(exact, matmul(a, b)) and not torch.equal(exact, rounded)
    assert close(rounded, a.bfloat16().double() @ b.bfloat16().double(), 256) and torch.equal(matmul(a, b, backward=True), exact)


def test_bf16_keeps_nan_and_infinity(isa):
    a, b = torch.ones(16, 32), torch.ones(32, 32)
    a[0, 0], a[1, 1], a[2, 2] = float("nan"), float("inf"), 3.4e38  # the last one rounds up to infinity
    with matmul_precision("bf16"):
        out = matmul(a, b)
    assert bool(out[0].isnan().all()) and bool((out[1:3] == float("inf")).all()) and bool((out[3:] == 32).all())
    with matmul_precision("bf16x3"):
        out = matmul(a, b)
    assert not bool(out[:2].isfinite().any()) and bool((out[3:] == 32).all())


def test_bf16_is_refused_where_it_cannot_be(isa, monkeypatch):
    with pytest.raises(KaruiError, match="bf16-forward"), matmul_precision("bf16-forward"):
        pass
    monkeypatch.setattr(native, "ready", lambda: False)
    with pytest.raises(KaruiError, match="native kernels"), matmul_precision("bf16"):
        pass
    assert current_precision() == "fp32"


def test_sums_longer_than_one_packing(isa):
    a, b = operands(9, 4500, 40, "nn")
    assert close(matmul(a, b), a.double() @ b.double(), 4500)


@pytest.mark.parametrize("precision", ["fp32", "bf16x3", "bf16"])
def test_rows_and_threads_do_not_change_a_value(isa, precision):
    a, b = operands(161, 700, 210, "nt")
    was = torch.get_num_threads()
    try:
        with matmul_precision(precision):
            torch.set_num_threads(1)
            want = matmul(a, b)
            torch.set_num_threads(3)
            assert torch.equal(matmul(a, b), want)
            assert all(torch.equal(matmul(a[i:j], b), want[i:j]) for i, j in ((0, 1), (7, 30), (40, 72), (9, 152)))
            assert torch.equal(add_matmul(torch.zeros(40, 210), a[5:45], b), add_matmul(torch.zeros(161, 210), a, b)[5:45])
    finally:
        torch.set_num_threads(was)


def test_the_number_of_rows_does_not_choose_the_kernel():
    a, b = operands(300, 128, 96, "nt")
    whole = matmul(a, b)
    assert all(torch.equal(matmul(a[i : i + n], b), whole[i : i + n]) for i, n in ((0, 1), (3, 7), (100, 64)))


@pytest.mark.parametrize("rank", [1, 4, 16, 40, 300])
@pytest.mark.parametrize("kind", ["nn", "nt"])
def test_low_rank_updates(isa, rank, kind):
    for m, k, n in ((8, 16, 32), (31, 577, 70), (45, 100, 350)):
        x, w = operands(m, k, n, kind)
        u, v = operands(k, rank, n, "tt" if kind == "nt" else "nn", seed=1)
        out, low = low_rank_matmul(x, w, u, v, 0.5)
        want = 0.5 * x.double() @ u.double()
        assert close(low, want, k) and close(out, x.double() @ w.double() + want @ v.double(), (8 + rank) * k)


def test_gradients_follow_outside_of_autograd_functions(isa):
    a, b = operands(20, 40, 50, "nn")
    a.requires_grad_()
    matmul(a, b).sum().backward()
    assert torch.allclose(a.grad, b.sum(1).expand(20, 40), atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-3), ("bf16-backward", 2e-2)])
def test_lora_gradients_equal_float64(isa, gated, precision, tolerance):
    g = torch.Generator().manual_seed(2)
    names = {"x": (30, 64), "up": (30, 64), "a": (8, 64), "b": (96, 8), "bias": (96,)}
    values = {n: torch.randn(*shape, generator=g) for n, shape in names.items()}
    weight = torch.randn(96, 64, generator=g)

    def grads(dtype):
        t = {n: v.to(dtype, copy=True).requires_grad_(n != "bias") for n, v in values.items()}
        form, inputs = (gated_lora_linear, (t["x"], t["up"])) if gated else (lora_linear, (t["x"],))
        out = form(*inputs, lambda d: weight.to(d), t["bias"], t["a"], t["b"], 0.7)
        out.pow(2).sum().backward()
        return [out.detach()] + [t[n].grad for n in ("x", *(["up"] if gated else []), "a", "b")]

    with matmul_precision(precision):
        found = grads(torch.float32)
    for i, (got, want) in enumerate(zip(found, grads(torch.float64))):
        largest = (tolerance if i else 1e-5) * float(want.abs().max())  # the output itself is never rounded
        assert float((got.double() - want).abs().max()) < largest


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("bf16-backward", 1e-2), ("bf16x3", 1e-2), ("bf16", 2e-2)])
def test_a_trained_linear(isa, precision, tolerance):
    g = torch.Generator().manual_seed(3)
    x, w, bias = (torch.randn(*shape, generator=g) for shape in ((2, 20, 64), (96, 64), (96,)))

    def grads(dtype, form):
        t = [v.to(dtype, copy=True).requires_grad_() for v in (x, w, bias)]
        out = form(*t)
        out.pow(2).sum().backward()
        return [out.detach(), *(v.grad for v in t)]

    with matmul_precision(precision):
        found = grads(torch.float32, linear)
    for i, (got, want) in enumerate(zip(found, grads(torch.float64, torch.nn.functional.linear))):
        within = 1e-5 if i == 0 and precision != "bf16" else tolerance
        assert float((got.double() - want).abs().max()) < within * float(want.abs().max())


def test_what_the_kernel_does_not_take_goes_to_torch(isa):
    a, b = operands(20, 40, 50, "nn")
    assert not native.product_usable(a.double(), b.double())
    assert not native.product_usable(a[:, ::2], b[::2, ::2])
    assert torch.equal(matmul(a.double(), b.double()), a.double() @ b.double())
    assert torch.allclose(matmul(a[:, ::2], b[::2, ::2]), a[:, ::2] @ b[::2, ::2], atol=1e-5)
