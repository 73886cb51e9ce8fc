"""Behavioural tests of what must give the same bits: delayed scaling's state, resume, recomputation, compilation, ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from karui.configs import KaruiError
from karui.lowprec import LowPrecision, LowPrecisionState, Precision, Switch
from karui.lowprec.precision import RECIPES
from tests.lowprec.conftest import Tiny
from tests.processes import called, free_port


def trainer(model, precision):
    low = LowPrecision(precision)
    low.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    low.attach(optimizer)
    return low, optimizer


def step(model, optimizer, ids):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return loss.item(), gradients


def test_delayed_scaling_against_the_rule_step_by_step():
    """TransformerEngine's rule on Python lists, over more steps than the history is long."""
    low = LowPrecision(Precision(recipe="fp8-delayed", history=3, margin=1))
    model = low.prepare(nn.Sequential(nn.Linear(16, 16)))
    history, scale = [0.0, 0.0, 0.0], 0.0
    for amax in (1.0, 8.0, 2.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1e-44):
        model(torch.full((2, 16), amax))
        assert low.state.staged[0, 0] == torch.tensor(amax)
        history[0] = torch.tensor(amax).item()
        top = max(history)
        if top > 0:
            scale = min(448.0 / top / 2.0, torch.finfo(torch.float32).max)
        history = [0.0, *history[2:], history[0]]
        low.finish_step()
        assert low.state.history[0, 0].tolist() == history
        assert low.state.scale[0, 0].item() == pytest.approx(scale, rel=1e-6)


def test_the_first_step_takes_the_current_scale_and_the_next_the_history():
    low = LowPrecision(Precision(recipe="fp8-delayed", history=4))
    model = low.prepare(nn.Sequential(nn.Linear(16, 16, bias=False)))
    current = LowPrecision("fp8-current")
    torch.manual_seed(0)
    other = current.prepare(nn.Sequential(nn.Linear(16, 16, bias=False)))
    other[0].weight = model[0].weight
    x = 1e-4 * torch.randn(8, 16)
    assert torch.equal(model(x), other(x)) and model(x).any()
    low.finish_step()
    assert torch.equal(model(x), other(x))
    assert not torch.equal(model(3 * x), other(3 * x))  # saturated by the old scale


def test_evaluation_records_nothing():
    low = LowPrecision("fp8-delayed")
    model = low.prepare(nn.Sequential(nn.Linear(16, 16))).eval()
    model(torch.randn(4, 16))
    assert not low.state.staged.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_activations_give_the_same_bits(tiny, ids, recipe):
    results = []
    for recompute in (False, True):
        model = tiny(recompute=recompute)
        low, optimizer = trainer(model, recipe)
        results.append([step(model, optimizer, ids) for _ in range(3)] + [low.state.history.clone(), low.state.scale.clone()])
    for (loss, grads), (again, grads_again) in zip(results[0][:3], results[1][:3]):
        assert loss == again and all(torch.equal(a, b) for a, b in zip(grads, grads_again))
    assert torch.equal(results[0][3], results[1][3]) and torch.equal(results[0][4], results[1][4])


@pytest.mark.parametrize("recipe", [*RECIPES, "scheduled"])
def test_resume_is_exact(tiny, ids, recipe, tmp_path):
    """Six steps at once equal three, a checkpoint through safetensors, and three more in a new process's objects."""
    from safetensors.torch import load_file, save_file

    precision = recipe
    if recipe == "scheduled":
        precision = Precision(recipe="nvfp4", schedule=(Switch(step=2, gemm="wgrad", to="mxfp8"), Switch(step=4, to="high")))
    model = tiny()
    _, optimizer = trainer(model, precision)
    whole = [step(model, optimizer, ids)[0] for _ in range(6)]

    model = tiny()
    _, optimizer = trainer(model, precision)
    first = [step(model, optimizer, ids)[0] for _ in range(3)]
    tensors = {k: v.clone() for k, v in model.state_dict().items()}  # clones: the head is tied
    save_file(tensors, tmp_path / "model.safetensors")
    states = optimizer.state_dict()

    model = tiny()
    low, optimizer = trainer(model, precision)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    optimizer.load_state_dict(states)
    assert int(low.state.step) == 3
    assert first + [step(model, optimizer, ids)[0] for _ in range(3)] == whole


def test_a_resume_with_another_recipe_or_other_layers_is_an_error(tiny):
    saved = LowPrecision(Precision(recipe="nvfp4", seed=3)).prepare(tiny(blocks=4)).state_dict()
    with pytest.raises(KaruiError, match=r'state of \{"recipe":"nvfp4","seed":3\} cannot be resumed with \{"recipe":"mxfp8"\}'):
        LowPrecision("mxfp8").prepare(tiny(blocks=4)).load_state_dict(saved)
    with pytest.raises(KaruiError, match="another"):
        LowPrecision(Precision(recipe="nvfp4", seed=3)).prepare(tiny(blocks=5)).load_state_dict(saved, strict=False)
    # another backend is not another recipe
    state = LowPrecisionState(Precision(recipe="fp8-current", backend="emulate"), ["a"])
    LowPrecisionState(Precision(recipe="fp8-current", backend="scaled_mm"), ["a"]).load_state_dict(state.state_dict())


