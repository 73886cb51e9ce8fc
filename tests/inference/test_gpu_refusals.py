"""Behavioural: what is said where a GPU cannot be used: its driver, its memory, its chip, no Triton. Everything is mocked."""

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference import loading, memory
from karui.inference.engine import Engine
from karui.inference.models import gpu
from karui.inference.models.decoder import TorchRunner
from karui.kernels import triton_support
from karui.kernels.quantize import quantize
from karui.kernels.triton_support import driver
from tests.inference.conftest import tiny

GIB = 2**30


@pytest.mark.parametrize(("toolkit", "version", "said"), [
    ("13.0", (12, 4), r"driver serves CUDA up to 12\.4, this torch is built for CUDA 13\.0: update the driver"),
    ("12.8", (12, 4), r"torch is built for CUDA 12\.8, the driver serves 12\.4, and yet no GPU is visible"),
    ("12.8", None, r"built for CUDA 12\.8 and finds no NVIDIA driver"),
    (None, (12, 4), "is built without CUDA"),
])  # fmt: skip
def test_no_gpu(toolkit, version, said, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "driver_version", lambda: version)
    opened = type("Opened", (), {"path": tmp_path})()
    with pytest.raises(KaruiError, match=f"device 'cuda': .*{said}"):
        loading.make_runner(opened, tiny("llama")[1], device="cuda")


def test_the_doctor_says_the_same(monkeypatch):
    from karui.trainers.doctor import _device

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 4))
    finding = _device()
    assert finding.state == "note" and "12.4" in finding.found and "13.0" in finding.found


def test_the_driver_of_this_machine():
    found = driver.driver_version()
    assert found is None or (found[0] >= 9 and 0 <= found[1] < 100)


class OutOfResources(Exception):
    """Triton's, by name."""


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
     r"device kernel image is invalid\): Triton's compiler is of CUDA (\d+\.\d+|unknown version), the driver serves CUDA up to 12\.2"),
    (OutOfResources("out of resource: shared memory, Required: 150000, Hardware limit: 101376."), "more than this GPU has"),
])  # fmt: skip
def test_errors_of_the_launcher(error, said, monkeypatch):
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 2))
    with pytest.raises(UnsupportedError, match=f"{said}.*use runner='torch'"), driver.explained("use runner='torch'"):
        raise error


def test_other_errors_pass_and_full_memory_stays_full_memory():
    with pytest.raises(ZeroDivisionError), driver.explained("stay"):
        raise ZeroDivisionError("division by zero")
    with pytest.raises(torch.OutOfMemoryError), driver.explained("stay"):
        raise RuntimeError("Triton Error [CUDA]: out of memory")


def test_the_runner_explains_its_launches(monkeypatch):
    runner = object.__new__(gpu.TritonRunner)
    runner.device = torch.device("cpu")
    monkeypatch.setattr(driver, "driver_version", lambda: (11, 8))

    def forward(batch):
        raise RuntimeError("Triton Error [CUDA]: no kernel image is available for execution on the device")

    monkeypatch.setattr(runner, "_forward", forward, raising=False)
    with pytest.raises(UnsupportedError, match=r"driver serves CUDA up to 11\.8; update the driver, or use runner='torch'"):
        runner.forward(None)


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def on_a_gpu(monkeypatch, free):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 24 * GIB))


@pytest.mark.parametrize(("spec", "bits", "said"), [
    (None, 20.0, "bf16 would fit"), (None, 12.0, "w8 or fp8 would fit"), (None, 5.0, "w4g128 would fit"), ("w8", 3.0, "w2g64 would fit"),
    (None, 1.5, "not even two bits would fit")])  # fmt: skip
