"""Property: one suite for both prefix indexes, and the block pool against a model that only knows who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.inference.cache.naive import NaiveIndex
from karui.inference.cache.pool import BlockPool
from karui.inference.cache.prefix import HashedIndex

INDEXES = pytest.mark.parametrize("make", [NaiveIndex, HashedIndex], ids=["naive", "hashed"])
BLOCK = 3
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
SPACES = st.tuples(st.integers(0, 1), st.sampled_from([None, ("a", 0), ("a", 1)]), st.sampled_from(["", "salt"]))


def longest_common(cached: dict, text: tuple[int, ...], space) -> int:
    """The model: blocks of `text` whose whole prefix was entered in that namespace, the last token left out."""
    count = 0
    while (count + 1) * BLOCK < len(text) and (space, text[:(count + 1) * BLOCK]) in cached:
        count += 1
    return count


@INDEXES
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SPACES, TEXTS), min_size=1, max_size=12), st.lists(st.tuples(SPACES, TEXTS), min_size=1, max_size=6))
def test_matches_exactly_what_was_entered(make, entered, asked):
    pool = BlockPool(100, BLOCK, make())
    cached: dict[tuple, int] = {}
    for space, text in entered:
        found, names = pool.match([*text, 9], space)
        name = names[-1] if names else pool.index.root(space)
        for i in range(len(found), len(text) // BLOCK):
            name = pool.index.name(name, text[i * BLOCK:(i + 1) * BLOCK])
            block = pool.take()
            pool.enter(name, block)
            cached.setdefault((space, tuple(text[:(i + 1) * BLOCK])), block)
    for space, text in [*asked, *entered]:
        blocks, names = pool.match(text, space)
        count = longest_common(cached, tuple(text), space)
        assert blocks == [cached[space, tuple(text[:(i + 1) * BLOCK])] for i in range(count)] and len(names) == count
        assert len(blocks) <= (len(text) - 1) // BLOCK


@INDEXES
def test_a_name_is_given_once_and_dropped_with_its_block(make):
    index = make()
    name = index.name(index.root("space"), [1, 2, 3])
    assert index.enter(name, 7) and not index.enter(name, 8)
    assert index.find(name) == 7 and index.blocks() == {7}
    index.drop(8)
    index.drop(7)
    assert index.find(name) is None and index.blocks() == set()
    assert index.enter(name, 8)


@INDEXES
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pool_against_a_model(make, data):
    """Random takes, shares, releases and entries: counts, free list and index always agree with the holders."""
    pool = BlockPool(8, BLOCK, make())
    holders: list[list[int]] = []
    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "share", "release", "enter", "match", "forget"]))
        if action == "take" and pool.num_free:
            count = data.draw(st.integers(1, pool.num_free))
            holders.append([pool.take() for _ in range(count)])
        elif action == "share" and holders:
            source = data.draw(st.sampled_from(holders))
            for block in source:
                pool.share(block)
            holders.append(list(source))
        elif action == "release" and holders:
            pool.release(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        elif action == "enter" and holders:
            block = data.draw(st.sampled_from(holders))[0]
            pool.enter(pool.index.name(pool.index.root(0), [step] * BLOCK), block)
        elif action == "match":
            found, _ = pool.match([data.draw(st.integers(0, 40))] * (BLOCK + 1), 0)
            for block in found:
                pool.share(block)
            if found:
                holders.append(found)
        elif action == "forget":
            pool.forget_all()
        pool.check(holders)
    for blocks in holders:
        pool.release(blocks)
    pool.check([])
    assert pool.num_free == 8


def test_least_recently_freed_prefixes_go_first_and_unnamed_blocks_before_them():
    pool = BlockPool(4, BLOCK, HashedIndex())
    blocks = [pool.take() for _ in range(4)]
    for i in (0, 1, 2):
        pool.enter(pool.index.name(pool.index.root(0), [i] * BLOCK), blocks[i])
    for i in (1, 0, 3, 2):
        pool.release([blocks[i]])
    assert [pool.take() for _ in range(4)] == [blocks[3], blocks[1], blocks[0], blocks[2]]
    assert pool.num_evicted == 3 and pool.num_cached == 0


def test_check_sees_a_leak():
    pool = BlockPool(4, BLOCK, HashedIndex())
    block = pool.take()
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([])
    pool.check([[block]])
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release([block, block])


def test_settled_blocks_are_full_or_nobody_s_since_it_was_last_asked():
    pool = BlockPool(4, BLOCK, HashedIndex())
    first, second = pool.take(), pool.take()
    pool.share(second)
    assert pool.settled == set()
    pool.enter(pool.index.name(pool.index.root("s"), [1, 2, 3]), first)
    pool.release([second])
    assert pool.settled == {first}  # the other one is still held
    pool.settled.clear()
    pool.release([first, second])
    assert pool.settled == {first, second}
    assert {pool.take() for _ in range(4)} == {0, 1, 2, 3} and pool.settled == set()  # handed out again, they are somebody's
