"""Behavioural: bits do not depend on batch, chunking, threads, neighbours, block layout or speculation, on any ISA."""

from __future__ import annotations

import pytest
import torch

from karui.configs.quantspec import QuantSpec
from karui.inference.models.native import NativeRunner
from karui.inference.models.weights import canonical
from karui.kernels.native import available, isas
from karui.kernels.quantize import quantize
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")
SETTINGS = [(isa, spec, bits, kv) for isa in isas() for spec, bits, kv in (
    ("w4g16", 8, "int8"), ("w8", 8, "float16"), ("w1.58a8", 8, "float32"), ("w4g16a", 16, "float16"))]
MIXTURES = {"mixtral": dict(num_local_experts=6, num_experts_per_tok=2),
            "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=33),
            "qwen2_moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=80)}


def make(isa, spec, bits, kv, threads=2, kind="llama", **changes):
    _, config, weights = tiny(kind, max_position_embeddings=512, **changes)
    weights = {name: quantize(w, QuantSpec.parse(spec)) if w.dim() == 2 else w for name, w in canonical(weights).items()}
    runner = NativeRunner(config, weights, threads=threads, activation_bits=bits, isa=isa)
    runner.allocate(80, 16, kv)
    return runner


def run(runner, ids, cuts, blocks):
    cuts = [0, *cuts, len(ids)]
    return torch.cat([runner.forward(batch_of((ids[a:b], a, blocks), block_size=16)).logits for a, b in zip(cuts, cuts[1:])])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_chunking_threads_and_layout(setting):
    ids = torch.randint(0, 199, (230,)).tolist()
    blocks = torch.randperm(79)[:15].tolist()
    whole = run(make(*setting), ids, [], list(range(15)))
    assert torch.equal(run(make(*setting), ids, [1, 2, 65, 66, 129, 200], blocks), whole)
    assert torch.equal(run(make(*setting, threads=1), ids, [64, 190, *range(200, 230)], blocks), whole)
    assert torch.equal(run(make(*setting, threads=3), ids, [17, *range(218, 230)], blocks), whole)


@pytest.mark.parametrize(("setting", "kind"), [(s, k) for s in SETTINGS for k in MIXTURES if k == "gpt_oss" or s[0] == isas()[0]], ids=str)
def test_mixtures_of_experts(setting, kind):
    """Also where rows share experts with more and other rows, and where widths do not let a thread go on to down's codes."""
    ids, same = torch.randint(0, 199, (150,)).tolist(), list(range(10))
    whole = run(make(*setting, kind=kind, **MIXTURES[kind]), ids, [], same)
    runner = make(*setting, threads=3, kind=kind, **MIXTURES[kind])
    assert torch.equal(run(runner, ids, [1, 2, 65, 66, 129, 149], list(range(20, 30))), whole)
    other = torch.randint(0, 199, (40,)).tolist()
    step = batch_of((other, 0, list(range(40, 43))), (ids[:100], 0, list(range(50, 57))), block_size=16)
    assert torch.equal(runner.forward(step).logits[40:], whole[:100])
    assert torch.isfinite(whole).all() and whole.std() > 0


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_batched_equals_alone_and_a_warm_prefix_a_cold_one(setting):
    runner = make(*setting)
    prompts = [torch.randint(0, 199, (n,)).tolist() for n in (100, 31, 1, 64, 7)]
    places = [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    alone = [run(runner, p, [], place) for p, place in zip(prompts, places)]
    step = batch_of(*((p[past:], past, place) for p, place, past in zip(prompts, places, (99, 16, 0, 48, 0))), block_size=16)
    got = runner.forward(step).logits
    assert torch.equal(got, torch.cat([a[past:] for a, past in zip(alone, (99, 16, 0, 48, 0))]))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sliding_windows(setting):
    ids = torch.randint(0, 199, (200,)).tolist()
    runner = make(*setting, kind="mistral", sliding_window=70)
    whole = run(runner, ids, [], list(range(13)))
    assert torch.equal(run(runner, ids, [1, 100, *range(190, 200)], list(range(20, 33))), whole)


def assert_a_tree_path_has_the_bits(make, run, past):
    """A path of a drafted tree behind `past` tokens, and what follows it when it is compacted, has the bits of plain decoding."""
    runner = make()
    ids, blocks = torch.randint(0, 199, (past,)).tolist(), list(range(12))
    parents = [-1, -1, 0, 1, 1, 2, 4]
    draft = torch.randint(0, 199, (7,)).tolist()
    mask = torch.eye(7, dtype=torch.bool)
    for i, p in enumerate(parents):
        if p >= 0:
            mask[i] |= mask[p]
    run(runner, ids, [], blocks)
    step = batch_of((draft, past, blocks), block_size=16)
    step.positions = (past - 1 + mask.sum(1)).to(torch.int32)
    step.tree_masks = [mask]
    tree = runner.forward(step).logits
    path = [1, 4, 6]
    taken = [draft[i] for i in path]
    runner.copy_slots(torch.tensor([past + i for i in path]), torch.tensor([past, past + 1, past + 2]))
    after = runner.forward(batch_of(([9], past + 3, blocks), block_size=16)).logits
    plain = run(make(), ids + taken + [9], [past, past + 1, past + 2, past + 3], blocks)
    assert torch.equal(tree[path], plain[past:past + 3])
    assert torch.equal(after, plain[past + 3:])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("past", (20, 62, 126, 130))
def test_a_tree_path_has_the_bits_of_plain_decoding(setting, past):
    """Also where the tree's own rows straddle a chunk of 64 keys; then the accepted path is compacted and decoding goes on."""
    assert_a_tree_path_has_the_bits(lambda: make(*setting), run, past)


def test_copied_slots_continue_like_the_original():
    runner = make(isas()[0], "w4g16", 8, "int8")
    ids = torch.randint(0, 199, (40,)).tolist()
    whole = run(runner, ids, [], [0, 1, 2])
    source = torch.tensor([b * 16 + i for b in (0, 1, 2) for i in range(16)][:39])
    target = torch.tensor([b * 16 + i for b in (9, 4, 7) for i in range(16)][:39])
    runner.copy_slots(source, target)
    assert torch.equal(runner.forward(batch_of((ids[39:], 39, [9, 4, 7]), block_size=16)).logits, whole[39:])


@pytest.mark.parametrize("rows", (1, 5))
def test_threads_that_run_ahead_of_each_other_change_nothing(rows):
    """Wide enough that phases overlap: a buffer that one thread fills while another reads it would show here."""
    ids = torch.randint(0, 199, (120,)).tolist()
    cuts = list(range(rows, 120, rows))
    wide = {"hidden_size": 192, "intermediate_size": 2048}
    want = run(make(isas()[0], "w4g16", 8, "float16", threads=1, **wide), ids, cuts, list(range(8)))
    for _ in range(4):
        assert torch.equal(run(make(isas()[0], "w4g16", 8, "float16", **wide), ids, cuts, list(range(8))), want)
