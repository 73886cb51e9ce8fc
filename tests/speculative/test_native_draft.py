"""Reference tests: the native drafting layer is the torch one, and an engine with it writes plain decoding's tokens."""

from __future__ import annotations

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.requests import SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.base import Context, Observation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config, Eagle3Proposer, NativeEagle3Proposer, pack_layer
from karui.inference.speculative.factory import Speculator
from karui.kernels import native
from tests.speculative.conftest import assert_new_weights_reach_the_drafts, tiny_config, tiny_engine

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler for the native kernels")


def head(hidden: int, heads: int, kv_heads: int, dim: int, vocab: int, drafted: int) -> Eagle3:
    torch.manual_seed(0)
    ids = torch.randperm(vocab)[:drafted].sort().values
    model = Eagle3(Eagle3Config(hidden_size=hidden, intermediate_size=40, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
                                vocab_size=vocab, draft_vocab_size=drafted, aux_layers=(0, 2), rope_theta=500.0), ids).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 2 else 0.1) + (p.ndim == 1))
    return model


@pytest.mark.parametrize(("grid", "tolerance"), [("none", 1e-4), ("w8", 0.35)])
@pytest.mark.parametrize("shape", [(32, 4, 2, 8, 61, 45), (48, 3, 1, 16, 100, 100), (20, 2, 2, 6, 33, 17)])
def test_drafts_are_the_torch_layer_s(shape, grid, tolerance):
    model = head(*shape)
    hidden, vocab = shape[0], shape[4]
    table = torch.randn(vocab, hidden)
    packed = native.pack(native.load(), "embedding", table)
    ours = NativeEagle3Proposer(model, pack_layer(model, QuantSpec.parse(grid)), lambda: packed.linear, depth=4, width=3, nodes=5)
    theirs = Eagle3Proposer(model, lambda ids: table[ids], depth=4, width=3, nodes=5, expand=1)
    grown, drafted = [], []
    grow, draft = theirs._grow, ours.layer.draft
    theirs._grow = lambda depth: grown.append(grow(depth)) or grown[-1]
    ours.layer.draft = lambda *a: drafted.append(draft(*a)) or drafted[-1]
    tokens, at = torch.randint(0, vocab, (40,)).tolist(), 0
    for rows in (9, 1, 3, 17, 2):  # a prompt, then what verifications settle
        aux = torch.randn(rows, 2 * hidden)
        for p in (ours, theirs):
            p.observe(Observation(at, tokens[at : at + rows], [tokens[at + rows]], aux=aux))
        at += rows
        a, b = (p.propose(Context(tokens[: at + 1], 8)) for p in (ours, theirs))
        likeliest = sorted(grown[-1][2])[-5:]
        torch.testing.assert_close(torch.tensor(sorted(drafted[-1][2])), torch.tensor(likeliest), rtol=tolerance, atol=tolerance)
        if grid == "none":
            assert paths(a) == paths(b)


def paths(draft):
    return {tuple(draft.tokens[n] for n in draft.tree().path(node)) for node in range(len(draft))}


def test_a_kept_chain_has_no_parents_and_a_tree_names_them():
    model = head(32, 4, 2, 8, 61, 45)
    kinds = set()
    packed = native.pack(native.load(), "embedding", torch.randn(61, 32))
    proposer = NativeEagle3Proposer(model, pack_layer(model, QuantSpec.parse("w8")), lambda: packed.linear, depth=3, width=2, nodes=3)
    for seed in range(12):
        torch.manual_seed(seed)
        proposer.reset()
        proposer.observe(Observation(0, [1, 2, 3], [4], aux=torch.randn(3, 64)))
        draft = proposer.propose(Context([1, 2, 3, 4], 8))
        assert len(draft) == 3 and draft.parents in (None, [-1, 0, -1], [-1, 0, 0])  # the chain first
        kinds.add(draft.parents is None)
    assert kinds == {True, False}


def engine(config: SpeculationConfig):
    """The tiny native engine with a random drafting layer over its own packed embedding."""
    made = tiny_engine(native=True)
    model = Eagle3(Eagle3Config.of(tiny_config()), None).eval()
    torch.manual_seed(7)
    speculator = Speculator(config, tiny_config(), heads=model, embedding=lambda: made.runner.embedding)
    made.speculation = Speculation(config, speculator.new)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_writes_plain_decoding_s_tokens(temperature):
    prompts = [[5, 9, 2, 41, 8], [3] * 20, [7]]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    drafted = engine(SpeculationConfig(method="eagle3", k=3, least=0.0, adaptive=False))
    wanted = [o.token_ids for o in tiny_engine(native=True).generate(prompts, params)]
    assert [o.token_ids for o in drafted.generate(prompts, params)] == wanted
    assert drafted.stats.num_drafted_tokens > 0
    drafted.check_integrity()


def test_new_weights_bring_a_new_embedding():
    assert_new_weights_reach_the_drafts(engine(SpeculationConfig(method="eagle3", k=3, least=0.0, adaptive=False)))


def test_bad_sizes_are_refused():
    with pytest.raises(UnsupportedError, match="even and at most 512"):
        pack_layer(head(20, 2, 2, 5, 33, 17), QuantSpec.parse("none"))
    with pytest.raises(KaruiError, match="at least 1"):
        SpeculationConfig(method="eagle3", nodes=0)


def test_a_draft_that_promises_too_little_gives_way():
    model = head(32, 4, 2, 8, 61, 45)
    packed = native.pack(native.load(), "embedding", torch.randn(61, 32))
    layer = pack_layer(model, QuantSpec.parse("none"))

    def drafted(least):
        torch.manual_seed(0)
        p = NativeEagle3Proposer(model, layer, lambda: packed.linear, depth=3, width=2, nodes=3, least=least)
        p.observe(Observation(0, [1, 2, 3], [4], aux=torch.randn(3, 64)))
        first = p.propose(Context([1, 2, 3, 4], 8))
        assert p.settled == 3  # either way: the next draft builds on these rows
        return first

    assert len(drafted(0.0)) == 3 and len(drafted(3.0)) == 0
