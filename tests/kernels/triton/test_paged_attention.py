"""Reference: paged attention and the cache's writer against a float64 attention per sequence with the mask written out.

fp8 is encoded and decoded in integers (`codecs`), so the interpreter's fp8 casts play no role.
"""

import math

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.inference.cache import affine
from karui.kernels.paged_attention import Cache, Plan, enter, paged_attention, row_bytes, tree_words, write_kv

BLOCK, SLOTS = 8, 160


def make_cache(dtype, kv_heads, width, device):
    if dtype == torch.uint8:
        packed = width, math.gcd(width, 32)
        rows = (torch.zeros(SLOTS, kv_heads, row_bytes(*packed), dtype=dtype, device=device) for _ in range(2))
        return Cache(*rows, packed=packed)
    scaled = dtype in (torch.int8, torch.float8_e4m3fn)
    keys, values = (torch.zeros(SLOTS, kv_heads, width, device=device).to(dtype) for _ in range(2))
    scales = (torch.zeros(SLOTS, kv_heads, device=device) for _ in range(2)) if scaled else (None, None)
    return Cache(keys, values, *scales)


def make_plan(rows, contexts, device, rng, tree=None, positions=None):
    blocks = torch.randperm(SLOTS // BLOCK, generator=torch.Generator().manual_seed(1))
    width = max(-(-c // BLOCK) for c in contexts)
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    for s, c in enumerate(contexts):
        n = -(-c // BLOCK)
        tables[s, :n], blocks = blocks[:n], blocks[n:]
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    return Plan(starts.to(device), torch.tensor(contexts, dtype=torch.int32, device=device), tables.to(device), BLOCK, max(rows),
                tree, positions)  # fmt: skip


def filled(cache, device, rng):
    g, d = cache.keys.shape[1], cache.head_dim
    k, v = (torch.randn(SLOTS, g, d, generator=rng, device=device) for _ in range(2))
    write_kv(k, v, torch.arange(SLOTS, device=device, dtype=torch.int32), cache, "torch")
    return cache


def compare(q, cache, plan, window=None, parts=(1, 3), bound=2e-2):
    from karui.kernels.paged_attention import triton

    want = paged_attention(q, cache, plan, 0.3, window, backend="torch").double()
    for n in parts:
        got = triton.paged_attention(q, cache, plan, 0.3, window, parts=n)
        assert got.shape == q.shape and got.dtype == q.dtype
        assert (got.double() - want).abs().max() <= bound * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_decode(dtype, device, rng):
    cache = filled(make_cache(dtype, 2, 24, device), device, rng)
    plan = make_plan([1, 1], [1, 53], device, rng)
    q = torch.randn(2, 6, 24, generator=rng, device=device)
    exact = device.type == "cpu"  # in the interpreter fp32 queries make the comparison sharp
    compare(q if exact else q.bfloat16(), cache, plan, bound=1e-5 if exact else 2e-2)
    compare(q.bfloat16(), cache, plan, bound=2e-2)


@pytest.mark.parametrize("width", [24, 64, 96])
def test_int4(width, device, rng):
    """The bytes of the torch runner's store, and attention over them: split keys, a window, a tree, rows beside a prefill."""
    k, v = (torch.randn(4, 3, width, generator=rng, device=device).transpose(0, 1) * 10**torch.randn(3, 4, 1, device=device) for _ in range(2))
    k[0, 0], k[0, 1, 3] = 0.25, 1e6  # a group without a step, and a value beyond fp16
    slots = torch.tensor([5, -1, 150], dtype=torch.int32, device=device)
    caches = {backend: make_cache(torch.uint8, 4, width, device) for backend in ("triton", "torch")}
    for backend, cache in caches.items():
        write_kv(k, v, slots, cache, backend)
        for x, to in ((k, cache.keys), (v, cache.values)):
            assert torch.equal(to[[5, 150]], affine.encode(x[[0, 2]], 4, cache.packed[1])), backend
            assert not to[[0, 149, 151]].any()
    cache = filled(make_cache(torch.uint8, 2, width, device), device, rng)
    exact = device.type == "cpu"
    q = torch.randn(37, 6, width, generator=rng, device=device)
    q, bound = (q, 1e-5) if exact else (q.bfloat16(), 2e-2)
    compare(q[:3], cache, make_plan([1, 1, 1], [1, 53, 16], device, rng), bound=bound)
    compare(q[:3], cache, make_plan([1, 1, 1], [1, 53, 16], device, rng), window=9, bound=bound)
    words = tree_words([torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])], [3]).to(device)
    compare(q[:3], cache, make_plan([3], [29], device, rng, words), bound=bound)
    compare(q[:36], cache, make_plan([35, 1], [35, 21], device, rng), parts=(1,), bound=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int4_decoded_in_halves(dtype, device, rng):
    """Queries far from 1, codes that mean up to fp16's largest number, tiles of 8 and of 16 rows-times-heads, a tree."""
    cache = filled(make_cache(torch.uint8, 2, 96, device), device, rng)
    size = torch.tensor([1e-4, 1.0, 300.0], device=device)[:, None, None]
    bound = 3e-3 if dtype == torch.float16 else 8e-3  # the interpreter cuts bf16 off
    q = (torch.randn(3, 6, 96, generator=rng, device=device) * size).to(dtype)
    compare(q, cache, make_plan([1, 1, 1], [1, 53, 16], device, rng), bound=bound)
    compare(q[:1].expand(3, 6, 96), cache, make_plan([3], [53], device, rng), window=40, parts=(1, 70), bound=bound)
    words = tree_words([torch.tensor([[1, 0], [1, 1]])], [2]).to(device)
    compare(q[:2], cache, make_plan([2], [29], device, rng, words), bound=bound)
    k = torch.randn(1, 2, 96, generator=rng, device=device) * 1e6
    write_kv(k, k, torch.zeros(1, dtype=torch.int32, device=device), cache, "triton")
    plan = Plan(torch.tensor([0, 1], dtype=torch.int32, device=device), torch.tensor([3], dtype=torch.int32, device=device),
                torch.zeros(1, 1, dtype=torch.int32, device=device), BLOCK, 1)  # fmt: skip
    compare(q[:1] * 1e-4, cache, plan, bound=bound)


@pytest.mark.parametrize("width", [64, 76])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_in_words(dtype, width, device, rng):
    """Four dimensions in a word of 32 bits: split keys, a window, a tree, a width that does not fill its tile."""
    cache = filled(make_cache(dtype, 2, width, device), device, rng)
    exact = device.type == "cpu"
    q = torch.randn(3, 6, width, generator=rng, device=device)
    q = q if exact else q.bfloat16()
    compare(q, cache, make_plan([1, 1, 1], [1, 53, 16], device, rng), bound=1e-5 if exact else 2e-2)
    compare(q, cache, make_plan([1, 1, 1], [1, 53, 16], device, rng), window=9, bound=1e-5 if exact else 2e-2)
    words = tree_words([torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])], [3]).to(device)
    compare(q, cache, make_plan([3], [29], device, rng, words), bound=1e-5 if exact else 2e-2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_is_not_a_number_stays_none(dtype, device, rng):
    """A code cannot say so in every format, the scale does."""
    k, v = (torch.randn(2, 1, 64, generator=rng, device=device) for _ in range(2))
    k[1, 0, 5] = float("nan")
    cache = make_cache(dtype, 1, 64, device)
    write_kv(k, v, torch.tensor([8, 9], dtype=torch.int32, device=device), cache, "triton")
    assert cache.key_scale[8:10, 0].isnan().tolist() == [False, True] and not cache.value_scale.isnan().any()


def test_verification_of_a_tree(device, rng):
    cache = filled(make_cache(torch.float16, 1, 16, device), device, rng)
    mask = torch.eye(5, dtype=torch.bool)
    for child, parent in ((1, 0), (2, 0), (3, 1), (4, 2)):
        mask[child] |= mask[parent]
    words = tree_words([mask, None], [5, 3]).to(device)
    q = torch.randn(8, 4, 16, generator=rng, device=device).half()
    compare(q, cache, make_plan([5, 3], [25, 3], device, rng, words), bound=3e-3)
    positions = torch.tensor([20, 21, 21, 22, 22, 0, 1, 2], dtype=torch.int32, device=device)
    compare(q, cache, make_plan([5, 3], [25, 3], device, rng, words, positions), window=4, bound=3e-3)


def test_a_tree_beside_a_long_prefill(device, rng):
    cache = filled(make_cache(torch.float16, 1, 16, device), device, rng)
    words = tree_words([torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]), None], [3, 34]).to(device)
    q = torch.randn(37, 1, 16, generator=rng, device=device).half()
    compare(q, cache, make_plan([3, 34], [20, 40], device, rng, words), parts=(1,), bound=3e-3)


