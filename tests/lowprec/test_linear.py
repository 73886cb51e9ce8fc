"""Reference and behavioural tests of the training linear: GEMMs by hand, error bounds, padding, frozen weights, bad numbers."""

import pytest
import torch
from torch import nn

from karui.configs import KaruiError, UnsupportedError
from karui.kernels.quantize.elements import E5M2
from karui.kernels.quantize.microscaling import quantize_mx
from karui.kernels.quantize.noise import noise_bits
from karui.kernels.quantize.nvfp4 import quantize_nvfp4, random_hadamard
from karui.kernels.quantize.scaled_float8 import quantize_float8
from karui.lowprec import LayerPolicy, LowPrecision, Precision, Switch
from karui.lowprec.precision import RECIPES

# relative error of a GEMM of Gaussian operands: the root of the sum of both operands' mean squared rounding errors, times 1.3
BOUND = {
    "fp8-delayed": 0.07,
    "fp8-current": 0.07,
    "fp8-rowwise": 0.05,
    "fp8-blockwise": 0.05,
    "mxfp8": 0.05,
    "mxfp4": 0.3,
    "nvfp4": 0.25,
}


def layer(precision, fan_in=96, fan_out=64, *, frozen=False, bias=True, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(fan_in, fan_out, bias=bias))
    model[0].weight.requires_grad_(not frozen)
    low = LowPrecision(precision)
    return low, low.prepare(model)


def run(model, x, dy):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    grad = model[0].weight.grad if model[0].weight is not None else None
    return y.detach(), x.grad, None if grad is None else grad.clone()


def relative(a, b):
    return ((a - b).double().norm() / b.double().norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(48, 96, 64), (37, 50, 21), (1, 128, 128), (5, 3, 2)])
def test_three_gemms_against_float64_within_the_formats_bound(recipe, shape):
    tokens, fan_in, fan_out = shape
    _, model = layer(recipe, fan_in, fan_out)
    x, dy = torch.randn(tokens, fan_in), torch.randn(tokens, fan_out)
    y, dx, dw = run(model, x, dy)
    w, bias = model[0].weight.detach().double(), model[0].bias.detach().double()
    slack = 1 if tokens * fan_in > 1000 else 2  # few values average little
    four_bit_gradient = 1.8 if recipe in ("mxfp4", "nvfp4") else 1  # stochastic rounding has up to twice the variance
    assert relative(y - bias, x.double() @ w.T) < BOUND[recipe] * slack
    assert relative(dx, dy.double() @ w) < BOUND[recipe] * slack * four_bit_gradient
    assert relative(dw, dy.T.double() @ x.double()) < BOUND[recipe] * slack * four_bit_gradient
    assert torch.allclose(model[0].bias.grad, dy.sum(0))
    assert relative(y - bias, x.double() @ w.T) > 1e-3  # and it is in low precision


def is_product(y, a, b):
    """Whether y is A times B transposed but for sums in fp32: no code is another."""
    a, b = a.double(), b.double()
    return ((y - a @ b.T).abs() <= 1e-6 * (a.abs() @ b.abs().T)).all()


def test_fp8_current_by_hand():
    _, model = layer("fp8-current", bias=False)
    x, dy, w = torch.randn(8, 96), torch.randn(8, 64) * 1e-5, model[0].weight.detach()
    y, dx, dw = run(model, x, dy)
    x8, w8 = quantize_float8(x).dequantize(), quantize_float8(w).dequantize()
    g8 = quantize_float8(dy, element=E5M2).dequantize()
    assert is_product(y, x8, w8) and is_product(dx, g8, w8.T) and is_product(dw, g8.T, x8.T)


def test_mxfp8_requantizes_every_operand_along_its_contraction():
    _, model = layer("mxfp8", bias=False)
    x, dy, w = torch.randn(33, 96), torch.randn(33, 64), model[0].weight.detach()
    y, dx, dw = run(model, x, dy)

    def q(t):
        return quantize_mx(t).dequantize()

    assert is_product(y, q(x), q(w)) and is_product(dx, q(dy), q(w.T)) and is_product(dw, q(dy.T), q(x.T))


