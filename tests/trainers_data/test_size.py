"""Behavioural: data at size. Many shards, mixing, budget, deduplication, splitting, spilling to disk, worker processes."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.configs.recipe import DataSection, Recipe
from karui.trainers.data import epoch_order, load_samples, spool
from karui.trainers.data.mixing import MixSource, Part
from karui.trainers.data.seen import Seen
from karui.trainers.data.sources import Row


def texts(n, start=0, words=12):
    return [{"text": " ".join(f"w{(i * 7 + j * j) % 97}" for j in range(words + i % 5))} for i in range(start, start + n)]


def same(a, b):
    for name in ("ids", "loss_mask", "offsets", "source_rows"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
    assert (a.counts, a.format) == (b.counts, b.format)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_many_shards_are_one_set_in_the_order_of_their_names(kind, write, tokenizers_by_name, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = texts(50)
    whole = load_samples(DataSection(train=write("whole.jsonl", rows)), tokenizers_by_name["none"], "train")
    for i in range(5):
        part = rows[i * 10 : (i + 1) * 10]
        if kind == "jsonl":
            write(f"shards/part-{i}.jsonl", part)
        else:
            (tmp_path / "shards").mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(part), tmp_path / "shards" / f"part-{i}.parquet")
    same(load_samples(DataSection(train=str(tmp_path / "shards")), tokenizers_by_name["none"], "train"), whole)


@pytest.mark.parametrize("form", ["text", "txt", "chat"])
def test_a_set_that_went_to_disk_is_the_one_in_memory(form, write, tokenizers_by_name, monkeypatch, own_cache):
    rows = texts(60) if form == "text" else [
        {"messages": [{"role": "user", "content": r["text"]}, {"role": "assistant", "content": f"yes {i}"}]} for i, r in enumerate(texts(60))]
    path = write("a.txt", "\n".join(r["text"] for r in texts(60))) if form == "txt" else write("a.jsonl", rows)
    tokenizer = tokenizers_by_name["chatml"]
    section = DataSection(train=path, holdout=5, max_length=64 if form != "chat" else 256)
    plain = load_samples(section, tokenizer, "train", cache=False)
    monkeypatch.setattr(spool, "SPILL_TOKENS", 100)
    for _ in range(2):  # made, then read from the cache
        kept = load_samples(section, tokenizer, "train")
        assert isinstance(kept.ids, np.memmap)
        same(kept, plain)
    assert len([p for p in own_cache.rglob("*") if p.is_file()]) == 1


def test_a_disk_that_is_full_while_spilling_is_an_error_and_leaves_nothing(write, tokenizers_by_name, monkeypatch, own_cache):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "SPILL_TOKENS", 100)
    monkeypatch.setattr(spool, "_compose", full)
    with pytest.raises(KaruiError, match="No space left.*KARUI_CACHE"):
        load_samples(DataSection(train=write("a.jsonl", texts(60))), tokenizers_by_name["none"], "train")
    assert not [p for p in own_cache.rglob("*") if p.is_file()]


@pytest.mark.parametrize("form", ["text", "chat"])
def test_worker_processes_give_the_same_set(form, write, tokenizers_by_name):
    rows = texts(700) if form == "text" else [
        {"messages": [{"role": "user", "content": r["text"]}, {"role": "assistant", "content": f"yes {i}"}]} for i, r in enumerate(texts(700))]
    path, tokenizer = write("a.jsonl", rows), tokenizers_by_name["chatml"]
    alone = load_samples(DataSection(train=path), tokenizer, "train", cache=False)
    same(load_samples(DataSection(train=path, workers=2), tokenizer, "train", cache=False), alone)


def test_an_error_in_a_worker_names_its_row(write, tokenizers_by_name):
    path = write("a.jsonl", [*texts(300), {"text": 5}])
    with pytest.raises(KaruiError, match="line 301: column 'text' is an integer"):
        load_samples(DataSection(train=path, workers=1), tokenizers_by_name["none"], "train", cache=False)


def test_a_budget_of_tokens_stops_at_the_sample_that_meets_it(write, tokenizers_by_name):
    path, tokenizer = write("a.jsonl", texts(400)), tokenizers_by_name["none"]
    whole = load_samples(DataSection(train=path), tokenizer, "train")
    cut = load_samples(DataSection(train=path, tokens=1000), tokenizer, "train")
    n = len(cut)
    assert cut.counts.tokens >= 1000 > cut.counts.tokens - len(cut[n - 1])
    assert cut.ids.tolist() == whole.ids[: whole.offsets[n]].tolist()
    assert any("data.tokens=1000" in note for note in cut.notes)
    with pytest.raises(KaruiError, match="data.tokens"):
        Recipe.build({"model": "x", "data": {"train": "y", "tokens": 0}})


def test_duplicates_are_counted_or_left_out(write, tokenizers_by_name):
    path, tokenizer = write("a.jsonl", texts(20) + texts(5) + texts(20)), tokenizers_by_name["none"]
    kept = load_samples(DataSection(train=path), tokenizer, "train")
    out = load_samples(DataSection(train=path, dedup=True), tokenizer, "train")
    assert kept.counts.duplicates == out.counts.duplicates == 25
    assert (len(kept), len(out)) == (45, 20) and out.source_rows.tolist() == list(range(20))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=300))
def test_seen_is_a_set(values):
    seen, plain = Seen(), set()
    for value in values:
        assert seen.add(value) == (value in plain)
        plain.add(value)
    assert len(seen) == len(plain)


@pytest.mark.parametrize("on_disk", [False, True])
def test_seen_grows(on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("karui.trainers.data.seen._IN_MEMORY", 1 << 12)
    seen = Seen(tmp_path if on_disk else None)
    assert not any(seen.add(i.to_bytes(4, "little")) for i in range(9000))
    assert all(seen.add(i.to_bytes(4, "little")) for i in range(9000)) and len(seen) == 9000
    assert isinstance(seen._table.base, np.memmap) == on_disk and not list(tmp_path.iterdir())


def test_long_texts_are_split_without_losing_a_token(write, tokenizers_by_name):
    rows, tokenizer = [*texts(3), {"text": " ".join(f"long{i}" for i in range(200))}], tokenizers_by_name["none"]
    whole = load_samples(DataSection(train=write("a.jsonl", rows), max_length=10000), tokenizer, "train")
    pieces = load_samples(DataSection(train=write("a.jsonl", rows), max_length=64, overlong="split"), tokenizer, "train")
    assert pieces.ids.tolist() == whole.ids.tolist() and pieces.lengths.max() == 64
    assert not pieces.loss_mask[pieces.offsets[:-1]].any() and pieces.counts.split >= 1
    chat = write("c.jsonl", [{"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y"}]}])
    with pytest.raises(KaruiError, match="split is for raw text"):
        load_samples(DataSection(train=chat, max_length=32, overlong="split"), tokenizers_by_name["chatml"], "train")


class Lines:
    is_text = False

    def __init__(self, label, sizes):
        self.label, self.sizes = label, sizes

    def rows(self):
        for i, n in enumerate(self.sizes):
            yield Row(i, f"{self.label} {i}", {"text": "x" * n})

    def fingerprint(self):
        return self.label


@settings(max_examples=40, deadline=None)
@given(a=st.lists(st.integers(1, 50), min_size=20, max_size=80), b=st.lists(st.integers(1, 50), min_size=20, max_size=80),
       weight=st.floats(0.2, 5))
def test_a_mix_keeps_its_shares_at_every_moment(a, b, weight):
    mix = MixSource((Part(Lines("a", a), weight), Part(Lines("b", b), 1.0)))
    chars = [0, 0]
    for n, row in enumerate(mix.rows()):
        assert row.index == n
        chars[row.part] += len(row.fields["text"])
        # neither is further ahead of its share than one row
        assert chars[0] / weight - chars[1] <= 50 / weight + 50 and chars[1] - chars[0] / weight <= 50 + 50 / weight
    assert mix.ended in ("a", "b")
    again = [(r.part, r.place) for r in mix.rows()]
    assert again == [(r.part, r.place) for r in mix.rows()]


def test_a_mix_of_formats_in_a_recipe(write, tokenizers_by_name):
    chat = [{"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a" * 20}]} for i in range(40)]
    pairs = [{"prompt": f"p {i}", "completion": "b" * 40} for i in range(40)]
    section = DataSection(train=write("c.jsonl", chat), weight=1, mix=({"source": write("p.jsonl", pairs), "weight": 3, "repeat": 2},))
    found = load_samples(section, tokenizers_by_name["chatml"], "train")
    assert found.format == "chat + prompt" and len(found) == found.counts.rows
    assert any("% of the characters" in note for note in found.notes)
    share = [float(n.partition("rows, ")[2].partition(" %")[0]) for n in found.notes if n.startswith("mix")]
    assert share[0] == pytest.approx(25, abs=3)
    other = load_samples(section.model_copy(update={"weight": 2.0}), tokenizers_by_name["chatml"], "train")
    assert len(other) != len(found)  # the weights are part of the cache's key
    with pytest.raises(KaruiError, match="plain text, which has no rows to mix"):
        load_samples(DataSection(train=write("t.txt", "abc " * 50), mix=({"source": write("p.jsonl", pairs)},)),
                     tokenizers_by_name["chatml"], "train")


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 400), window=st.integers(1, 500), seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_a_shuffle_window_permutes_and_keeps_neighbours_together(n, window, seed, epoch):
    order = epoch_order(n, seed, epoch, window=window)
    assert sorted(order.tolist()) == list(range(n))
    blocks = [i // window for i in order.tolist()]
    changes = sum(a != b for a, b in zip(blocks, blocks[1:]))
    assert changes == (len(set(blocks)) - 1 if window < n else 0)


def test_two_windows_differ_between_epochs():
    assert epoch_order(100, 0, 0, window=10).tolist() != epoch_order(100, 0, 1, window=10).tolist()


def test_reading_stops_where_limit_and_holdout_are_met(write, tokenizers_by_name):
    """A bad row far behind what is needed is never read."""
    rows = "".join(json.dumps(r) + "\n" for r in texts(600)) + "{broken\n"
    section = DataSection(train=write("a.jsonl", rows), limit=5, holdout=3)
    assert len(load_samples(section, tokenizers_by_name["none"], "train")) == 5
