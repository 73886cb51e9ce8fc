"""Behavioural: kernels compile as the benchmark and the engine launch them on a GPU, and what a GPU refuses is refused.

The compiler and the interpreter cannot be had in one process, so the walk runs in another.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.triton.launched import Gpu, Launch, OnMeta, Refused


def walked(*arguments: str) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.triton.launched", *arguments], capture_output=True, text=True, env=env)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-4000:] + "\n".join(f"{r['name']}: {r.get('error')}" for r in rows if not r["ok"])
    return rows


def test_a_check_compiles_as_it_is_launched():
    one, other = walked("--parts", "correct: rms_norm")
    assert (one["name"], other["name"]) == ("rms_norm.triton._forward", "rms_norm.triton._backward") and one["cc"] == 90
    assert one["grid"] == [33, 1, 1] and one["types"]["x_ptr"] == "*bf16" and one["constants"]["KEEP"] == "True"
    assert {"x_ptr", "weight_ptr"} <= set(one["by_16"]) and not {"width", "stride"} & set(one["by_16"])  # 200 is no multiple of 16
    assert one["stack"] == 0 < one["reg"]


@pytest.mark.slow
@pytest.mark.parametrize("cc", [80, 90, 100])
def test_all_that_is_launched_compiles(cc):
    rows = walked("--cc", str(cc))
    assert len(rows) > 250 and {r["name"] for r in rows} >= {"gemm_weight.words._gemm", "paged_attention.kivi._attend", "lora.triton._low_rank"}


@pytest.mark.slow
def test_what_is_measured_was_compiled_beforehand():
    assert walked("--warmed", "--parts", "GEMMs", "decoding", "engine", "LoRA", "quantizers", "experts", "QLoRA") == []


def test_tensors_say_cuda_and_few_integers_are_known():
    with OnMeta(Gpu(90, [])):
        starts = torch.tensor([0, 3, 5], device="cuda")
        lengths = starts[1:] - starts[:-1]
        assert starts.is_cuda and lengths.device == torch.device("cuda:0") and lengths.tolist() == [3, 2]
        rows = torch.arange(2, device="cuda").repeat_interleave(lengths)
        rows[1] = 7
        assert rows.cpu().tolist() == [0, 7, 0, 1, 1] and rows.unique().tolist() == [0, 1, 7]
        x = torch.randn(4, 4, device="cuda")
        assert bool(torch.isfinite(x).all()) and not bool(torch.isinf(x).any()) and x.sum().item() == 0.0
        assert x[1].data_ptr() - x.data_ptr() == 16
        with pytest.raises(RuntimeError, match="device"):
            torch.cat([torch.zeros(1), x[0]])


def test_a_capture_waits_for_nothing():
    gpu = Gpu(90, [])
    with OnMeta(gpu):
        x = torch.zeros(3, device="cuda")
        gpu.capturing = True
        for wait in (x.tolist, x.cpu, lambda: x.copy_(torch.zeros(3)), lambda: torch.zeros(3).to("cuda"), lambda: bool(x[0])):
            with pytest.raises(Refused, match="while a graph is captured"):
                wait()
        (x + 1).copy_(x)


def test_a_launch_beyond_the_grid_or_on_the_host_is_refused():
    kernel = type("Kernel", (), {"fn": test_a_capture_waits_for_nothing})
    launch = Launch(kernel, {}, {}, {}, None, "a test")
    with OnMeta(Gpu(90, [])):
        x = torch.zeros(8, device="cuda")
        launch.run(2, 1, 1, None, x)
        launch.run(1, 65535, 1, None, x[:3])
        assert launch.grid == (2, 65535, 1) and launch.elements == 8
        for grid, tensor, why in (((1, 65536, 1), x, "a grid of 1 x 65536 x 1"), ((0, 1, 1), x, "a grid of 0"), ((1, 1, 1), torch.zeros(8), "host")):
            with pytest.raises(Refused, match=why):
                launch.run(*grid, None, tensor)