def test_stochastic_rounding_differs_by_step_layer_and_seed(tiny, ids):
    def gradients(seed=0, steps=0):
        model = tiny(blocks=4)
        low = LowPrecision(Precision(recipe="nvfp4", seed=seed))
        low.prepare(model)
        for _ in range(steps):
            low.finish_step()
        model(ids).pow(2).sum().backward()
        return model.layers[1].up.weight.grad

    assert torch.equal(gradients(), gradients())
    assert not torch.equal(gradients(), gradients(seed=1)) and not torch.equal(gradients(), gradients(steps=1))


def test_micro_batches_share_the_step_and_update_it_once(tiny, ids):
    model = tiny()
    low, optimizer = trainer(model, "fp8-delayed")
    step(model, optimizer, ids)
    scale = low.state.scale.clone()
    for at in range(3):
        model(ids[at : at + 1]).pow(2).sum().backward()
        assert torch.equal(low.state.scale, scale)
    optimizer.step()
    assert int(low.state.step) == 2 and low.state.history[0, 0, -2:].all() and not low.state.history[0, 0, :-2].any()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-blockwise", "mxfp8", "nvfp4"])
def test_a_traced_graph_gives_the_same_bits(tiny, ids, recipe):
    """torch.compile around the layers: forward, backward and the recorded maxima."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = tiny()
        low, optimizer = trainer(model, recipe)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        rows = []
        for _ in range(2):
            optimizer.zero_grad()
            out = run(ids)
            out.pow(2).mean().backward()
            rows += [out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
        results.append([*rows, low.state.history.clone(), low.state.scale.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_casting_the_model_leaves_state_and_codes_alone(tiny, ids):
    model = tiny()
    model.layers[1].requires_grad_(False)
    low, optimizer = trainer(model, "fp8-delayed")
    step(model, optimizer, ids)
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.bfloat16()
    assert model.layers[0].up.weight.dtype == torch.bfloat16
    after = dict(model.named_buffers())
    assert before.keys() == after.keys() and any(n.startswith("layers.1.up.fprop") for n in after)
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n].float(), after[n].float()) for n in before)
    assert model(ids).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "nvfp4"])
def test_a_compiled_model_gives_the_same_bits(recipe):
    """torch.compile with inductor, which needs a C++ compiler here."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        low = LowPrecision(recipe)
        model = low.prepare(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)))
        out = (torch.compile(model) if compiled else model)(torch.randn(33, 64))
        out.pow(2).sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters()), low.state.staged])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def _rank(rank, world, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Tiny()
    low, optimizer = trainer(model, Precision(recipe="fp8-delayed", history=4))
    parallel = nn.parallel.DistributedDataParallel(model)  # broadcasts buffers
    generator = torch.Generator().manual_seed(rank)
    for at in range(3):
        ids = torch.randint(50, (2, 8), generator=generator)
        optimizer.zero_grad()
        with parallel.no_sync():
            out = parallel(ids)
            if at == 2 and rank == 1:
                out = out * float("nan")  # in a micro-batch before the last, on one rank
            out.pow(2).mean().backward()
        parallel(ids).pow(2).mean().backward()
        optimizer.step()
    torch.save(
        {"scale": low.state.scale, "skipped": low.state.skipped, "weight": model.layers[0].up.weight.detach()},
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


def _sharded_rank(rank, world, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def make():
        torch.manual_seed(0)
        model = Tiny(blocks=4)
        low = LowPrecision(Precision(recipe="fp8-delayed", history=4))
        low.prepare(model)
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        low.attach(optimizer)
        return model, low, optimizer

    def batch(at):
        return torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(10 * at + rank))

    model, low, optimizer = make()
    whole = [step(model, optimizer, batch(at))[0] for at in range(4)]
    model, _, optimizer = make()
    parts = [step(model, optimizer, batch(at))[0] for at in range(2)]
    saved = {k: v.clone() for k, v in get_model_state_dict(model).items()}
    resumed, low, again = make()
    set_model_state_dict(resumed, saved)
    again.load_state_dict(optimizer.state_dict())
    parts += [step(resumed, again, batch(at))[0] for at in (2, 3)]
    sharded = type(resumed.layers[0].up.weight).__name__ == "DTensor"
    losses = {"whole": torch.tensor(whole), "parts": torch.tensor(parts), "scale": low.state.scale}
    torch.save({**losses, "sharded": torch.tensor(sharded)}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_amax_state_resumes_exactly_under_fsdp2(tmp_path):
    called(_sharded_rank, 2, free_port(), str(tmp_path))
    a, b = (torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1))
    for rank in (a, b):
        assert torch.equal(rank["whole"], rank["parts"]) and rank["whole"][0] > 0.1 and rank["sharded"]
    assert torch.equal(a["scale"], b["scale"]) and a["scale"].all()


@pytest.mark.slow
def test_ranks_scale_alike_and_skip_together(tmp_path):
    called(_rank, 2, free_port(), str(tmp_path))
    a, b = (torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1))
    assert torch.equal(a["scale"], b["scale"]) and a["scale"].all()
    assert torch.equal(a["weight"], b["weight"]) and torch.isfinite(a["weight"]).all()
    assert int(a["skipped"]) == int(b["skipped"]) == 1
