"""Behavioural: what training does on a GPU, as far as that shows without one: where it looks, what it asks of torch, what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from karui.configs.errors import KaruiError, UnsupportedError
from karui.lowprec import LowPrecision, Precision
from karui.lowprec.backends import multiply
from karui.lowprec.operand import encode
from karui.trainers import preflight, spread
from karui.trainers.checkpoint import restore_optimizer
from karui.trainers.compact import compact
from karui.trainers.data import Sample, collate
from karui.trainers.lean import check_context
from karui.trainers.loop import read_log
from karui.trainers.model import LossSum
from karui.trainers.objectives import distil
from karui.trainers.objectives.teacher import Teacher
from karui.trainers.run import _make_accelerator, run_recipe
from karui.trainers.stages import Context
from karui.trainers.stages.lowprec import LowPrecisionStage
from tests.kernels.triton.pretend import PretendGpu, marked

CUDA, META = torch.device("cuda"), torch.device("meta")
OPTIM = {"lr": 5e-3, "batch": 4, "steps": 6, "micro_tokens": 128}


def rows(folder):
    return [(r["step"], r["loss"], r["grad_norm"], r["skipped"]) for r in read_log(folder) if "loss" in r]


@pytest.mark.parametrize(("recipe", "backend"), [("fp8-current", "scaled_mm"), ("mxfp8", "triton")])
def test_who_multiplies_is_chosen_for_the_device_that_trains(recipe, backend, make_recipe, monkeypatch):
    """A run prepares the model on the CPU and moves it afterwards."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("karui.lowprec.backends.triton_obstacle", lambda device, needs=80: "" if device.type == "cuda" else "no GPU")
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    made = make_recipe(prepare=[{"method": recipe}])
    stage = LowPrecisionStage(made.prepare[0], Context(recipe=made, model_folder=None, tokenizer=None, samples=None, base="", device=CUDA))
    stage.prepare(model)
    assert {row.backend for row in stage.low.report} == {backend} and not stage.low.state.history.is_cuda
    assert LowPrecision(recipe).prepare(torch.nn.Sequential(torch.nn.Linear(32, 32)))[0].backend == "emulate"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_rowwise_products_are_asked_for_in_bf16(dtype, monkeypatch):
    """The only output dtype that every CUDA kernel for them has."""
    asked, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, out_dtype, **k: asked.append(out_dtype) or real(*a, out_dtype=out_dtype, **k))
    row, _ = Precision(recipe="fp8-rowwise").operands("fprop", "fp8-rowwise")
    a, b = encode(torch.randn(20, 32), row), encode(torch.randn(16, 32), row)
    with PretendGpu():
        for coded in (a, b):
            coded.codes.on_gpu = coded.scale.on_gpu = True
        got = multiply(a, b, "scaled_mm", dtype)
    assert asked == [torch.bfloat16] and got.dtype == dtype


def test_fp16_lowers_its_loss_scale_after_an_overflow_goes_on_and_resumes(make_recipe, tmp_path, monkeypatch):
    """As on a GPU, with the CPU's scaler: the first steps overflow."""

    def scaled(recipe):
        AcceleratorState._reset_state(True)
        accelerator = _make_accelerator(recipe)
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3), True
        accelerator.state._mixed_precision = "fp16"
        return accelerator

    monkeypatch.setattr("karui.trainers.run._make_accelerator", scaled)
    recipe = make_recipe(prepare=[], optim={**OPTIM, "steps": 12}, run={"checkpoint_every": 8, "keep": 9})
    whole = run_recipe(recipe)
    found = rows(whole.folder)
    skipped = [r[3] for r in found]
    assert skipped[0] and not all(skipped[:9]) and whole.metrics["eval_loss"] < whole.metrics["eval_loss_before"]
    again = run_recipe(recipe, resume=whole.folder / "checkpoint-000008")
    assert rows(again.folder) == found


def test_fp16_is_refused_where_it_would_train_wrongly():
    half = torch.nn.Linear(2, 2).half()
    with pytest.raises(UnsupportedError, match="FSDP2.*use bf16"):
        spread._check_half(torch.nn.Linear(2, 2), True)
    with pytest.raises(UnsupportedError, match="weight is in fp16; set model.dtype"):
        spread._check_half(half, False)
    spread._check_half(half.requires_grad_(False), False)


