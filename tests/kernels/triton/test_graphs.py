"""Behavioural: decoding with CUDA graphs on a pretended GPU (`pretend`): what is recorded may not wait for the GPU nor copy from the host,
and a replay on other inputs gives what the plain runner gives."""

import dataclasses
import logging
import weakref

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.inference.batch import StepBatch
from karui.inference.engine import Engine
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.requests import Request, SamplingParams
from karui.kernels.quantize import quantize
from tests.inference.test_decoder import batch_of
from tests.kernels.triton import pretend
from tests.kernels.triton.test_dispatch import gpu  # noqa: F401 (a fixture)
from tests.kernels.triton.test_runner import CONFIG, on_grid, weights, with_experts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_runner decodes with graphs on the GPU that is here")


@pytest.fixture
def graphs(gpu, monkeypatch):  # noqa: F811
    return pretend.pretend_graphs(monkeypatch)


def decoding(*contexts, width=3):
    """One row each for sequences with so many keys, in blocks of 4 that lie backwards."""
    t = torch.tensor
    tables = torch.arange(len(contexts) * width).flip(0).view(len(contexts), width)
    last = [c - 1 for c in contexts]
    return StepBatch(tokens=t([(7 * c) % 29 for c in contexts]), positions=t(last), query_starts=torch.arange(len(contexts) + 1),
                     slots=t([int(tables[s, j // 4]) * 4 + j % 4 for s, j in enumerate(last)]), context_lens=t(contexts),
                     block_tables=tables, logit_rows=torch.arange(len(contexts)), want_hidden=True)  # fmt: skip


def same(fast, plain, batch):
    got, want = fast.forward(batch), plain.forward(batch)
    assert got.logits.is_cuda
    for a, b in ((got.logits, want.logits), (got.hidden, want.hidden)):
        assert (a - b).abs().max() <= 3e-2 * b.abs().max()  # fp16, and codes of the cache that fall on the other side
    return got


def runners(config, made, kv_dtype="float16", **options):
    from karui.inference.models.gpu import TritonRunner

    both = TritonRunner(config, made, "cuda", torch.float16, **options), TorchRunner(config, made, "cuda", torch.float16)
    for runner in both:
        runner.allocate(12, 4, kv_dtype)
    return both


FLAT = dataclasses.replace(CONFIG, num_layers=1)
UNTIED = dataclasses.replace(CONFIG, tied=False, qk_norm=False, rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_context=4)
CASES = {
    "dense": lambda: (CONFIG, weights(CONFIG), "float16"),
    "experts": lambda: (with_experts("qwen2_moe"), weights(with_experts("qwen2_moe")), "int8"),
    "angles that grow": lambda: (UNTIED, weights(UNTIED), "float16"),
    "nvfp4, embedding too": lambda: (UNTIED, {n: quantize(w, QuantSpec.parse("nvfp4")) if w.ndim == 2 else w
                                              for n, w in weights(UNTIED).items()}, "fp8"),
    "no kernel for the grid": lambda: (CONFIG, on_grid("w4g16"), "float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps(case, graphs):
    config, made, kv_dtype = CASES[case]()
    fast, plain = runners(config, made, kv_dtype)
    for batch in (decoding(1, 1, 1), decoding(2, 2, 2), decoding(5)):
        same(fast, plain, batch)
    assert len(graphs) == 2  # of four sequences, the fourth padded, and of one
    assert len({id(g.pool()) for g in graphs}) == 1


def test_recorded_steps_over_codes_of_whole_blocks(graphs):
    """A block that is filled within replays, rows of padding, pages that change from step to step."""
    from karui.inference.models.gpu import TritonRunner

    config = dataclasses.replace(FLAT, num_heads=2, num_kv_heads=1)
    fast, plain = (kind(config, weights(config), "cuda", torch.float16) for kind in (TritonRunner, TorchRunner))
    tables = [2, 0], [1, 3], [4, 5]
    for runner in (fast, plain):
        runner.allocate(6, 32, "kivi4", 6)
    for first in ((0, 31, 31), (31, 1, 1), (32, 1, 1)):
        at, rows = first[0], first[1]
        same(fast, plain, dataclasses.replace(batch_of(*[([at % 29] * rows, at, table) for table in tables], block_size=32), want_hidden=True))
    assert len(graphs) == 1 and fast._kv.keys[:, [1, 2, 4]].any((2, 3, 4)).all()


def test_new_weights_and_new_blocks_are_recorded_anew(graphs):
    fast, plain = runners(CONFIG, weights(CONFIG))
    same(fast, plain, decoding(1))
    for runner in (fast, plain):
        runner.load_weights(weights(CONFIG, seed=3), partial=True)
    same(fast, plain, decoding(2))
    for runner in (fast, plain):
        runner.allocate(12, 4, "float16")
    same(fast, plain, decoding(1))
    assert len(graphs) == 3


def test_hidden_states_stay(graphs):
    """The next replay overwrites logits, not what a draft's heads keep."""
    from karui.inference.models.gpu import TritonRunner

    runner = TritonRunner(CONFIG, weights(CONFIG), "cuda", torch.float32)
    runner.allocate(12, 4, "float32")
    first = runner.forward(decoding(1))
    kept, logits = first.hidden.clone(), first.logits.clone()
    runner.forward(decoding(2))
    assert torch.equal(first.hidden, kept) and not torch.equal(first.logits, logits)


def test_a_longer_context_gets_a_graph_of_its_own(graphs):
    fast, plain = runners(CONFIG, weights(CONFIG))
    for width in (3, 12, 3):
        same(fast, plain, decoding(1, width=width))
    assert sorted(fast._graphs) == [(1, 16, False)] and len(graphs) == 1
    key = fast._graph_for(1, 17)
    assert key.inputs.tables.shape == (1, 64) and fast._graph_for(1, 2) is fast._graphs[1, 16, False] and len(graphs) == 2


def test_without_memory_for_a_graph_steps_go_on(graphs, monkeypatch, caplog):
    fast, plain = runners(CONFIG, weights(CONFIG))

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", full)
    with caplog.at_level(logging.WARNING):
        for batch in (decoding(1, 1), decoding(2, 2)):
            same(fast, plain, batch)
    assert [r.getMessage()[:55] for r in caplog.records] == ["no memory is left to record a CUDA graph of 2 sequences"]


def test_old_blocks_are_freed_before_new_ones_are_taken(graphs, monkeypatch):
    fast, _ = runners(CONFIG, weights(CONFIG))
    fast.forward(decoding(1))
    old, alive, real = weakref.ref(fast._caches[0]), [], TorchRunner.allocate
    monkeypatch.setattr(TorchRunner, "allocate", lambda self, *a: alive.append(old() is not None) or real(self, *a))
    fast.allocate(12, 4, "float16")
    assert alive == [False]


def test_kernels_are_launched_on_the_runners_device(graphs):
    from karui.inference.models.gpu import TritonRunner

    del pretend.current_devices[:]
    second = torch.device("cuda:1")
    runner = TritonRunner(CONFIG, on_grid("w8"), second, torch.float16)
    runner.allocate(12, 4, "float16")
    for act in (lambda: runner.forward(decoding(1)), lambda: runner.embed(torch.tensor([1])),
                lambda: runner.dense_weight("model.layers.0.mlp.up_proj")):  # fmt: skip
        del pretend.current_devices[:]
        act()
        assert pretend.current_devices and set(pretend.current_devices) == {second}


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=4, temperature=0.0),
                                    SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=1, logprobs=0)],
                         ids=["greedy", "drawn"])  # fmt: skip
def test_a_step_waits_for_the_gpu_once(params, graphs):
    from karui.inference.models.gpu import TritonRunner

    runner = TritonRunner(CONFIG, weights(CONFIG), "cuda", torch.float16)
    engine = Engine(runner, memory="1MB", block_size=4, max_context=32, max_tokens_per_step=8)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add(Request(prompt=prompt, params=params))
    engine.step()
    del pretend.waits[:]
    deltas = [engine.step() for _ in range(3)]
    assert pretend.waits == ["tolist"] * 3 and len(graphs) == 1
    assert [len(d.token_ids) for step in deltas for d in step] == [1] * 6


def test_logits_that_are_not_numbers(graphs):
    """Found in the sampled rows' logprobs, without another look."""
    from karui.inference.models.gpu import TritonRunner

    engine = Engine(TritonRunner(CONFIG, weights(CONFIG), "cuda", torch.float16), memory="1MB", block_size=4, max_context=32)
    engine.runner._weights["model.norm.weight"].fill_(float("nan"))
    for temperature in (0.0, 1.0):
        outputs = engine.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=temperature, seed=1))
        assert all("not numbers" in c.error for o in outputs for c in o.completions)


