"""Reference: where adapters start (LoftQ, PiSSA, OLoRA), by whole SVDs in float64 and by the papers' figures."""

import pytest
import torch

from karui.adapters.loftq import loftq
from karui.adapters.olora import olora
from karui.adapters.pissa import pissa
from karui.adapters.start import truncated_svd
from karui.configs.quantspec import QuantSpec
from karui.kernels.quantize import quantize


def gaussian(out=512, width=512, seed=0):
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed))


def error(w, spec, start, scaling):
    base = start.base(w)
    base = base if spec.format == "none" else quantize(base, spec).dequantize()
    return float((w - base - scaling * start.b @ start.a).norm() / w.norm())


@pytest.mark.parametrize("shape", [(20, 33), (33, 20), (16, 16)])
def test_truncated_svd_is_the_head_of_the_whole_one(shape):
    m = gaussian(*shape).double()
    u, s, vt = truncated_svd(m, 5)
    whole = torch.linalg.svd(m, full_matrices=False)
    assert torch.allclose(s, whole.S[:5], rtol=1e-10)
    best = whole.U[:, :5] * whole.S[:5] @ whole.Vh[:5]
    assert torch.allclose((u * s) @ vt, best, atol=1e-9)
    assert torch.allclose(u.T @ u, torch.eye(5, dtype=torch.float64), atol=1e-9)
    assert torch.equal(vt.gather(1, vt.abs().argmax(1, keepdim=True)) > 0, torch.ones(5, 1, dtype=torch.bool))


@pytest.mark.parametrize("scaling", [1.0, 2.0, 4.0])
def test_loftq_figures(scaling):
    """512 x 512 Gaussian, rank 16, NF4: plain .0919, one step .0866, five steps .0785, whatever the scaling."""
    w, spec = gaussian(), QuantSpec.parse("nf4")
    plain = float((w - quantize(w, spec).dequantize()).norm() / w.norm())
    assert plain == pytest.approx(0.0919, abs=3e-4)
    for steps, expected in ((1, 0.0866), (5, 0.0785)):
        assert error(w, spec, loftq(w, spec, rank=16, scaling=scaling, steps=steps), scaling) == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("spec", ["nf4dq", "w4g32", "w2g64", "w3g64a", "fp8", "nvfp4"])
def test_loftq_comes_closer_on_every_grid(spec):
    w, spec = gaussian(96, 128), QuantSpec.parse(spec)
    plain = float((w - quantize(w, spec).dequantize()).norm() / w.norm())
    one, five = (error(w, spec, loftq(w, spec, rank=8, scaling=2.0, steps=t), 2.0) for t in (1, 5))
    assert five < one < plain


def test_loftq_leaves_the_best_rank_r_of_the_error():
    """One step against numpy's route: base q(W), factors the best approximation of W - q(W)."""
    w, spec = gaussian(48, 64), QuantSpec.parse("w4g32")
    start = loftq(w, spec, rank=4, scaling=0.5, steps=1)
    assert start.u is None
    rest = (w - quantize(w, spec).dequantize()).double()
    u, s, vh = torch.linalg.svd(rest, full_matrices=False)
    assert torch.allclose(0.5 * (start.b @ start.a).double(), u[:, :4] * s[:4] @ vh[:4], atol=1e-7)


@pytest.mark.parametrize("scaling", [0.25, 1.0, 2.0])
def test_pissa_takes_out_the_principal_part(scaling):
    w = gaussian(40, 56)
    start = pissa(w, QuantSpec.parse("none"), rank=6, scaling=scaling)
    whole = torch.linalg.svd(w.double(), full_matrices=False)
    assert torch.allclose(scaling * (start.b @ start.a).double(), whole.U[:, :6] * whole.S[:6] @ whole.Vh[:6], atol=1e-5)
    assert torch.allclose(start.base(w).double(), whole.U[:, 6:] * whole.S[6:] @ whole.Vh[6:], atol=1e-5)
    assert torch.allclose(start.a.norm(dim=1), start.b.norm(dim=0), rtol=1e-5)  # the values are split evenly


def test_pissa_on_a_grid_beats_plain_rounding_and_further_steps_help():
    g = torch.Generator().manual_seed(1)
    w = gaussian(96, 128) + 4 * torch.randn(96, 4, generator=g) @ torch.randn(4, 128, generator=g)  # a strong principal part
    spec = QuantSpec.parse("nf4")
    plain = float((w - quantize(w, spec).dequantize()).norm() / w.norm())
    one, five = (error(w, spec, pissa(w, spec, rank=8, scaling=2.0, steps=t), 2.0) for t in (1, 5))
    assert five < one < 0.5 * plain


def test_olora_is_pefts():
    """peft's own layer, initialised from the same weight."""
    from peft import LoraConfig, get_peft_model

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(24, 16, bias=False)

        def forward(self, x):
            return self.layer(x)

    w = gaussian(16, 24)
    model = Model()
    model.layer.weight.data = w.clone()
    peer = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights="olora", target_modules=["layer"])).base_model.model.layer
    start = olora(w, rank=4, scaling=2.0)
    assert torch.allclose(start.b @ start.a, peer.lora_B["default"].weight @ peer.lora_A["default"].weight, atol=1e-5)
    assert torch.allclose(start.base(w), peer.base_layer.weight, atol=1e-5)
    assert torch.allclose(start.b.T @ start.b, torch.eye(4), atol=1e-5)
