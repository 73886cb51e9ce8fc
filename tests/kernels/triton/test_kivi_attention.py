"""Reference: KIVI caches in Triton against the torch runner's store and attention, byte by byte and within rounding."""

import pytest
import torch

from karui.inference.cache.kivi import BITS, KiviStore
from karui.inference.models.attention import attend
from karui.inference.models.step import Step
from karui.kernels.paged_attention import KiviCache, Plan
from tests.inference.test_decoder import batch_of

BLOCK = 32


@pytest.mark.parametrize(("kv_dtype", "width", "window", "dtype", "heads", "kv"), [
    ("kivi4", 64, None, torch.float32, 2, 1), ("kivi2", 48, None, torch.float32, 4, 2), ("kivi4", 32, 41, torch.bfloat16, 2, 2),
    ("kivi2", 64, 20, torch.float16, 2, 1), ("kivi2", 128, None, torch.bfloat16, 3, 1)])  # fmt: skip
def test_steps_over_a_growing_cache(kv_dtype, width, window, dtype, heads, kv, device, rng):
    """A prompt over three blocks beside a short one, chunks that end and begin within blocks, single rows, a filled block, split keys."""
    from karui.kernels.paged_attention.kivi import enter, kivi_attention

    store = KiviStore(1, 9, BLOCK, kv, width, kv_dtype, device)
    made = {name: torch.zeros_like(x) for name, x in (("keys", store.keys[0]), ("values", store.values[0]),
                                                      ("key_pages", store.pages[0, 0]), ("value_pages", store.pages[1, 0]))}  # fmt: skip
    cache = KiviCache(**made, bits=BITS[kv_dtype], block_size=BLOCK, group=store.group)
    exact = device.type == "cpu" and dtype == torch.float32
    tables = ([2, 0, 5, 7], [8, 1, 3])
    for chunks in (((0, 70), (0, 5)), ((70, 95), (5, 31)), ((95, 96), (31, 32)), ((96, 97), (32, 33))):
        batch = batch_of(*[([0] * (b - a), a, table) for (a, b), table in zip(chunks, tables)], block_size=BLOCK)
        step = Step.of(batch, BLOCK, {}, device)
        rows = len(step.slots)
        qkv = torch.randn(rows, heads + 2 * kv, width, generator=rng, device=device)
        qkv[:, heads:heads + kv] *= 1 + 9 * (torch.arange(width, device=device) % 7 == 3)  # some channels of the keys are large
        qkv = qkv.to(dtype if exact or dtype != torch.float32 else torch.bfloat16)
        q, k, v = qkv.split((heads, kv, kv), 1)
        store.write(0, step.slots, k, v)
        page_rows = store._rows(step.slots).int()
        turn = torch.ones(rows, width // 2, device=device), torch.zeros(rows, width // 2, device=device)
        got_q = enter(qkv.flatten(1), heads, *turn, step.slots.int(), page_rows, cache)
        assert torch.equal(got_q, q)
        assert torch.equal(cache.keys, store.keys[0]) and torch.equal(cache.values, store.values[0])
        assert torch.equal(cache.key_pages, store.pages[0, 0]) and torch.equal(cache.value_pages, store.pages[1, 0])
        plan = Plan(batch.query_starts.to(device), batch.context_lens.to(device), batch.block_tables.to(device), BLOCK,
                    int(batch.query_starts.diff().max()))  # fmt: skip
        want = attend(store, 0, q.contiguous(), step, window)
        for parts in (1, 2) if rows == 2 else (1,):
            got = kivi_attention(q.contiguous(), cache, plan, page_rows, width**-0.5, window, parts)
            assert (got - want).abs().max() <= (2e-5 if exact else 2e-2) * want.abs().max(), (chunks, parts)
    assert cache.keys[[2, 0, 5, 8]].any((1, 2, 3)).all() and not cache.keys[7].any()