def test_a_server_records_its_graphs_before_the_first_request(graphs, monkeypatch):
    from karui.inference.server import warm_up as module
    from karui.inference.server.warm_up import warm_up

    monkeypatch.setattr(module, "PROMPTS", (1, 64))
    fast, plain = (Engine(runner, memory=10**6, max_context=20, max_sequences=3, block_size=1)
                   for runner in runners(FLAT, weights(FLAT)))  # fmt: skip
    warm_up(fast)
    assert sorted(fast.runner._graphs) == [(size, width, False) for size in (1, 2, 4) for width in (16, 64)]
    assert fast.pool.num_cached == 0 and fast.stats.num_running == 0
    recorded = len(graphs)
    prompts, params = [[3, 4, 5], [6] * 16], SamplingParams(max_tokens=3)
    assert [o.token_ids for o in fast.generate(prompts, params)] == [o.token_ids for o in plain.generate(prompts, params)]
    assert len(graphs) == recorded
    warm_up(plain)


def test_one_graph_serves_all_mixtures_of_adapters(graphs):
    config = FLAT
    fast, plain = runners(config, weights(config))
    h, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"self_attn.q_proj": (q, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q), "mlp.up_proj": (config.intermediate_size, h)}

    def adapter(seed, rank, dora):
        g = torch.Generator().manual_seed(seed)
        return {f"model.layers.{i}.{name}": LoraWeights(torch.randn(rank, k, generator=g), torch.randn(o, rank, generator=g), 0.3,
                                                        torch.rand(o, generator=g) + 0.5 if dora else None)
                for i in range(config.num_layers) for name, (o, k) in shapes.items()}  # fmt: skip

    for slot, one in ((0, adapter(1, 2, False)), (2, adapter(2, 4, True))):
        for runner in (fast, plain):
            runner.set_adapter(slot, one)
    for slots in ([-1, -1, -1], [0, 2, -1], [2, 2, 0], [-1, -1, 2]):
        same(fast, plain, dataclasses.replace(decoding(3, 3, 3), adapters=torch.tensor(slots, dtype=torch.int32)))
    assert sorted(fast._graphs) == [(4, 16, False), (4, 16, True)] and len(graphs) == 2
    logits = [fast.forward(dataclasses.replace(decoding(3, 3, 3), adapters=torch.tensor([s] * 3, dtype=torch.int32))).logits.clone() for s in (-1, 0, 2)]
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(logits, logits[1:]))
    for runner in (fast, plain):
        runner.set_adapter(0, adapter(5, 1, False))
    same(fast, plain, dataclasses.replace(decoding(3, 3, 3), adapters=torch.tensor([0, 0, 2], dtype=torch.int32)))
    assert len(graphs) == 3
    with pytest.raises(KaruiError, match="adapter slot 1 is empty"):
        fast.forward(dataclasses.replace(decoding(2), adapters=torch.tensor([1], dtype=torch.int32)))
