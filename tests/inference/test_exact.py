"""Behavioural: bits do not depend on batching, chunking or a warm cache, asserted by equality, for both runners."""

from __future__ import annotations

import pytest
import torch

from karui.inference.batch import StepBatch
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of

KINDS = ["llama", "qwen2", "qwen3", "mistral"]


def runner_of(which: str, kind: str, seed: int):
    _, config, weights = tiny(kind, seed, **(dict(sliding_window=11) if kind == "mistral" else {}))
    if which == "torch":
        return TorchRunner(config, weights, bit_exact=True)
    native = pytest.importorskip("karui.inference.models.native")
    return native.NativeRunner(config, weights)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("which", ["torch", "native"])
@pytest.mark.parametrize("seed", range(4))
def test_logits_of_a_row_are_the_same_however_it_is_run(which, kv_dtype, seed):
    runner = runner_of(which, KINDS[seed], seed)
    runner.allocate(60, 4, kv_dtype)
    g = torch.Generator().manual_seed(seed)
    ids, other = (torch.randint(0, 199, (n,), generator=g).tolist() for n in (33, 21))
    whole = runner.forward(batch_of((ids, 0, list(range(9))))).logits
    cuts = [0, *sorted(torch.randint(1, 33, (3,), generator=g).unique().tolist()), 33]
    chunked = [runner.forward(batch_of((ids[a:b], a, list(range(20, 29))))).logits for a, b in zip(cuts, cuts[1:])]
    beside = runner.forward(batch_of((other, 0, list(range(40, 46))), (ids, 0, list(range(10, 19))))).logits[len(other):]
    single = [runner.forward(batch_of((ids[i:i + 1], i, list(range(30, 39))))).logits for i in range(33)]
    assert torch.equal(torch.cat(chunked), whole)
    assert torch.equal(beside, whole)
    assert torch.equal(torch.cat(single), whole)


@pytest.mark.parametrize("which", ["torch", "native"])
def test_a_tree_row_has_the_bits_of_its_path(which):
    runner = runner_of(which, "llama", 3)
    runner.allocate(40, 4, "float32")
    ids = torch.randint(0, 199, (7,)).tolist()
    runner.forward(batch_of((ids[:6], 0, [0, 1, 2, 3])))
    mask = torch.eye(5, dtype=torch.bool)
    for row, parent in {1: 0, 2: 0, 3: 1, 4: 2}.items():
        mask[row] |= mask[parent]
    step: StepBatch = batch_of(([ids[6], 50, 60, 70, 80], 6, [0, 1, 2, 3]))
    step.positions, step.tree_masks = (6 + mask.sum(1) - 1).int(), [mask]
    tree = runner.forward(step)
    for path, row in (([50, 70], 3), ([60, 80], 4)):
        assert torch.equal(tree.logits[row], runner.forward(batch_of((ids + path, 0, [10, 11, 12, 13]))).logits[-1])


def said(engine: Engine, requests: list[Request]) -> list:
    return [[(c.token_ids, c.logprobs) for c in o.completions] for o in engine.generate(requests)]


@pytest.mark.parametrize("which", ["torch", "native"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_logprobs_through_the_engine(which, seed):
    """Alone, batched, in small chunks, over a warm cache and with preemption: equal to the last bit of every logprob."""
    g = torch.Generator().manual_seed(seed)
    texts = [torch.randint(3, 199, (n,), generator=g).tolist() for n in torch.randint(2, 40, (5,), generator=g).tolist()]
    requests = [Request(prompt=t, params=SamplingParams(max_tokens=14, logprobs=2, temperature=i % 2 * 0.8, seed=i))
                for i, t in enumerate(texts)]
    runner = runner_of(which, KINDS[seed], seed)

    def make(**options):
        return Engine(runner, kv_dtype="float32", block_size=4, **{"memory": "8MB", **options})

    engine = make(max_tokens_per_step=512)
    alone = [said(engine, [r])[0] for r in requests]
    warm = [said(engine, [r])[0] for r in requests]
    assert engine.stats.num_cached_prompt_tokens > 0 and warm == alone
    engine = make()
    assert said(engine, requests) == alone
    engine = make(max_tokens_per_step=7, max_sequences=3)
    assert said(engine, requests) == alone
    engine = make(memory=runner.kv_bytes_per_token("float32") * 4 * 22)
    assert said(engine, requests) == alone and engine.stats.num_preemptions > 0
