"""Unit tests of the plan: which formats a GPU has, limits of the speed-up, padding and saved activations."""

import pytest
import torch
from torch import nn

from karui.configs import KaruiError
from karui.lowprec import Precision
from karui.lowprec.plan import GPUS, find_gpu, plan_layers
from karui.lowprec.precision import RECIPES
from tests.lowprec.conftest import Tiny


def one(recipe, gpu, fan_in=8192, fan_out=8192, tokens=8192, frozen=False):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(fan_in, fan_out))
    model.requires_grad_(not frozen)
    (row,) = plan_layers(model, Precision.parse(recipe), gpu, tokens)
    return row


LACKS = {
    "A100": set(RECIPES),
    "L40S": {"fp8-blockwise", "mxfp8", "mxfp4", "nvfp4"},
    "H200": {"mxfp8", "mxfp4", "nvfp4"},
    "B200": set(),
    "RTX 4090": {"fp8-blockwise", "mxfp8", "mxfp4", "nvfp4"},
    "RTX 5090": set(),
}


@pytest.mark.parametrize("gpu", list(LACKS))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_format_the_gpu_lacks_is_said_and_is_never_faster(gpu, recipe):
    row = one(recipe, gpu)
    if recipe in LACKS[gpu]:
        assert row.hardware == "emulated in bf16" and recipe in row.reason and row.speed_up < 1
    else:
        limit = GPUS[gpu].fp4 / GPUS[gpu].bf16 if recipe in ("mxfp4", "nvfp4") else GPUS[gpu].fp8 / GPUS[gpu].bf16
        assert 1.2 < row.speed_up < limit


def test_the_backend_is_what_auto_takes_there():
    """scaled_mm for scales per tensor and row, karui's kernels for the others, emulation where FP8 is not in hardware."""
    taken = {gpu: {recipe: one(recipe, gpu).backend for recipe in RECIPES} for gpu in ("A100", "H100", "RTX 5090")}
    per_tensor = dict.fromkeys(("fp8-delayed", "fp8-current", "fp8-rowwise"), "scaled_mm")
    assert set(taken["A100"].values()) == {"emulate"}
    assert taken["H100"] == taken["RTX 5090"] == per_tensor | {r: "triton" for r in RECIPES if r not in per_tensor}
    assert one({"recipe": "fp8-current", "backend": "te"}, "H100").backend == "te"


def test_small_layers_gain_less_and_tiny_ones_lose():
    sizes = [one("fp8-current", "H200", n, n, 4096).speed_up for n in (256, 1024, 4096, 16384)]
    assert sizes == sorted(sizes) and sizes[0] < 1 < sizes[-1] < 2


def test_large_layers_on_h200_by_hand():
    """8192^3: 2 * 8192^3 / 989e12 = 1.112 ms against 0.556 ms and 0.084 ms for quantizing two matrices."""
    assert one("fp8-current", "H200").speed_up == pytest.approx(1.1117 / (0.5556 + 2 * 8192**2 * 3 / 4.8e12 * 1e3), rel=1e-3)


def test_saved_activations_and_padding():
    assert one("fp8-current", "H200", 1000, 64, 10).saved_bytes == 10_000
    assert one("mxfp8", "B200").saved_bytes == 0 and one("fp8-current", "H200", frozen=True).saved_bytes == 0
    assert one("mxfp8", "B200", 1000, 64).padding == "in 1000 -> 1024"


def test_layers_that_read_one_input_save_it_once():
    model = nn.ModuleDict({n: nn.Linear(1000, 64) for n in ("q_proj", "k_proj", "v_proj", "up_proj")})
    saved = {r.name: r.saved_bytes for r in plan_layers(model, Precision.parse("fp8-current"), "H200", 10)}
    assert saved == {"q_proj": 3333, "k_proj": 3333, "v_proj": 3333, "up_proj": 10_000}


def test_layers_that_stay_high_are_in_the_plan():
    rows = {r.name: r for r in plan_layers(Tiny(blocks=4), Precision.parse("nvfp4"), "b200", 64)}
    assert (
        rows["out"].formats == "high" and rows["out"].speed_up == 1 and rows["layers.0.up"].reason == "one of the first 1 blocks"
    )
    assert rows["layers.1.up"].hardware == "fp4 tensor cores" and rows["out"].backend == "torch"


def test_names_of_gpus():
    assert find_gpu("rtx5090") is find_gpu("RTX 5090") is find_gpu("5090") and find_gpu("h100").sm == 90
    with pytest.raises(KaruiError, match="GPU 'V100' is not in the table; known: A100"):
        find_gpu("V100")
    with pytest.raises(KaruiError, match="tokens per micro-batch, got 0"):
        one("mxfp8", "H100", tokens=0)
