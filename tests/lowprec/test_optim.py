"""Reference and behavioural tests of the small-state optimizers: torch's AdamW, bitsandbytes' map, resume, memory, a real run."""

import copy
import math

import pytest
import torch
from torch import nn

from karui.configs import KaruiError
from karui.kernels.quantize.noise import noise_bits
from karui.lowprec.optim import AdamWLowState, build_optimizer, lora_plus_groups
from karui.lowprec.optim.adamw import round_bf16
from karui.lowprec.optim.blocks import decode, encode, unsigned_dynamic_map
from tests.lowprec.conftest import Tiny


def train(make, steps=60, dtype=torch.float32, seed=0):
    """Losses of a small language model that learns to predict the next of 3 x 21 fixed tokens."""
    torch.manual_seed(seed)
    model = Tiny().to(dtype)
    optimizer = make(model)
    ids = torch.randint(50, (3, 22), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


def test_fp32_states_are_torchs_adamw():
    ours, a, _ = train(lambda m: AdamWLowState(m.parameters(), 3e-3, state="fp32"))
    torchs, b, _ = train(lambda m: torch.optim.AdamW(m.parameters(), 3e-3))
    assert ours == pytest.approx(torchs, rel=1e-4)
    assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize("state", ["dynamic", "fp8"])
def test_small_states_follow_fp32_within_a_band(state):
    """Every loss within 2 % of the first loss of fp32 AdamW's, and as low at the end; a quarter of the bytes."""
    torchs, _, reference = train(lambda m: torch.optim.AdamW(m.parameters(), 3e-3))
    ours, _, optimizer = train(lambda m: AdamWLowState(m.parameters(), 3e-3, state=state))
    assert torchs[-1] < 0.5 * torchs[0]
    assert max(abs(a - b) for a, b in zip(ours, torchs)) < 0.02 * torchs[0]
    fp32 = sum(v.numel() * v.element_size() for s in reference.state.values() for v in s.values())
    big = [p for p in optimizer.state if p.numel() >= 4096]
    small_share = sum(p.numel() * 8 for p in optimizer.state if p.numel() < 4096)
    assert optimizer.state_bytes() < 0.27 * fp32 + small_share and len(big) == 6
    for p in big:
        assert optimizer.state[p]["exp_avg"].element_size() == 1 and optimizer.state[p]["exp_root"].element_size() == 1


def test_unsigned_map_is_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    expected = functional.create_dynamic_map(signed=False)
    assert torch.allclose(unsigned_dynamic_map(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind,bound", [("dynamic", 0.04), ("fp8", 0.04)])
def test_blocks_round_trip(kind, bound):
    x = torch.randn(5, 333) * torch.exp2(torch.randint(-3, 3, (5, 1)))
    codes, scale = encode(x, kind)
    assert codes.shape == x.shape and codes.element_size() == 1 and scale.shape == (math.ceil(x.numel() / 256),)
    assert (decode(codes, scale) - x).norm() < bound * x.norm()
    assert not decode(*encode(torch.zeros(300), kind)).any()


@pytest.mark.parametrize("kind", ["dynamic", "fp8"])
def test_a_second_moment_never_vanishes(kind):
    """A value far below its block's largest stays positive, so m / (sqrt(v) + eps) stays bounded."""
    x = torch.ones(256)
    x[7] = 1e-12
    x[8] = 0
    value = decode(*encode(x, kind, up=True), up=True)
    assert value[7] > 0 and value[8] == 0
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamWLowState([p], lr=1e-3, weight_decay=0.0, state=kind)
    g = torch.full((64, 64), 1.0)
    g[0, 0] = 1e-5
    for _ in range(20):
        p.grad = g
        optimizer.step()
    assert p.abs().max() < 20 * 1e-3 * 1.5


def test_stochastic_rounding_to_bf16_is_unbiased_and_keeps_bf16():
    x = torch.full((100_000,), 1.001)
    rounded = round_bf16(x, noise_bits(x.shape, seed=1, step=0, layer=0, tensor=0)).double()
    assert abs(rounded.mean().item() - 1.001) < 4.5 * rounded.std().item() / 100_000**0.5 and rounded.unique().numel() == 2
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_bf16(exact.float(), torch.full((1000,), 2**31 - 1, dtype=torch.int32)), exact)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert torch.equal(round_bf16(odd, torch.zeros(3, dtype=torch.int32)).isnan(), odd.isnan())


def test_bf16_weights_learn_from_updates_that_nearest_rounding_loses():
    """An update of 1/40 unit: lost 1,000 times by rounding to nearest, counted on average by stochastic rounding."""
    moved = {}
    for stochastic in (False, True):
        p = nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
        optimizer = AdamWLowState([p], lr=1e-4, weight_decay=0.0, stochastic=stochastic)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[stochastic] = 1 - p.float().mean().item()
    assert moved[False] == 0 and moved[True] == pytest.approx(0.01, rel=0.05)


def test_a_large_weight_is_rounded_in_parts_to_the_same_bits(monkeypatch):
    def stepped(at_once):
        monkeypatch.setattr("karui.lowprec.optim.adamw._AT_ONCE", at_once)
        p = nn.Parameter(torch.linspace(-1, 1, 9000).bfloat16().view(90, 100).t())  # not contiguous
        p.grad = torch.linspace(-2, 3, 9000).bfloat16().view(100, 90)
        AdamWLowState([p], lr=1e-3).step()
        return p.detach()

    whole = stepped(9000)
    assert torch.equal(stepped(1024), whole) and whole.unique().numel() > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["fp32", "dynamic", "fp8"])
def test_resume_is_exact(state, dtype):
    def make(m):
        return AdamWLowState(m.parameters(), 3e-3, state=state)

    whole, expected, _ = train(make, 8, dtype)
    _, model, optimizer = train(make, 4, dtype)
    saved = optimizer.state_dict()
    optimizer = make(model)
    optimizer.load_state_dict(saved)
    ids = torch.randint(50, (3, 22), generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))


