"""Behavioural: every proposer, driven as by an engine over a simulated target, leaves plain decoding's tokens unchanged."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import CorruptError, KaruiError
from karui.inference.models.config import ModelConfig
from karui.inference.speculative.base import Context, Observation, Proposer, Statistics
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.draft_model import DraftModelProposer, NoRoomError, check_vocabulary
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config, Eagle3Proposer, default_aux_layers
from karui.inference.speculative.factory import Speculator, load_eagle3, load_medusa, save_eagle3, save_medusa
from karui.inference.speculative.lookahead import LookaheadProposer, NgramPool
from karui.inference.speculative.medusa import MedusaHeads, MedusaProposer, likeliest, likeliest_paths
from karui.inference.speculative.ngram import NgramProposer
from karui.inference.speculative.tree import tree_of_choices
from tests.speculative.conftest import CHOICES
from tests.speculative.simulate import Markov, decode, plain

VOCAB, HIDDEN = 12, 16
MODEL = ModelConfig(model_type="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_layers=6, num_heads=4,
                    num_kv_heads=2, head_dim=8, norm_eps=1e-6, rope_theta=1e4, max_context=512, tied=True)


class MarkovDrafter:
    """A `Drafter` over a Markov table that checks it is fed what it believes it holds."""

    def __init__(self, table: Markov) -> None:
        self.table, self.vocab_size, self.max_context = table, table.vocab, 10_000
        self.held: dict[int, list[int]] = {}
        self.fed = 0

    def open(self) -> int:
        self.held[len(self.held)] = []
        return len(self.held) - 1

    def close(self, handle: int) -> None:
        del self.held[handle]

    def extend(self, handle: int, tokens: list[int], start: int) -> torch.Tensor:
        assert start <= len(self.held[handle]) and len(tokens) > 0
        self.held[handle][start:] = tokens
        self.fed += len(tokens)
        return torch.from_numpy(np.log(self.table.row(self.held[handle])))

    def continued(self, handle: int, tokens: list[int], start: int, count: int) -> None:
        return None


def medusa(shared: bool = False, drafted: int | None = None, layers: int = 1) -> MedusaHeads:
    torch.manual_seed(0)
    ids = None if drafted is None else torch.randperm(VOCAB)[:drafted].sort().values
    heads = MedusaHeads(4, HIDDEN, VOCAB, layers, shared=shared, ids=ids).eval()
    with torch.no_grad():
        for head in heads.heads:
            for block in head[:layers]:     # type: ignore[index]
                block.linear.weight.normal_(std=0.3)
    return heads.bind(torch.randn(VOCAB, HIDDEN)) if shared else heads


def eagle(draft_vocab: int = VOCAB) -> Eagle3:
    torch.manual_seed(0)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values
    return Eagle3(Eagle3Config.of(MODEL, draft_vocab), ids).eval()


def embed(ids: torch.Tensor) -> torch.Tensor:
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    return table[ids]


def make(name: str) -> Proposer:
    draft = Markov(VOCAB, seed=0, sharp=1.0)        # the target's table, flatter: related, not equal
    return {
        "ngram": lambda: NgramProposer(5),
        "ngram1": lambda: NgramProposer(3, n_max=2, n_min=1),
        "lookahead": lambda: LookaheadProposer(),
        "lookahead-small": lambda: LookaheadProposer(3, 2, 2),
        "draft": lambda: DraftModelProposer(MarkovDrafter(draft), 4, VOCAB),
        "medusa": lambda: MedusaProposer(medusa()),
        "medusa-fixed": lambda: MedusaProposer(medusa(), CHOICES),
        "medusa-shared": lambda: MedusaProposer(medusa(shared=True, drafted=7, layers=2), nodes=9, width=3),
        "eagle3": lambda: Eagle3Proposer(eagle(), embed),
        "eagle3-chain": lambda: Eagle3Proposer(eagle(), embed, depth=4, width=1),
        "eagle3-small-vocabulary": lambda: Eagle3Proposer(eagle(5), embed, depth=3, width=3, nodes=9),
    }[name]()


NAMES = ["ngram", "ngram1", "lookahead", "lookahead-small", "draft", "medusa", "medusa-fixed", "medusa-shared", "eagle3", "eagle3-chain",
         "eagle3-small-vocabulary"]
PROMPT = [1, 4, 2, 7, 1, 4, 2, 9, 3]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_plain_decoding(name: str, seed: int | None, chunk: int | None) -> None:
    if name == "draft" and seed is not None:
        pytest.skip("sampled drafts keep the distribution, not the tokens: tested in test_draft_model_keeps_the_distribution")
    target = Markov(VOCAB, seed=0)
    statistics = Statistics()
    got = decode(target, make(name), PROMPT, 120, seed, chunk=chunk, statistics=statistics)
    assert got == plain(target, PROMPT, 120, seed)
    assert statistics.drafts > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_small_limit_is_respected_and_reset_starts_afresh(name: str) -> None:
    target = Markov(VOCAB, seed=3)
    proposer = make(name)
    first = decode(target, proposer, PROMPT, 40, limit=2)
    proposer.reset()
    assert decode(target, proposer, PROMPT, 40, limit=2) == first == plain(target, PROMPT, 40)
    assert len(proposer.propose(Context(tokens=PROMPT, limit=0))) == 0


@pytest.mark.parametrize("name", ["ngram", "lookahead", "draft"])
def test_proposers_pay_on_predictable_text(name: str) -> None:
    """Greedy decoding of a Markov table ends in a cycle, which each of these must come to predict."""
    statistics = Statistics()
    decode(Markov(VOCAB, seed=0), make(name), PROMPT, 200, statistics=statistics)
    assert statistics.tokens_per_step > 2.0


def test_draft_model_keeps_the_distribution() -> None:
    target, runs = Markov(6, seed=1, sharp=1.0), 4_000
    joint = np.zeros((6, 6))
    proposer = DraftModelProposer(MarkovDrafter(Markov(6, seed=9, sharp=1.0)), 2, 6)
    for seed in range(runs):
        proposer.reset()
        _, second, third = decode(target, proposer, [0, 1], 3, seed)
        joint[second, third] += 1
    exact = np.zeros((6, 6))
    p1 = target.row([0, 1])
    for a in range(6):
        for b in range(6):
            for c in range(6):
                exact[b, c] += p1[a] * target.row([1, a])[b] * target.row([a, b])[c]
    assert 0.5 * np.abs(joint / runs - exact).sum() < 0.05
    expected = runs * exact
    assert ((joint - expected) ** 2 / expected).sum() / 35 < 1.9


def test_draft_model_feeds_only_what_is_new() -> None:
    target = Markov(VOCAB, seed=0)
    drafter = MarkovDrafter(target)     # a perfect draft: everything is accepted
    statistics = Statistics()
    assert decode(target, DraftModelProposer(drafter, 4, VOCAB), PROMPT, 101, statistics=statistics) == plain(target, PROMPT, 101)
    assert statistics.acceptance == 1.0 and statistics.tokens_per_step == 5.0
    assert drafter.fed <= len(PROMPT) + 101


def test_a_drafter_that_is_full_hands_over_what_it_has_and_reads_nothing_twice() -> None:
    class Small(MarkovDrafter):
        def extend(self, handle: int, tokens: list[int], start: int) -> torch.Tensor:
            if start + len(tokens) > 52:
                raise NoRoomError("full")
            return super().extend(handle, tokens, start)

    target = Markov(VOCAB, seed=0)
    drafter, statistics = Small(target), Statistics()
    assert decode(target, DraftModelProposer(drafter, 4, VOCAB), PROMPT, 101, statistics=statistics) == plain(target, PROMPT, 101)
    assert statistics.acceptance == 1.0 and statistics.accepted >= 52 - len(PROMPT) - 101 // 5
    assert drafter.fed <= 52


def test_draft_vocabulary_is_checked() -> None:
    with pytest.raises(KaruiError, match="13 tokens, the target's 12"):
        DraftModelProposer(MarkovDrafter(Markov(13)), 4, VOCAB)
    check_vocabulary({"a": 0, "b": 1}, {"b": 1, "a": 0})
    with pytest.raises(KaruiError, match="'a'"):
        check_vocabulary({"a": 0, "b": 1}, {"a": 1, "b": 0})


def rescan(tokens: list[int], k: int, n_max: int, n_min: int) -> list[int]:
    """Prompt lookup by scanning the whole sequence each time."""
    for n in range(min(n_max, len(tokens)), n_min - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start:start + n] == tokens[-n:]:
                out = list(tokens)
                for _ in range(k):
                    out.append(out[start + n + len(out) - len(tokens)])
                return out[len(tokens):]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2))
def test_the_ngram_index_equals_a_rescan(tokens: list[int], k: int, n_min: int, more: int) -> None:
    proposer = NgramProposer(k, n_min + more, n_min)
    for length in range(1, len(tokens) + 1):
        draft = proposer.propose(Context(tokens=tokens[:length], limit=64))
        assert draft.tokens == rescan(tokens[:length], k, n_min + more, n_min)


def test_ngram_work_per_token_does_not_grow() -> None:
    class Counting(list):
        reads = 0

        def __getitem__(self, item):  # type: ignore[no-untyped-def]
            Counting.reads += 1
            return super().__getitem__(item)

    proposer, tokens = NgramProposer(4), Counting(range(5_000))
    proposer.propose(Context(tokens=tokens, limit=8))
    Counting.reads = 0
    tokens.append(7)
    proposer.propose(Context(tokens=tokens, limit=8))
    assert Counting.reads < 20


def test_the_ngram_pool_forgets_the_oldest() -> None:
    pool = NgramPool(2)
    for rest in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(0, rest)
    assert pool.get(0) == [(5, 6), (1, 2)] and pool.get(9) == []


def test_eagle_kv_holds_verified_rows_only_and_bridges_gaps() -> None:
    proposer = Eagle3Proposer(eagle(), embed, depth=3, width=2, nodes=5)
    aux = torch.randn(6, 2 * HIDDEN)
    proposer.observe(Observation(start=0, rows=[1, 2, 3], emitted=[4], aux=aux[:3]))
    first = proposer.propose(Context(tokens=[1, 2, 3, 4], limit=9))
    assert len(proposer.kv[0]) == 3 and len(first) == 5
    proposer.observe(Observation(start=3, rows=[4], emitted=[5], aux=aux[3:4]))
    second = proposer.propose(Context(tokens=[1, 2, 3, 4, 5], limit=9))
    assert len(proposer.kv[0]) == 4
    # The same rows in one go give the same draft: drafted rows left nothing behind.
    other = Eagle3Proposer(proposer.model, embed, depth=3, width=2, nodes=5)
    other.observe(Observation(start=0, rows=[1, 2], emitted=[], aux=aux[:2]))
    other.observe(Observation(start=2, rows=[3, 4], emitted=[5], aux=aux[2:4]))
    assert other.propose(Context(tokens=[1, 2, 3, 4, 5], limit=9)) == second
    # Rows that nobody showed (speculation was off, or a cached prefix) leave a gap, not a crash.
    proposer.observe(Observation(start=9, rows=[7], emitted=[8], aux=aux[4:5]))
    assert len(proposer.propose(Context(tokens=[0] * 11, limit=9))) == 5
    # A sequence that was rolled back starts over.
    proposer.observe(Observation(start=0, rows=[1, 2], emitted=[3], aux=aux[:2]))
    proposer.propose(Context(tokens=[1, 2, 3], limit=9))
    assert len(proposer.kv[0]) == 2


def test_eagle_tree_holds_the_likeliest_paths_by_brute_force() -> None:
    """Scores of all width^depth paths, each computed alone as a chain, rank the kept nodes."""
    model, depth = eagle(5), 3
    proposer = Eagle3Proposer(model, embed, depth=depth, width=5, nodes=12)
    aux = torch.randn(2, 2 * HIDDEN)
    proposer.observe(Observation(start=0, rows=[1, 2], emitted=[3], aux=aux))
    draft = proposer.propose(Context(tokens=[1, 2, 3], limit=64))
    tree = draft.tree()

    def score(path: list[int]) -> float:
        with torch.no_grad():
            mask = torch.ones(2, 2, dtype=torch.bool).tril()
            a, kv = model(embed(torch.tensor([2, 3])), model.fuse(aux), torch.arange(2), model.empty_kv(), mask)
            a, total = a[-1:], 0.0
            for i, token in enumerate(path):
                index = int((model.d2t + torch.arange(5) == token).nonzero())
                total += float(model.log_probs(a)[0, index])
                a, kv = model(embed(torch.tensor([token])), a, torch.tensor([2 + i]), kv, torch.ones(1, 3 + i, dtype=torch.bool))
            return total

    vocabulary = (model.d2t + torch.arange(5)).tolist()
    every = [[t] for t in vocabulary] + [[t, u] for t in vocabulary for u in vocabulary]
    best_two_levels = sorted(every, key=score, reverse=True)
    kept = [[draft.tokens[n] for n in tree.path(i)] for i in range(len(draft))]
    # Depths 1 and 2 are expanded exhaustively at width 5 = |D| only from the 5 best of depth 1, which are all of them.
    shallow = sorted([p for p in kept if len(p) <= 2], key=score, reverse=True)
    assert shallow == best_two_levels[:len(shallow)]


def test_heads_survive_the_disk_and_damage_is_told(tmp_path: Path) -> None:
    heads, model = medusa(), eagle(5)
    save_medusa(heads, tmp_path)
    save_eagle3(model, tmp_path)
    again, choices = load_medusa(tmp_path)
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(again(hidden), heads(hidden)) and choices is None
    save_medusa(heads, tmp_path, CHOICES)
    assert load_medusa(tmp_path)[1] == CHOICES
    other = load_eagle3(tmp_path)
    assert other.config == model.config and all(torch.equal(v, other.tensors()[k]) for k, v in model.tensors().items())
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "d2t", "t2d"} <= set(model.tensors())
    assert int(other.t2d.sum()) == 5 and bool(other.t2d[(other.d2t + torch.arange(5))].all())

    file = tmp_path / "medusa.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CorruptError, match="safetensors"):
        load_medusa(tmp_path)
    with pytest.raises(KaruiError, match="does not exist"):
        load_medusa(tmp_path / "absent")
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    save_eagle3(model, tmp_path)
    with pytest.raises(CorruptError, match=r"fc\.weight"):
        load_eagle3(tmp_path)
    with pytest.raises(CorruptError, match="medusa heads"):
        MedusaHeads.from_tensors({"0.1.weight": torch.zeros(VOCAB, HIDDEN)})


def test_an_untrained_medusa_block_is_the_identity() -> None:
    heads = medusa()
    with torch.no_grad():
        for head in heads.heads:
            head[0].linear.weight.zero_()   # type: ignore[index,union-attr]
            head[0].linear.bias.zero_()     # type: ignore[index,union-attr]
    hidden = torch.randn(3, HIDDEN)
    assert torch.allclose(heads(hidden)[1], hidden @ heads.heads[1][1].weight.T, atol=1e-6)     # type: ignore[index,union-attr]


def test_heads_that_share_the_target_s_projection_are_small_and_keep_medusa_s_names(tmp_path: Path) -> None:
    heads = medusa(shared=True, drafted=7, layers=2)
    save_medusa(heads, tmp_path)
    again, _ = load_medusa(tmp_path)
    assert {n for n in again.tensors() if n != "d2t"} == {f"{i}.{j}.linear.{part}" for i in range(4) for j in range(2)
                                                           for part in ("weight", "bias")}
    assert again.shared and again.vocab_size == VOCAB and torch.equal(again.ids, heads.ids)
    whole = torch.randn(VOCAB, HIDDEN)
    hidden = torch.randn(3, HIDDEN)
    state = hidden
    for block in again.heads[2]:    # type: ignore[union-attr]
        state = state + torch.nn.functional.silu(state @ block.linear.weight.T + block.linear.bias)
    torch.testing.assert_close(again.bind(whole)(hidden)[2], (state @ whole.T)[:, heads.ids])
    with pytest.raises(KaruiError, match="goes with a shared projection"):
        MedusaHeads(1, HIDDEN, VOCAB, ids=torch.arange(3))
    damaged = {**heads.tensors(), "d2t": torch.full((7,), VOCAB)}
    with pytest.raises(CorruptError, match="ascending ids below 12"):
        MedusaHeads.from_tensors(damaged, VOCAB)
    with pytest.raises(CorruptError, match="medusa heads"):
        MedusaHeads.from_tensors(heads.tensors())     # nobody says how large the vocabulary is


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-6, 0), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 30))
def test_the_likeliest_paths_by_brute_force(chances: list[list[float]], count: int) -> None:
    chances = [sorted(row, reverse=True) for row in chances]
    nodes, parents, scores = likeliest_paths(chances, count)
    every = [path for depth in range(1, len(chances) + 1) for path in product(range(3), repeat=depth)]
    wanted = sorted((sum(chances[d][r] for d, r in enumerate(path)) for path in every), reverse=True)[:count]
    assert scores == pytest.approx(wanted, abs=1e-9) and len(nodes) == len(parents) == min(count, len(every))
    paths: list[tuple[int, ...]] = []
    for (depth, rank), parent in zip(nodes, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))   # a parent comes first
        assert len(paths[-1]) == depth + 1
    assert len(set(paths)) == len(paths)


def test_a_medusa_draft_is_the_likeliest_tree_and_gives_way_below_least() -> None:
    heads, hidden = medusa(shared=True, drafted=7, layers=2), torch.randn(HIDDEN)
    log_p = heads(hidden).log_softmax(-1)
    for least, count in ((0.0, 9), (4.5, 0)):
        proposer = MedusaProposer(heads, nodes=9, width=3, least=least)
        proposer.observe(Observation(start=0, rows=[1], emitted=[2], hidden=hidden))
        draft = proposer.propose(Context(tokens=[1, 2], limit=20))
        assert len(draft) == count
    proposer = MedusaProposer(heads, nodes=9, width=3)
    proposer.observe(Observation(start=0, rows=[1], emitted=[2], hidden=hidden))
    draft = proposer.propose(Context(tokens=[1, 2], limit=20, depth=2))
    best = log_p.topk(3).indices
    assert max(draft.tree().depths) == 2 and draft.tokens[0] == int(heads.ids[best[0, 0]])


def test_a_small_medusa_tree_goes_deep_before_it_goes_wide() -> None:
    assert likeliest(CHOICES, 4) == ((0,), (0, 0), (1,), (0, 0, 0))
    for count in range(1, len(CHOICES) + 1):
        parents, nodes = tree_of_choices(likeliest(CHOICES, count))     # raises where a parent is missing
        assert len(parents) == len(nodes) == count
    assert set(likeliest(CHOICES, 99)) == set(CHOICES)


def test_factory_makes_each_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    save_medusa(medusa(), tmp_path)
    save_eagle3(eagle(), tmp_path)
    assert isinstance(Speculator(SpeculationConfig.parse("ngram:3"), MODEL).new(), NgramProposer)
    assert isinstance(Speculator(SpeculationConfig.parse("lookahead"), MODEL).new(), LookaheadProposer)
    small = Speculator(SpeculationConfig.parse("medusa:4"), MODEL, heads=tmp_path).new()
    assert isinstance(small, MedusaProposer) and small.limit == 4 and not small.fixed
    save_medusa(medusa(), tmp_path, CHOICES)
    fixed = Speculator(SpeculationConfig.parse("medusa:4"), MODEL, heads=tmp_path).new()
    assert isinstance(fixed, MedusaProposer) and len(fixed.nodes) == 4
    save_medusa(medusa(shared=True, drafted=6), tmp_path)
    head = torch.randn(VOCAB, HIDDEN)
    with pytest.raises(KaruiError, match="share the target's head"):
        Speculator(SpeculationConfig.parse("medusa:4"), MODEL, heads=tmp_path)
    sharing = Speculator(SpeculationConfig.parse("medusa:4"), MODEL, heads=tmp_path, head=lambda: head).new()
    assert isinstance(sharing, MedusaProposer) and torch.equal(sharing.heads.rows(1), head[sharing.heads.ids])
    assert isinstance(Speculator(SpeculationConfig.parse("eagle3:2"), MODEL, heads=tmp_path, embed=embed).new(), Eagle3Proposer)
    drafter = MarkovDrafter(Markov(VOCAB))
    assert isinstance(Speculator(SpeculationConfig.parse("draft:x:2"), MODEL, drafter=drafter).new(), DraftModelProposer)
    from dataclasses import replace
    wider = replace(MODEL, vocab_size=99)
    for spelling, kwargs, message in [("medusa", {"heads": tmp_path}, "99"),
                                      ("eagle3", {"heads": tmp_path, "embed": embed}, "99"),
                                      ("draft:x", {"drafter": drafter}, "99"), ("draft:x", {}, "not loaded"),
                                      ("medusa", {}, "no medusa heads"), ("lookahead:2,7,7", {}, "n >= 3")]:
        with pytest.raises(KaruiError, match=message):
            Speculator(SpeculationConfig.parse(spelling), wider, **kwargs)


def test_aux_layers_are_those_of_the_paper() -> None:
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(6) == (2, 3) and default_aux_layers(2) == (0, 1) and default_aux_layers(1) == (0,)
    with pytest.raises(KaruiError, match="ascending"):
        Eagle3Config.of(MODEL).__class__(**{**vars(Eagle3Config.of(MODEL)), "aux_layers": (3, 2)})