def test_nvfp4_by_hand():
    _, model = layer(Precision(recipe="nvfp4", seed=5), bias=False)
    x, dy, w = torch.randn(40, 96), torch.randn(40, 64), model[0].weight.detach()
    y, dx, dw = run(model, x, dy)
    key = dict(seed=5, step=0, layer=0)
    w4 = quantize_nvfp4(w, tile="16x16").dequantize()
    assert is_product(y, quantize_nvfp4(x).dequantize(), w4)
    assert is_product(dx, quantize_nvfp4(dy, noise=noise_bits((40, 64), tensor=0, **key)).dequantize(), w4.T)
    left, right = random_hadamard(dy.T), random_hadamard(x.T)  # 40 tokens padded to 48
    left = quantize_nvfp4(left, noise=noise_bits((64, 48), tensor=1, **key)).dequantize()
    assert is_product(dw, left, quantize_nvfp4(right).dequantize())


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_is_exact(recipe):
    """A layer of odd shape gives what the same layer, zero-padded by hand to a multiple of 128, gives."""
    if recipe in ("mxfp4", "nvfp4"):
        recipe = Precision(recipe=recipe, stochastic=False)  # noise is keyed by position
    _, small = layer(recipe, 50, 21, bias=False)
    _, big = layer(recipe, 128, 128, bias=False)
    with torch.no_grad():
        big[0].weight.zero_()
        big[0].weight[:21, :50] = small[0].weight
    x, dy = torch.randn(37, 50), torch.randn(37, 21)
    wide_x, wide_dy = torch.zeros(128, 128), torch.zeros(128, 128)
    wide_x[:37, :50], wide_dy[:37, :21] = x, dy
    for a, b in zip(run(small, x, dy), run(big, wide_x, wide_dy)):
        assert torch.allclose(a, b[: a.shape[0], : a.shape[1]], rtol=1e-5, atol=1e-6)


def test_high_precision_gemms_are_exactly_the_ordinary_ones():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(96, 64))
    _, model = layer(Precision(recipe="mxfp8", fprop="high", dgrad="high", wgrad="high"))
    x, dy = torch.randn(8, 96), torch.randn(8, 64)
    for a, b in zip(run(model, x, dy), run(plain, x, dy)):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_one_gemm_at_a_time():
    x, dy = torch.randn(8, 96), torch.randn(8, 64)
    _, exact = layer(Precision(recipe="mxfp8", fprop="high", dgrad="high", wgrad="high"))
    reference = run(exact, x, dy)
    for at, gemm in enumerate(("fprop", "dgrad", "wgrad")):
        others = {g: "high" for g in ("fprop", "dgrad", "wgrad") if g != gemm}
        _, model = layer(Precision(recipe="mxfp8", **others))
        same = [torch.equal(a, b) for a, b in zip(run(model, x, dy), reference)]
        assert same == [i != at for i in range(3)]


def test_a_schedule_switches_at_its_step():
    low, model = layer(Precision(recipe="nvfp4", schedule=(Switch(step=2, to="high"),)), bias=False)
    x = torch.randn(8, 96)
    exact = x @ model[0].weight.T
    for step in range(4):
        assert torch.allclose(model(x), exact, rtol=1e-5, atol=1e-6) == (step >= 2)
        low.finish_step()


