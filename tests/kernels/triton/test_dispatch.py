"""Behavioural: what is chosen by device runs: whole paths on tensors that say "cuda" and mix with nothing on the CPU (`pretend`)."""

import copy
import importlib

import pytest
import torch

from karui.configs.quantspec import QuantSpec
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import SamplingParams
from karui.kernels import triton_support
from karui.kernels.quantize import quantize
from karui.kernels.triton_support.offline import MODULES
from tests.kernels.triton.pretend import PretendGpu, backward_too
from tests.kernels.triton.test_runner import CONFIG, on_grid, with_experts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests run on the GPU that is here")
GRIDS = ("w4g32", "w4g128a", "w8t", "w1.58", "w1", "nf4", "nf4dq", "fp8", "fp8t", "mxfp8", "mxfp4", "nvfp4")


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper card with the memory of this test's wishes."""
    for module in map(importlib.import_module, ("karui.kernels.triton_support", *MODULES)):
        for name, value in (("capability", 90), ("num_processors", 4)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**30, 2**34))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    node = torch.autograd.function.BackwardCFunction
    monkeypatch.setattr(node, "apply", backward_too(node.apply))
    with PretendGpu():
        yield


def test_the_pretended_gpu(gpu):
    x, here = torch.ones(3, 4, device="cuda"), torch.ones(4)
    assert x.is_cuda and x.T[0].is_cuda and (x + 1).device.type == "cuda" and torch.arange(3, device=x.device).is_cuda
    assert not here.is_cuda and not x.cpu().is_cuda and here.to(x).is_cuda and (x * torch.tensor(2.0)).is_cuda
    with pytest.raises(RuntimeError, match="on cuda:0 and on cpu"):
        x + here
    with pytest.raises(TypeError, match="use Tensor.cpu"):
        x.numpy()
    assert torch.nn.Linear(4, 5).to("cuda")(x).is_cuda
    assert triton_support.use_triton("auto", x.device, "op") and not triton_support.use_triton("auto", here.device, "op")


def test_grids_and_their_products(gpu):
    from karui.kernels.gemm_weight import gemm_weight, gemm_weight_dgrad, pack_weight

    w, x = torch.randn(6, 128, device="cuda"), torch.randn(2, 128, device="cuda", dtype=torch.float16)
    for spec in GRIDS:
        q = quantize(w, QuantSpec.parse(spec))
        packed = pack_weight(q)
        assert q.codes.is_cuda and q.dequantize().is_cuda and gemm_weight(x, packed).is_cuda, spec
        assert gemm_weight_dgrad(gemm_weight(x, packed), packed).is_cuda, spec