def test_mixture_of_prefill_and_decode(device, rng):
    cache = filled(make_cache(torch.float16, 2, 8, device), device, rng)
    plan = make_plan([34, 1], [34, 21], device, rng)
    q = torch.randn(35, 8, 8, generator=rng, device=device).half()
    compare(q, cache, plan, parts=(1,), bound=3e-3)
    compare(q, cache, plan, window=6, parts=(2,), bound=3e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_written_bytes(dtype, device, rng):
    k, v = (torch.randn(4, 3, 20, generator=rng, device=device).transpose(0, 1) for _ in range(2))  # strided: [3, 4, 20]
    slots = torch.tensor([5, -1, 150], dtype=torch.int32, device=device)
    made = [make_cache(dtype, 4, 20, device) for _ in range(2)]
    write_kv(k, v, slots, made[0], "triton")
    write_kv(k, v, slots, made[1], "torch")
    for a, b in zip(vars(made[0]).values(), vars(made[1]).values()):
        if a is not None:
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    assert made[0].keys[5].float().abs().sum() > 0


def test_into_how_many_parts_keys_are_split(monkeypatch):
    from karui.kernels.paged_attention import triton

    monkeypatch.setattr(triton, "num_processors", lambda device: 132)
    split = lambda sequences, context, warps: triton.num_parts(sequences, 1, 8, context, None, warps)  # noqa: E731
    assert [split(1, 1 << 20, warps) for warps in (4, 1)] == [32, 128] and [split(64, 1 << 20, warps) for warps in (4, 1)] == [1, 2]
    assert [split(1, 4096, warps) for warps in (4, 1)] == [16, 16] and split(1, 100, 1) == 1


def test_words_and_refusals(device):
    assert tree_words([None], [3]).tolist() == [1, 3, 7]
    assert tree_words([None], [32]).tolist()[-1] == -1
    assert tree_words([None], [33]).tolist() == [0] * 33
    with pytest.raises(KaruiError, match="up to 32 rows"):
        tree_words([torch.eye(33)], [33])
    cache = make_cache(torch.float16, 2, 8, device)
    plan = Plan(*(torch.zeros(2, dtype=torch.int32),) * 2, torch.zeros(1, 1, dtype=torch.int32), BLOCK, 1)
    with pytest.raises(KaruiError, match="no multiple"):
        paged_attention(torch.zeros(1, 3, 8), cache, plan, 1.0)
    with pytest.raises(KaruiError, match="say their head dimension"):
        write_kv(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.zeros(1), Cache(*[torch.zeros(4, 2, 8, dtype=torch.uint8)] * 2))
    with pytest.raises(KaruiError, match="groups of 4: groups are powers of two"):
        row_bytes(12, 4)
    with pytest.raises(KaruiError, match="need scales"):
        write_kv(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.zeros(1), Cache(*[torch.zeros(4, 2, 8, dtype=torch.int8)] * 2))


def test_entering_an_int4_cache(device, rng):
    qkv = torch.randn(3, (6 + 2 * 2) * 64, generator=rng, device=device).half()
    angle = torch.rand(3, 32, generator=rng, device=device) * 6
    slots = torch.tensor([5, -1, 150], dtype=torch.int32, device=device)
    plain, int4 = make_cache(torch.float16, 2, 64, device), make_cache(torch.uint8, 2, 64, device)
    q, same = (enter(qkv, 6, angle.cos(), angle.sin(), slots, cache, None, 0.0, "triton") for cache in (plain, int4))
    assert torch.equal(q, same) and not int4.keys[[0, 149, 151]].any()
    for x, to in ((plain.keys, int4.keys), (plain.values, int4.values)):
        assert torch.equal(to[[5, 150]], affine.encode(x[[5, 150]], 4, 32)) and to[5].any()


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_entering(dtype, norms, device, rng):
    """Norms, rotation and the writing of keys and values in one kernel, as the separate ones do it."""
    qkv = torch.randn(3, (6 + 2 * 2) * 20 + 7, generator=rng, device=device).half()[:, :-7]  # rows apart
    angle = torch.rand(3, 10, generator=rng, device=device) * 6
    weights = tuple(torch.randn(20, generator=rng, device=device).half() for _ in range(2)) if norms else None
    slots = torch.tensor([5, -1, 150], dtype=torch.int32, device=device)
    caches = [make_cache(dtype, 2, 20, device) for _ in range(2)]
    got, want = (enter(qkv, 6, angle.cos(), angle.sin(), slots, cache, weights, 1e-5, backend)
                 for cache, backend in zip(caches, ("triton", "torch")))  # fmt: skip
    assert got.dtype == qkv.dtype and (got - want).abs().max() <= 2e-3 * want.abs().max()
    a, b = caches
    for mine, theirs in ((a.keys, b.keys), (a.values, b.values)):
        near = (mine.float() - theirs.float()).abs().max()
        assert near <= (2e-2 if dtype == torch.float16 else 1.0 if dtype == torch.int8 else 32.0)
    assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and a.keys[5].float().abs().sum() > 0
    assert a.keys.float()[[0, 149, 151]].abs().sum() == 0
    if a.key_scale is not None:
        torch.testing.assert_close(a.key_scale, b.key_scale, rtol=2e-3, atol=0)