def test_buffers_are_not_sent_to_the_other_ranks_in_every_step(tmp_path, make_recipe):
    loss = torch.nn.Linear(2, 2)
    loss.register_buffer("codes", torch.zeros(3))
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(loss)
        accelerator = SimpleNamespace(state=None, num_processes=1,
                                      prepare=lambda module, optimizer: (wrapped, SimpleNamespace(optimizer=optimizer)))
        laid = spread.spread(make_recipe(), accelerator, loss, lambda: torch.optim.SGD(loss.parameters(), lr=0.1), ())
        assert laid.module is wrapped and not wrapped.will_sync_module_buffers()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_finds_its_step_counts_on_the_parameters_device(fused):
    module = torch.nn.Linear(2, 2, device=META)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.param_groups[0]["fused"] = fused
    kinds = {f"{kind}/{n}": torch.ones(p.shape) for n, p in module.named_parameters() for kind in ("exp_avg", "exp_avg_sq")}
    restore_optimizer(optimizer, module, kinds | {f"step/{n}": torch.tensor(3.0) for n, _ in module.named_parameters()}, "here")
    assert all(state["step"].device.type == ("meta" if fused else "cpu") for state in optimizer.state.values())


def test_without_a_window_nothing_is_looked_at():
    check_context(None, None, None, None)
    with pytest.raises(UnsupportedError, match="a document of 5 tokens"):
        check_context(torch.tensor([0, 5, 7]), 4, None, None)


def test_a_batch_is_fetched_from_the_gpu_as_often_for_many_documents_as_for_two():
    looks = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.cpu}

    class Counting(PretendGpu):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func in looks and marked(args[0])
            return super().__torch_function__(func, types, args, kwargs)

    def fetched(documents):
        samples = [Sample(ids=np.array([5, 6, 7, 8, 9, 10 + i, 3], np.int32), loss_mask=np.arange(7) > 5, source_row=0) for i in range(documents)]
        batch = collate(samples)
        with Counting() as mode:
            there = batch.to("cuda")
            got = compact(there.tokens, there.positions, there.cu_seqlens, there.targets)
            assert got.tokens.is_cuda and got.cu_seqlens.is_cuda and got.shared
            count = mode.count
            assert got.cu_seqlens.tolist()[:3] == [0, 5, 6]
        return count

    assert fetched(2) == fetched(12)


def test_the_measured_rate_is_that_of_the_products_dtype(make_recipe, monkeypatch):
    assert preflight._computed_in(make_recipe(run={"precision": "bf16"})) == "bfloat16"
    assert preflight._computed_in(make_recipe(model={"dtype": "float16"})) == "float16"

    def full(*shape, **how):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(torch, "randn", full)
    with pytest.raises(KaruiError, match="no room for the preflight.*nvidia-smi"):
        preflight.measure_rate(SimpleNamespace(hidden=8, ffn=8), 4)


def test_a_full_gpu_says_what_to_lower(make_recipe, monkeypatch):
    def full(self, *batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LossSum, "forward", full)
    with pytest.raises(KaruiError, match=r"memory is full \(CUDA out of memory\); lower optim.micro_tokens \(now 128\)"):
        run_recipe(make_recipe(data={"packing": False}))


def test_a_teacher_goes_to_the_gpu_and_one_that_is_read_from_its_file_stays():
    for offload in (False, True):
        teacher = Teacher.__new__(Teacher)
        teacher.section, teacher.head, teacher.model = SimpleNamespace(offload=offload), torch.ones(2), torch.nn.Linear(2, 2)
        assert teacher.to(META).head.is_meta and teacher.model.weight.is_meta is not offload


def test_a_teachers_cache_is_filled_on_the_device(monkeypatch):
    moved = []
    made = SimpleNamespace(section=SimpleNamespace(cache="auto"), shared=None, use_cache=lambda cache: moved.append(cache),
                           _teacher=[SimpleNamespace(to=lambda device: f"teacher on {device}")])
    monkeypatch.setattr(distil, "fill_cache", lambda section, samples, teacher, tokenizer, shared: teacher)
    distil.make(SimpleNamespace(stages=[], recipe=None, model=None, tokenizer=None, samples=None), lambda *a: made)
    assert moved == ["teacher on cpu"] or torch.cuda.is_available()