def test_bf16_autocast_and_bf16_weights():
    _, model = layer("fp8-current")
    x = torch.randn(8, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and model[0].weight.grad.dtype == torch.float32
    low = LowPrecision("fp8-current")
    half = low.prepare(nn.Sequential(nn.Linear(96, 64)).bfloat16())
    y = half(x.bfloat16().requires_grad_())
    y.sum().backward()
    assert y.dtype == half[0].weight.grad.dtype == torch.bfloat16


def test_leading_dimensions_and_no_tokens():
    _, model = layer("nvfp4")
    x = torch.randn(2, 3, 4, 96)
    assert model(x).shape == (2, 3, 4, 64)
    _, empty = layer("fp8-current")
    x = torch.zeros(0, 96, requires_grad=True)
    empty(x).sum().backward()
    assert x.grad.shape == (0, 96) and not empty[0].weight.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_inputs_and_zero_gradients_give_zeros(recipe):
    _, model = layer(recipe, bias=False)
    y, dx, dw = run(model, torch.zeros(16, 96), torch.zeros(16, 64))
    assert not y.any() and not dx.any() and not dw.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_are_quantized_once_and_give_the_same_bits(recipe):
    x, dy = torch.randn(40, 96), torch.randn(40, 64)
    low, frozen = layer(recipe, frozen=True)
    _, kept = layer(Precision(recipe=recipe, frozen="master"), frozen=True)
    _, trained = layer(recipe)
    assert frozen[0].weight is None and kept[0].weight is not None
    y, dx, _ = run(trained, x, dy)
    for model in (frozen, kept):
        other_y, other_dx, dw = run(model, x, dy)
        assert torch.equal(y, other_y) and torch.equal(dx, other_dx) and dw is None
    w = trained[0].weight.detach()
    back = low.convert(frozen)["0.weight"]
    assert relative(back, w) < {"mxfp4": 0.2, "nvfp4": 0.15}.get(recipe, 0.04) and not torch.equal(back, w)
    assert not frozen[0].weight.requires_grad


def test_frozen_fp8_weights_take_a_quarter_of_the_memory():
    _, model = layer("fp8-current", 256, 256, frozen=True, bias=False)
    # W and its transpose, each one byte per value
    assert sum(b.numel() * b.element_size() for n, b in model[0].named_buffers()) <= 2 * 256 * 256 + 16


@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_on_a_frozen_base_trains_without_nan(recipe):
    """peft's own LoRA over the low-precision base, with a row of zeros, in the weight and in the batch."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    with torch.no_grad():
        model[0].weight[3] = 0
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"]))
    low = LowPrecision(Precision(recipe=recipe, policy=LayerPolicy(first_blocks=0, last_blocks=0)))
    low.prepare(peft_model)
    assert {r.reason for r in low.report if r.formats == "high"} == {"adapter"} and sum(r.frozen for r in low.report) == 2
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-2)
    low.attach(optimizer)
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    x[5] = 0
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = (peft_model(x) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0] and all(torch.isfinite(torch.tensor(losses))) and int(low.state.skipped) == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_number_skips_the_step_and_names_the_layer(recipe, where, value):
    low, model = layer(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    low.attach(optimizer)
    good, bad = torch.randn(8, 96), torch.randn(8, 96)
    run(model, good, torch.randn(8, 64))
    optimizer.step()
    before = model[0].weight.detach().clone()
    scales = low.state.scale.clone()
    dy = torch.randn(8, 64)
    (bad if where == "input" else dy)[2, 3] = value
    run(model, bad, dy)
    assert low.nonfinite()[0] == f"0 ({where})"
    optimizer.step()
    assert torch.equal(model[0].weight, before) and int(low.state.skipped) == 1 and torch.equal(low.state.scale, scales)
    run(model, good, torch.randn(8, 64))
    assert not low.nonfinite()
    optimizer.step()
    assert not torch.equal(model[0].weight, before) and torch.isfinite(model[0].weight).all() and int(low.state.step) == 3


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-rowwise"])
@pytest.mark.parametrize("shape", [(48, 96, 64), (37, 50, 21)])
def test_scaled_mm_gives_the_emulation_up_to_the_order_of_sums(recipe, shape):
    tokens, fan_in, fan_out = shape
    x, dy = torch.randn(tokens, fan_in), torch.randn(tokens, fan_out)
    results = []
    for backend in ("emulate", "scaled_mm"):
        low, model = layer(Precision(recipe=recipe, backend=backend), fan_in, fan_out)
        assert low.report[0].backend == backend
        results.append(run(model, x, dy))
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


BACKENDS = [
    ("mxfp8", "scaled_mm", "no scaled_mm path for mxfp8"),
    ("nvfp4", "triton", "Triton"),
    ("fp8-current", "te", "transformer_engine"),
]


@pytest.mark.parametrize("recipe,backend,message", BACKENDS)
def test_an_explicit_backend_that_cannot_serve_is_an_error(recipe, backend, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # under the interpreter the kernels serve a CPU
    with pytest.raises(UnsupportedError, match=message):
        layer(Precision(recipe=recipe, backend=backend))


def test_tensor_scaled_inputs_are_kept_for_backward_in_one_byte():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, tuple(t.shape))) or t, lambda t: t):
        _, model = layer("fp8-current", bias=False)
        model(torch.randn(8, 96))
    assert (torch.float8_e4m3fn, (8, 96)) in saved and (torch.float32, (8, 96)) not in saved


def test_layers_that_are_called_around_are_noticed(caplog):
    """A wrapper that multiplies with the weight itself would train in high precision without a word."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, use_b):
            x = nn.functional.linear(x, self.a.weight)
            return self.b(x) if use_b else nn.functional.linear(x, self.b.weight)

    for use_b in (False, True):
        low = LowPrecision("mxfp8")
        model = low.prepare(Around())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        low.attach(optimizer)
        model(torch.randn(4, 32), use_b).sum().backward()
        assert low.idle() == (["a"] if use_b else ["a", "b"])
        if use_b:
            optimizer.step()
            assert "1 low-precision layers did not run in the first step: a" in caplog.text
        else:
            with pytest.raises(KaruiError, match=r"no low-precision layer ran before the first step \(a, b\)"):
                optimizer.step()