@pytest.mark.parametrize("base", ["nf4dq", "none"])
def test_a_step_of_lora_as_the_trainer_runs_it(base, gpu, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep
    from karui.kernels.lora import triton as kernel
    from karui.trainers.data import IGNORE
    from karui.trainers.model import ATTENTION, LossSum, install_lean_ops, register_attention

    called, said = [], []
    monkeypatch.setattr("karui.kernels.triton_support._say_once", lambda op, reason: said.append(op))
    for name in ("forward", "dgrad"):
        real = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, real=real, name=name: called.append(name) or real(*a))
    register_attention()
    config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=32)  # fmt: skip
    config._attn_implementation = ATTENTION
    model = LlamaForCausalLM(config).to("cuda", torch.float16)
    model = attach(model, LoraStep(method="lora" if base == "none" else "qlora", rank=2, base=base)).model.to("cuda")
    install_lean_ops(model)
    assert not said  # of its probes, some of which are in fp32
    tokens = torch.randint(0, 32, (12,), device="cuda")
    targets = torch.cat([tokens[1:], torch.full((1,), IGNORE, device="cuda")])
    loss = LossSum(model, 16)(tokens, torch.arange(12, device="cuda"), torch.tensor([0, 5, 12], device="cuda"), targets)
    loss.backward()
    assert loss.is_cuda and 1 < loss.item() / 11 < 6
    assert called.count("forward") >= 7 and called.count("dgrad") == 4  # nothing wants the gradient of what q, k and v read
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.fixture
def autocast_here(monkeypatch):
    """torch without CUDA leaves autocast on "cuda" off: that of the CPU stands in for it."""
    for name in ("is_autocast_enabled", "get_autocast_dtype", "autocast"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda kind, *a, real=real, **k: real("cpu" if kind == "cuda" else kind, *a, **k))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_under_autocast_as_the_trainer_runs_it(adapted, gpu, autocast_here):
    """Weights in fp32, products in half precision: gradients are those of fp32 and in fp32, the head's too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep
    from karui.trainers.data import IGNORE
    from karui.trainers.model import ATTENTION, LossSum, install_lean_ops, register_attention

    register_attention()
    torch.manual_seed(2)
    config = LlamaConfig(vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False)  # fmt: skip
    config._attn_implementation = ATTENTION
    plain = LlamaForCausalLM(config)
    if adapted:
        plain = attach(plain, LoraStep(method="lora", rank=2, init="gaussian")).model
    lean = copy.deepcopy(plain).to("cuda")
    install_lean_ops(lean)
    tokens = torch.randint(0, 40, (12,))
    batch = tokens, torch.arange(12), torch.tensor([0, 5, 12]), torch.cat([tokens[1:], torch.full((1,), IGNORE)])
    want = LossSum(plain, 4)(*batch)
    with torch.autocast("cuda", torch.float16):
        got = LossSum(lean, 4)(*(t.to("cuda") for t in batch))
    want.backward()
    got.backward()
    assert got.dtype == torch.float32 and abs(got.item() - want.item()) <= 2e-3 * want.item()
    grads = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    for name, p in lean.named_parameters():
        assert (p.grad is None) is (name not in grads), name
        if p.grad is not None:
            assert p.grad.dtype == torch.float32, name
            assert (p.grad.cpu() - grads[name]).norm() <= 2e-2 * grads[name].norm() + 1e-3, name


def test_all_layers_of_a_step_take_one_table_of_tiles(gpu, monkeypatch):
    from karui.kernels.document_attention import document_attention, triton

    made, real = [], triton.tiles
    monkeypatch.setattr(triton, "tiles", lambda *args: made.append(args) or real(*args))
    x = torch.randn(1, 2, 9, 16, device="cuda", dtype=torch.float16, requires_grad=True)
    cu = torch.tensor([0, 4, 9], device="cuda")

    def step(cu):
        return torch.autograd.grad(sum(document_attention(x, x, x, cu, 0.3).float().square().sum() for _ in range(2)), x)[0]

    first = step(cu)
    assert [block for _, _, block in made] == [128, 64]  # forward's and backward's
    cu[1] = 6
    second = step(cu)
    assert len(made) == 4 and not torch.equal(first, second)
    assert torch.equal(step(cu.clone()), second) and len(made) == 6
    with torch.inference_mode():
        document_attention(x, x, x, cu + 0, 0.3)
    assert len(made) == 7


def test_targets_are_checked_without_waiting(gpu):
    from karui.kernels.cross_entropy import linear_cross_entropy

    hidden, weight = torch.ones(2, 16, device="cuda", dtype=torch.float16), torch.ones(5, 16, device="cuda", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: targets"):  # the device's assertion, later, on a real one
        linear_cross_entropy(hidden, weight, torch.tensor([0, 5], device="cuda"))


def test_a_loss_of_logits_under_autocast(gpu, autocast_here):
    from karui.kernels.linear_loss import linear_loss

    seen = []

    def rows(start, stop, logits):
        seen.append(logits.clone())
        return logits.sum(-1) - logits.mul_(0).add_(1).sum(-1)

    hidden, weight = (torch.randn(*s, device="cuda", requires_grad=True) for s in ((5, 16), (33, 16)))
    with torch.autocast("cuda", torch.float16):
        loss, _ = linear_loss(hidden, weight, rows, 3)
    (loss * 2).backward()
    exact = torch.cat(seen).cpu()
    assert torch.equal(exact, exact.half().float())  # products of half precision, summed up in fp32
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.cpu(), 2 * hidden.detach().cpu().sum(0).expand(33, -1), rtol=2e-2, atol=2e-2)


SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "max_position_embeddings": 32, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(("kind", "adapted", "changes"), [
    ("mixtral", True, {"num_local_experts": 4}),
    ("qwen2_moe", False, {"num_experts": 4, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    ("qwen3_moe", False, {"num_experts": 5, "norm_topk_prob": True})])  # fmt: skip
def test_a_step_of_a_mixture_as_the_trainer_runs_it(kind, adapted, changes, gpu, monkeypatch):
    """Loss and gradients of the model as transformers computes it in fp32 on the CPU; frozen experts get none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from karui.adapters.lora import attach
    from karui.configs.steps import LoraStep
    from karui.kernels.gemm_grouped import triton as kernel
    from karui.trainers.data import IGNORE
    from karui.trainers.model import ATTENTION, LossSum, install_lean_ops, register_attention

    called, real = [], kernel._product
    monkeypatch.setattr(kernel, "_product", lambda *a: called.append(a[4]) or real(*a))
    register_attention()
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **changes), attn_implementation=ATTENTION).float()
    with torch.no_grad():
        for name, p in plain.named_parameters():  # routers far from ties
            p.copy_(torch.randn_like(p) * (2.0 if name.endswith(".gate.weight") else 0.2) + ("norm" in name))
    lean = copy.deepcopy(plain).to("cuda", torch.float16)
    if adapted:
        plain, lean = (attach(m, LoraStep(method="lora", rank=2)).model for m in (plain, lean))
        lean.load_state_dict({n: p.to("cuda", torch.float16) for n, p in plain.state_dict().items()})
        lean.to("cuda", torch.float16)
    done = install_lean_ops(lean)
    tokens = torch.randint(0, 32, (12,))
    targets = torch.cat([tokens[1:], torch.full((1,), IGNORE)])
    batch = tokens, torch.arange(12), torch.tensor([0, 5, 12]), targets
    want, got = LossSum(plain, 16)(*batch), LossSum(lean, 16)(*(t.to("cuda") for t in batch))
    layers = 1 if kind == "qwen2_moe" else 2
    assert done["experts"] == layers and len(called) == 2 * layers and got.is_cuda
    assert abs(got.item() - want.item()) <= 5e-3 * want.item()
    want.backward()
    got.backward()
    assert len(called) == 4 * layers  # dx of each
    grads = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    assert any("experts" in n for n in grads) is not adapted
    for name, p in lean.named_parameters():
        assert (p.grad is None) is (name not in grads), name
        if p.grad is not None:
            assert (p.grad.cpu().float() - grads[name]).norm() <= 4e-2 * grads[name].norm() + 1e-3, name


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-blockwise", "mxfp8", "nvfp4"])
def test_a_step_in_low_precision(recipe, gpu):
    from karui.lowprec import LowPrecision, Precision

    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32), torch.nn.Linear(32, 16)).to("cuda", torch.float16)
    low = LowPrecision(Precision.parse(recipe))
    low.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    low.attach(optimizer)
    passed = [torch.randn(20, 32, device="cuda", dtype=torch.float16)]
    for layer in model:
        passed.append(layer(passed[-1]))
        passed[-1].retain_grad()
    also = model[0](passed[0])  # what has been coded is noted again
    (passed[-1].float().square().mean() + 0 * also.sum()).backward()
    # amaxes are noted as operands are coded, or in a pass of their own where a scale needs them
    for i, seen in enumerate(low.state.staged.cpu()[:3]):
        assert seen[0] == passed[i].abs().max().cpu() and seen[2] == passed[i + 1].grad.abs().max().cpu(), (i, seen)
    optimizer.step()
    assert passed[-1].is_cuda and all(torch.isfinite(p.grad).all() for p in model.parameters())
    model[1](torch.full((4, 48), float("nan"), device="cuda", dtype=torch.float16))
    assert low.state.nonfinite() == ["1 (input)"]


@pytest.mark.parametrize(("config", "spec", "kv_dtype", "params"), [
    (CONFIG, "nvfp4", "fp8", SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=1, logprobs=0)),
    (CONFIG, "w4g32", "int8", SamplingParams(max_tokens=2, temperature=1.0, repetition_penalty=1.3, seed=2, logprobs=2)),
    (with_experts("qwen2_moe"), "w8", "float16", SamplingParams(max_tokens=2, temperature=0.0)),
], ids=["drawn on the GPU", "drawn on the CPU", "experts"])  # fmt: skip
def test_the_engine(config, spec, kv_dtype, params, gpu):
    from karui.inference.models.gpu import TritonRunner

    made, said = on_grid(spec, config), []
    for runner in (TritonRunner(config, made, "cuda", torch.float16, graphs=False), TorchRunner(config, made, "cuda", torch.float16)):
        engine = Engine(runner, kv_dtype=kv_dtype, memory="1MB", block_size=4, max_context=32, max_tokens_per_step=8)
        outputs = engine.generate([[1, 2, 3, 4, 5, 6], [10, 11]], params)
        said.append([o.token_ids for o in outputs])
        assert all(c.error is None for o in outputs for c in o.completions), outputs
    assert said[0] == said[1]
