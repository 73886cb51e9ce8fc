"""Reference tests: native Medusa heads are the torch ones, and an engine with them writes plain decoding's tokens."""

from __future__ import annotations

import math

import pytest
import torch

from karui.configs.quantspec import QuantSpec
from karui.inference.requests import SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.base import Context, Observation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from karui.inference.speculative.medusa import MedusaHeads, MedusaProposer, NativeMedusaProposer, pack_heads
from karui.kernels import native
from tests.speculative.conftest import CHOICES, assert_new_weights_reach_the_drafts, tiny_config, tiny_engine, tiny_weights

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler for the native kernels")

KINDS = {"own": {}, "shared": {"shared": True}, "few tokens": {"shared": True, "ids": torch.arange(1, 60, 3)}}


def made(kind: str, hidden: int, vocab: int, layers: int, table: torch.Tensor) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(3, hidden, vocab, layers, **KINDS[kind]).eval()
    with torch.no_grad():
        for p in heads.parameters():
            p.normal_(std=0.3)
    return heads.bind(table) if heads.shared else heads


def paths(draft):
    return {tuple(draft.tokens[n] for n in draft.tree().path(node)) for node in range(len(draft))}


@pytest.mark.parametrize(("grid", "tolerance"), [("none", 1e-4), ("w8", 0.2)])
@pytest.mark.parametrize(("hidden", "vocab", "layers"), [(32, 61, 1), (48, 100, 2), (20, 61, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_torch_heads(kind, hidden, vocab, layers, grid, tolerance):
    table = torch.randn(vocab, hidden)
    heads = made(kind, hidden, vocab, layers, table)
    packed = native.pack(native.load(), "head", table)
    ours = NativeMedusaProposer(heads, pack_heads(heads, QuantSpec.parse(grid)), lambda: packed.linear, nodes=9, width=4)
    theirs = MedusaProposer(heads, nodes=9, width=4)
    drafted = []
    draft = ours.layer.draft
    ours.layer.draft = lambda *a: drafted.append(draft(*a)) or drafted[-1]
    for seed in range(4):
        torch.manual_seed(seed)
        state = torch.randn(hidden)
        for limit, depth in ((20, 9), (4, 9), (20, 1), (20, 2)):
            for p in (ours, theirs):
                p.observe(Observation(0, [1], [2], hidden=state))
            context = Context([1, 2], limit, depth=depth)
            a, b = ours.propose(context), theirs.propose(context)
            assert len(a) == len(b) and max(a.tree().depths) <= min(depth, 3)
            log_p = heads(state)[:depth].detach().log_softmax(-1)
            index = {int(t): i for i, t in enumerate(range(vocab) if heads.ids is None else heads.ids)}
            for path, score in zip((a.tree().path(n) for n in range(len(a))), drafted[-1][2], strict=True):
                told = sum(float(log_p[d, index[a.tokens[n]]]) for d, n in enumerate(path))
                assert score == pytest.approx(told, abs=tolerance * 5)
            if grid == "none":
                assert paths(a) == paths(b)


def test_the_chain_comes_first_and_little_promise_gives_way():
    table = torch.randn(61, 32)
    heads = made("shared", 32, 61, 1, table)
    packed = native.pack(native.load(), "head", table)
    layer, kinds = pack_heads(heads), set()
    for seed in range(12):
        torch.manual_seed(seed)
        state = torch.randn(32) * 3
        p = NativeMedusaProposer(heads, layer, lambda: packed.linear, nodes=4, width=3)
        p.observe(Observation(0, [1], [2], hidden=state))
        draft = p.propose(Context([1, 2], 8))
        tree = draft.tree()
        chain = [n for n in range(len(draft)) if all(tree.children[tree.parents[m] + 1][0] == m for m in tree.path(n))]
        assert chain == list(range(len(chain))) and len(draft) == 4
        kinds.add(draft.parents is None)
        promised = sum(map(math.exp, layer.draft(packed.linear, state, 3, 3, 4)[2]))
        assert len(layer.draft(packed.linear, state, 3, 3, 4, promised * 0.99)[0]) == 4
        assert not layer.draft(packed.linear, state, 3, 3, 4, promised * 1.01)[0]
    assert False in kinds


def test_a_whole_shared_projection_is_not_packed_again():
    table = torch.randn(61, 32)
    sizes = {kind: pack_heads(made(kind, 32, 61, 1, table)).nbytes for kind in KINDS}
    assert sizes["shared"] < sizes["few tokens"] < sizes["own"]


def engine(kind: str, config: SpeculationConfig | None = None):
    """The tiny native engine with heads over its own packed head."""
    engine = tiny_engine(native=True)
    c = tiny_config()
    table = tiny_weights(c)["model.embed_tokens.weight"]
    heads = MedusaHeads(3, c.hidden_size, c.vocab_size, **KINDS[kind]).eval()
    for head in [] if heads.shared else heads.heads:  # the target's own head behind each block: right now and then
        head[-1].weight.data.copy_(table)
    speculator = Speculator(config or SpeculationConfig(method="medusa", k=6, adaptive=False), c, heads=heads, head=lambda: table,
                            packed_head=lambda: engine.runner.head)
    assert isinstance(speculator.new(), NativeMedusaProposer)
    engine.speculation = Speculation(speculator.config, speculator.new)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_writes_plain_decoding_s_tokens(kind, temperature):
    prompts = [[5, 9, 2, 41, 8], [3] * 20, [7]]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    drafted = engine(kind)
    wanted = [o.token_ids for o in tiny_engine(native=True).generate(prompts, params)]
    assert [o.token_ids for o in drafted.generate(prompts, params)] == wanted
    assert drafted.stats.num_drafted_tokens > 0 and (kind != "shared" or drafted.stats.num_accepted_tokens > 0)
    drafted.check_integrity()


def test_new_weights_bring_a_new_projection():
    assert_new_weights_reach_the_drafts(engine("shared"))


def test_a_file_s_fixed_tree_is_kept(tmp_path):
    from karui.inference.speculative.factory import save_medusa

    c = tiny_config()
    save_medusa(MedusaHeads(3, c.hidden_size, c.vocab_size), tmp_path, CHOICES)
    made = Speculator(SpeculationConfig.parse("medusa:5"), c, heads=tmp_path, packed_head=lambda: None).new()
    assert type(made) is MedusaProposer and len(made.nodes) == 5
