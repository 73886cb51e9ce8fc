"""Reference and behavioural: KIVI caches of the native runner, their codes against the torch runner's, and their exactness, on any ISA."""

from __future__ import annotations

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.cache.kivi import BITS, KiviStore
from karui.inference.engine import Engine
from karui.inference.handoff import Prefix
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.native import NativeRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from karui.kernels.native import available, isas
from karui.kernels.native.kivi import to_rows, to_units
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of
from tests.inference.test_kivi import requests, said

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")
SETTINGS = [(isa, kv, dim, block) for isa in isas() for kv, dim, block in (("kivi4", 32, 64), ("kivi2", 64, 32), ("kivi2", 96, 96))]


def make(isa, kv, dim, block, threads=2, kind="llama", runner=NativeRunner, **changes):
    _, config, weights = tiny(kind, head_dim=dim, max_position_embeddings=512, **changes)
    made = NativeRunner(config, weights, threads=threads, isa=isa) if runner is NativeRunner else TorchRunner(config, weights)
    made.allocate(2560 // block, block, kv)
    return made


def run(runner, ids, cuts, blocks, block):
    cuts = [0, *cuts, len(ids)]
    return torch.cat([runner.forward(batch_of((ids[a:b], a, blocks), block_size=block)).logits for a, b in zip(cuts, cuts[1:])])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_codes_are_those_of_the_torch_runner(setting):
    """Of the first layer, whose keys and values depend on no cache."""
    isa, kv, dim, block = setting
    ids = torch.randint(0, 199, (2 * block,)).tolist()
    coded, plain = make(*setting), make(isa, "float16", dim, block)
    slots = torch.tensor([b * block + i for b in (3, 1) for i in range(block)])
    for runner in (coded, plain):
        run(runner, ids, [7, 40], [3, 1], block)
    k, v = plain.read_slots(slots)[0][:, 0]
    store = KiviStore(1, 4, block, 2, dim, kv, "cpu")
    store.write(0, slots, k, v)
    found, want = coded.read_slots(slots)[0], store.take(slots)[0]
    assert found.shape == (2, 3, 2 * block, 2, dim * (BITS[kv] + 1) // 8) and torch.equal(found[:, :1], want)
    other = make(*setting)
    other.write_slots(slots, found, None)
    assert torch.equal(other.read_slots(slots)[0], found)
    next_ones = torch.randint(0, 199, (5,)).tolist()
    step = batch_of((next_ones, 2 * block, [3, 1, 0]), block_size=block)
    assert torch.equal(other.forward(step).logits, coded.forward(step).logits)


@pytest.mark.parametrize("bits", [2, 4])
def test_layouts_are_inverse(bits):
    rows = torch.randint(0, 256, (2, 3, 128, 2, 96 * (bits + 1) // 8), dtype=torch.uint8)
    for block in (32, 64, 128):
        units = to_units(rows, 96, bits, block)
        assert units.shape == (4, 3, 2, 64 * 96 * (bits + 1) // 8) and torch.equal(to_rows(units, 96, bits, block), rows)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_logits_are_near_those_of_the_torch_runner(setting):
    ids = torch.randint(0, 199, (230,), generator=torch.Generator().manual_seed(0)).tolist()
    block = setting[3]
    blocks = list(range(256 // block + 1))
    plain = make(setting[0], "float32", *setting[2:])
    native, torch_one = (run(make(*setting, runner=r), ids, [100, 101], blocks, block) for r in (NativeRunner, TorchRunner))
    away = (torch_one - run(plain, ids, [], blocks, block)).abs().mean()
    assert (native - torch_one).abs().mean() < 0.02 * away  # a code on a border may fall on either side


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_chunking_threads_and_layout(setting):
    ids, block = torch.randint(0, 199, (230,)).tolist(), setting[3]
    count = 230 // block + 1
    blocks = torch.randperm(2560 // block)[:count].tolist()
    whole = run(make(*setting), ids, [], list(range(count)), block)
    assert torch.equal(run(make(*setting), ids, [1, 2, 65, 66, 129, 200], blocks, block), whole)
    assert torch.equal(run(make(*setting, threads=1), ids, [64, 190, *range(200, 230)], blocks, block), whole)
    assert torch.equal(run(make(*setting, threads=3), ids, [17, *range(96, 130)], blocks, block), whole)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_batched_equals_alone_and_rejected_drafts_leave_nothing(setting):
    runner, block = make(*setting), setting[3]
    prompts = [torch.randint(0, 199, (n,)).tolist() for n in (200, 31, 1, 64, 97)]
    places = [list(range(8 * i, 8 * i + 8)) for i in range(3)] + [[24, 25], [19, 18, 22, 23]]
    alone = [run(runner, p, [], place, block) for p, place in zip(prompts, places)]
    pasts = (199, 16, 0, 48, 0)
    step = batch_of(*((p[past:], past, place) for p, place, past in zip(prompts, places, pasts)), block_size=block)
    assert torch.equal(runner.forward(step).logits, torch.cat([a[past:] for a, past in zip(alone, pasts)]))
    again = make(*setting)
    run(again, prompts[0][:60], [], places[0], block)
    run(again, [*prompts[0][:60], *torch.randint(0, 199, (40,)).tolist()], [60], places[0], block)  # fills blocks, is rejected
    assert torch.equal(run(again, prompts[0], [60, 70, 131], places[0], block), alone[0])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sliding_windows(setting):
    ids, block = torch.randint(0, 199, (200,)).tolist(), setting[3]
    runner = make(*setting, kind="mistral", sliding_window=70)
    blocks = list(range(200 // block + 1))
    whole = run(runner, ids, [], blocks, block)
    assert torch.equal(run(runner, ids, [1, 100, *range(190, 200)], [b + len(blocks) for b in blocks], block), whole)
    near = run(make(*setting, kind="mistral", sliding_window=70, runner=TorchRunner), ids, [], blocks, block)
    wide = run(make(*setting, kind="mistral", sliding_window=400, runner=TorchRunner), ids, [], blocks, block)
    assert (whole - near).abs().mean() < 0.05 * (wide - near).abs().mean()


def test_copied_rows_continue_like_the_original():
    runner = make(isas()[0], "kivi2", 32, 32)
    ids = torch.randint(0, 199, (80,)).tolist()
    run(runner, ids[:41], [], [0, 1, 2], 32)
    runner.copy_slots(torch.arange(32, 41), torch.arange(160, 169))  # the unfinished block, as a fork's is
    whole = run(runner, ids, [41], [0, 1, 2], 32)
    assert torch.equal(runner.forward(batch_of((ids[41:], 41, [0, 5, 6]), block_size=32)).logits, whole[41:])


def test_pages_are_few_and_come_back():
    runner = make(isas()[0], "kivi2", 32, 32)
    runner.allocate(20, 32, "kivi2", 3)
    ids = torch.randint(0, 199, (300,)).tolist()
    run(runner, ids, list(range(40, 300, 40)), list(range(10)), 32)  # what lies behind a sequence needs none
    with pytest.raises(KaruiError, match="were not settled"):
        run(runner, ids[:90], [], [10, 11, 12], 32)
    runner.settle(range(8, 14))
    run(runner, ids[:90], [], [10, 11, 12], 32)


def test_what_the_kernels_lack_is_refused():
    with pytest.raises(UnsupportedError, match="heads of a multiple of 32 dimensions in the native kernels, not 16"):
        make(isas()[0], "kivi2", 16, 32)
    with pytest.raises(UnsupportedError, match="block_size must be a multiple of that, got 16"):
        make(isas()[0], "kivi2", 32, 16)
    with pytest.raises(UnsupportedError, match="'int4' is not supported by the native kernels"):
        make(isas()[0], "int4", 32, 32)
    runner = make(isas()[0], "kivi2", 32, 32)
    step = batch_of(([1, 2, 3], 0, [0]), block_size=32)
    step.tree_masks = [torch.eye(3, dtype=torch.bool)]
    with pytest.raises(UnsupportedError, match="no trees"):
        runner.forward(step)


def engine_of(kv_dtype, isa=None, **options):
    _, config, weights = tiny("llama", 0, head_dim=32)
    return Engine(NativeRunner(config, weights, isa=isa), kv_dtype=kv_dtype, block_size=32, **{"memory": "8MB", **options})


@pytest.mark.parametrize("kv_dtype", ["kivi4", "kivi2"])
def test_tokens_do_not_depend_on_how_they_are_computed(kv_dtype):
    """Alone, batched, in small chunks, step by step, over a warm cache, with forks, beams and preemption."""
    engine = engine_of(kv_dtype)
    alone = [said(engine, [r])[0] for r in requests()]
    assert [said(engine, [r])[0] for r in requests()] == alone and engine.stats.num_cached_prompt_tokens > 0
    assert said(engine_of(kv_dtype, ahead=1), requests()) == alone
    assert said(engine_of(kv_dtype, max_tokens_per_step=7, max_sequences=4), requests()) == alone
    needed = engine.runner.kv_bytes_per_token(kv_dtype) + engine.runner.kv_staged_bytes_per_token(kv_dtype)
    tight = engine_of(kv_dtype, memory=11 * 32 * needed)
    assert said(tight, requests()) == alone and tight.stats.num_preemptions > 0
    tight.check_integrity()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("ahead", [1, 8])
def test_drafts_change_nothing(isa, ahead):
    _, config, _ = tiny("llama", 0, head_dim=32)
    spec = SpeculationConfig(method="ngram", k=40, n_min=1, adaptive=False)
    prompt = [7, 8, 9, 10, 11] * 6
    asked = [Request(prompt=prompt[i:], params=SamplingParams(max_tokens=80 - i, ignore_eos=True)) for i in (0, 3, 4)]
    options = dict(max_sequences=3, max_tokens_per_step=128)  # so many pages that drafts of 40 tokens just fit
    engine = engine_of("kivi2", isa, ahead=ahead, speculation=Speculation(spec, Speculator(spec, config).new), **options)
    assert said(engine, asked) == said(engine_of("kivi2", isa, ahead=ahead, **options), asked)
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_drafted_tokens


@pytest.mark.parametrize("kv_dtype", ["kivi4", "kivi2"])
def test_runners_read_each_other_s_codes(kv_dtype, tmp_path):
    prompt = torch.randint(3, 199, (75,), generator=torch.Generator().manual_seed(5)).tolist()
    asked = [Request(prompt=prompt, params=SamplingParams(max_tokens=40, logprobs=1, ignore_eos=True))]
    first, second = engine_of(kv_dtype), engine_of(kv_dtype)
    alone = said(first, asked)
    first.export_prefix(prompt).save(tmp_path / "p.safetensors")
    prefix = Prefix.load(tmp_path / "p.safetensors")
    assert second.import_prefix(prefix) == 64 and said(second, asked) == alone
    _, config, weights = tiny("llama", 0, head_dim=32)
    other = Engine(TorchRunner(config, weights), kv_dtype=kv_dtype, block_size=32, memory="8MB")
    assert other.import_prefix(prefix) == 64
    assert torch.equal(other.export_prefix(prompt).data, prefix.data)