def test_states_of_another_kind_are_refused():
    _, model, optimizer = train(lambda m: AdamWLowState(m.parameters(), state="fp8"), 1)
    with pytest.raises(KaruiError, match="saved as fp8 cannot be loaded into an optimizer with dynamic states"):
        AdamWLowState(model.parameters(), state="dynamic").load_state_dict(optimizer.state_dict())


def test_offload_changes_nothing():
    plain, _, _ = train(lambda m: build_optimizer("adamw8bit", m, lr=3e-3), 10)
    moved, _, _ = train(lambda m: build_optimizer("paged-adamw8bit", m, lr=3e-3), 10)
    assert plain == moved


@pytest.mark.parametrize(
    "name,lr", [("adamw", 3e-3), ("adamw8bit", 3e-3), ("adamw-fp8", 3e-3), ("adafactor", 3e-2), ("muon", 3e-3)]
)
def test_every_optimizer_by_name_learns(name, lr):
    losses, _, _ = train(lambda m: build_optimizer(name, m, lr=lr))
    assert losses[-1] < 0.6 * losses[0]


def test_muon_takes_the_matrices_of_the_blocks_and_resumes():
    _, model, optimizer = train(lambda m: build_optimizer("muon", m, lr=3e-3), 3)
    muon = {id(p) for p in optimizer.parts[0].param_groups[0]["params"]}
    assert muon == {id(p) for n, p in model.named_parameters() if n.startswith("layers") and p.dim() == 2}
    saved = copy.deepcopy(optimizer.state_dict())  # torch loads states without copying them
    other = build_optimizer("muon", model, lr=3e-3)
    other.load_state_dict(saved)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p) * 0.01
    optimizer.step()
    after = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, b in zip(model.parameters(), before):
            p.copy_(b)
    other.step()
    assert all(torch.equal(p, a) for p, a in zip(model.parameters(), after))
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # a scheduler's change reaches the parts
    frozen = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, f) for p, f in zip(model.parameters(), frozen))


def test_lora_plus_groups():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), LoraConfig(r=2, target_modules=["0"]))
    slow, fast = lora_plus_groups(model, 1e-4, 16)
    assert [tuple(p.shape) for p in fast["params"]] == [(8, 2)] and fast["lr"] == 16e-4
    assert [tuple(p.shape) for p in slow["params"]] == [(2, 8)] and slow["lr"] == 1e-4
    groups = build_optimizer("adamw8bit", model, lr=1e-4, lora_plus=16).param_groups
    assert [g["lr"] for g in groups] == [1e-4, 16e-4]
    with pytest.raises(KaruiError, match="no trained LoRA B"):
        lora_plus_groups(nn.Linear(2, 2), 1e-4, 16)


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("adamw8", {}, "'adamw8' is not known; use one of adamw, .*Did you mean"),
        ("adamw", {"groups": [{"params": []}]}, "no parameter takes gradients"),
        ("bnb-paged-adamw8bit", {}, "CUDA devices only; use paged-adamw8bit"),
        ("muon", {"groups": [{"params": [nn.Parameter(torch.ones(2, 2))], "lr_scale": 2.0}]}, "do not go with muon"),
    ],
)
def test_bad_requests(name, options, message):
    with pytest.raises(KaruiError, match=message):
        build_optimizer(name, Tiny(), lr=1e-3, **options)


def test_bad_states_and_frozen_models():
    with pytest.raises(KaruiError, match="state 'int4' is not known"):
        AdamWLowState(Tiny().parameters(), state="int4")
    with pytest.raises(KaruiError, match="betas"):
        AdamWLowState(Tiny().parameters(), betas=(1.0, 0.9))
    with pytest.raises(KaruiError, match="nothing to optimise"):
        build_optimizer("adamw", Tiny().requires_grad_(False), lr=1e-3)