@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_weights_that_do_not_fit(choice, spec, bits, said, monkeypatch, tmp_path):
    """How much was asked, how much was free, what would fit."""
    _, config, weights = tiny("llama")
    made = {n: quantize(w, QuantSpec.parse(spec)) if spec and w.ndim == 2 and "embed" not in n else w for n, w in weights.items()}
    count = sum(w.numel() for w in weights.values())
    on_a_gpu(monkeypatch, int(count * bits / 8 / 0.9) + 1)
    monkeypatch.setattr(gpu, "unsuited", lambda config, device: "")
    for runner in (gpu.TritonRunner, TorchRunner):
        monkeypatch.setattr(runner, "load_weights", full)
    opened = type("Opened", (), {"path": tmp_path, "weights": lambda self: made})()
    asked = (count * 2 if spec is None else sum(w.numel() * 2 for n, w in made.items() if torch.is_tensor(w)) + sum(
        w.codes.numel() for w in made.values() if not torch.is_tensor(w))) / GIB  # fmt: skip
    message = rf"does not fit on cuda: .* ask for {asked:.2f} GiB, .* were free, {bits:.1f} bits per weight: {said}"
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: self)  # there is no GPU to go to
    with pytest.raises(UnsupportedError, match=message):
        loading.make_runner(opened, config, device="cuda", choice=choice)


def test_a_cache_that_does_not_fit(monkeypatch):
    _, config, weights = tiny("llama")
    monkeypatch.setattr(gpu, "unsuited", lambda config, device: "")
    runner = gpu.TritonRunner(config, weights, "cpu", torch.float32)
    on_a_gpu(monkeypatch, 10 * 16 * runner.kv_bytes_per_token("bfloat16"))
    monkeypatch.setattr(TorchRunner, "allocate", full)
    with pytest.raises(UnsupportedError, match=r"400000 blocks of KV cache need .* GiB, .* GiB are free; 10 blocks would fit .*kv_dtype='fp8'"):
        runner.allocate(400_000, 16, "bfloat16")


@pytest.mark.parametrize(("free", "kept"), [(100 * GIB, 10 * GIB), (5 * GIB, GIB), (GIB, GIB // 2)])
def test_what_a_gpu_keeps_for_the_steps(free, kept, monkeypatch):
    """Memory that loading gave back to torch alone is handed to the driver before it is asked what is free."""
    said = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: said.append("asked") or (free, 200 * GIB))
    assert memory.default_budget(torch.device("cuda")) == free - kept and said == ["emptied", "asked"]


def test_no_triton_and_an_old_chip(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(triton_support, "has_triton", lambda: False)
    assert "pip install 'karui[triton]'" in gpu.unsuited(tiny("llama")[1], cuda)
    monkeypatch.setattr(triton_support, "has_triton", lambda: True)
    monkeypatch.setattr(triton_support, "capability", lambda device: 75)
    assert gpu.unsuited(tiny("llama")[1], cuda) == "it needs compute capability 80, this GPU has 75"
    with pytest.raises(UnsupportedError, match=r"gemm_fp8: backend triton cannot serve this call: it needs compute capability 89"):
        triton_support.use_triton("triton", cuda, "gemm_fp8", needs=89)


@pytest.mark.parametrize(("options", "said"), [({"activation_bits": 4}, "must be 8 or 16"), (
    {"runner": "torch", "activation_bits": 8}, "torch runner computes with activations as they are")])  # fmt: skip
def test_activation_bits(options, said, tmp_path):
    model, _, _ = tiny("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(KaruiError, match=said):
        Engine.load(tmp_path, **options)


def test_rollouts_take_the_triton_runner_where_it_serves(monkeypatch):
    from karui.trainers.objectives import engine_sampler

    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module, name in ((gpu, "TritonRunner"), (loading, "TorchRunner")):
        monkeypatch.setattr(module, name, lambda config, weights, device, dtype, *rest, name=name: made.append((name, dtype)))
    monkeypatch.setattr("karui.inference.models.decoder.TorchRunner", loading.TorchRunner)
    for reason in ("", "model type gemma"):
        monkeypatch.setattr(gpu, "unsuited", lambda config, device, reason=reason: reason)
        engine_sampler.make_runner(None, {})
    assert made == [("TritonRunner", torch.bfloat16), ("TorchRunner", torch.float32)]


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch):
    assert loading._device("auto").type == "cpu" and loading._device("auto", "native").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loading._device("auto").type == "cuda" and loading._device("auto", "torch").type == "cuda"
    assert loading._device("auto", "native").type == "cpu" and loading._device("cuda:1").index == 1
    with pytest.raises(KaruiError, match="device 'gpu' is not known; use auto, cpu, cuda or cuda:1"):
        loading._device("gpu")
