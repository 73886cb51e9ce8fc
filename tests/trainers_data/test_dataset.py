"""Behavioural: sources, formats, the length policy, counts, splits, and every kind of bad input with its message."""

import json
import logging
import os

import numpy as np
import pytest

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.recipe import DataSection
from karui.trainers.data import load_samples, shipped_samples
from karui.trainers.data.dataset import _blocks

CHAT = {"messages": [{"role": "user", "content": "what is 6 * 7?"}, {"role": "assistant", "content": "42"}]}
PAIR = {"prompt": "what is 6 * 7?", "completion": "42"}


@pytest.fixture
def chatml(tokenizers_by_name):
    return tokenizers_by_name["chatml"]


def load(train, tokenizer, split="train", **section):
    return load_samples(DataSection(train=train, **section), tokenizer, split)


def texts(samples, tokenizer, supervised=False):
    return [tokenizer.decode(s.ids[s.loss_mask] if supervised else s.ids) for s in samples]


# ---- formats ----------------------------------------------------------------------------------------------------------


def test_one_conversation_in_every_spelling_gives_the_same_tokens(write, chatml):
    turns = CHAT["messages"]
    rows = {
        "chat": CHAT,
        "pair": PAIR,
        "pair_of_messages": {"prompt": turns[:1], "completion": turns[1:]},
        "sharegpt": {"conversations": [{"from": "human", "value": "what is 6 * 7?"}, {"from": "gpt", "value": "42"}]},
        "json_in_a_string": {"messages": json.dumps(turns)},
        "nulls": {"messages": [{**t, "tool_calls": None, "name": None} for t in turns], "tools": None},
    }
    seen = {name: load(write(f"{name}.jsonl", [row]), chatml) for name, row in rows.items()}
    first = seen["chat"][0]
    assert chatml.decode(first.ids[first.loss_mask]) == "42<|im_end|>\n"
    for name, found in seen.items():
        assert found[0].ids.tolist() == first.ids.tolist() and found[0].loss_mask.tolist() == first.loss_mask.tolist(), name
    assert {n: s.format for n, s in seen.items()} == {n: "prompt" if "pair" in n else "chat" for n in rows}
    assert "format chat: columns messages" in seen["chat"].notes


def test_system_is_put_where_there_is_none(write, chatml):
    own = {"messages": [{"role": "system", "content": "Mine."}, *CHAT["messages"]]}
    found = texts(load(write("c.jsonl", [CHAT, own]), chatml, system="Be brief."), chatml)
    assert found[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert found[1].startswith("<|im_start|>system\nMine.<|im_end|>")
    assert "Be brief." not in found[1]


def test_plain_pairs_without_a_template(write, tokenizers_by_name):
    plain = tokenizers_by_name["none"]
    found = load(write("p.jsonl", [{"q": "6 * 7 =", "a": " 42"}]), plain, prompt="q", completion="a")
    assert texts(found, plain) == ["6 * 7 = 42<|im_end|>"] and texts(found, plain, True) == [" 42<|im_end|>"]
    assert any("no chat template" in note for note in found.notes)
    every = load(write("p.jsonl", [{"q": "6 * 7 =", "a": " 42"}]), plain, prompt="q", completion="a", train_on="all")
    assert every[0].loss_mask.tolist() == [False] + [True] * (len(every[0]) - 1)


def test_raw_text_is_supervised_throughout_and_ends(write, chatml):
    found = load(write("t.jsonl", [{"text": "hello there"}, {"text": "  \n"}, {"text": "fox<|im_end|>"}]), chatml)
    assert texts(found, chatml) == ["hello there<|im_end|>", "fox<|im_end|>"]
    assert all(s.loss_mask[1:].all() and not s.loss_mask[0] for s in found)
    assert (found.counts.rows, found.counts.empty, found.counts.used) == (3, 1, 2) and [s.source_row for s in found] == [0, 2]


def test_tool_calls_with_arguments_as_json_text(write, tokenizers_by_name):
    tools = tokenizers_by_name["tools"]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
    row = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
           "tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])}
    found = load(write("c.jsonl", [row]), tools)
    assert texts(found, tools, True) == ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call><|im_end|>\n']


def test_format_is_decided_by_the_columns_and_can_be_set(write, chatml):
    path = write("b.jsonl", [{**PAIR, "text": "hello"}])
    assert load(path, chatml).format == "prompt" and "text would fit as well" in load(path, chatml).notes[0]
    assert load(path, chatml, format="text").format == "text"


# ---- files ------------------------------------------------------------------------------------------------------------


def test_json_parquet_and_folders_hold_the_same_rows(write, chatml, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"{i} * 7?", "completion": str(7 * i)} for i in range(5)]
    lines = load(write("rows.jsonl", rows), chatml)
    found = {"list": load(write("rows.json", json.dumps(rows)), chatml),
             "data": load(write("d.json", json.dumps({"data": rows})), chatml),
             "bom": load(write("bom.jsonl", b"\xef\xbb\xbf" + (tmp_path / "rows.jsonl").read_bytes() + b"\n\n"), chatml)}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found["parquet"] = load(str(tmp_path / "rows.parquet"), chatml)
    write("folder/b.jsonl", rows[3:])
    write("folder/a.jsonl", rows[:3])
    write("folder/README.md", "not data")
    found["folder"] = load(str(tmp_path / "folder"), chatml)
    for name, samples in found.items():
        assert samples.ids.tolist() == lines.ids.tolist() and samples.source_rows.tolist() == list(range(5)), name


def test_parquet_chats_with_the_nulls_arrow_adds(chatml, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([CHAT, {"messages": [*CHAT["messages"], {"role": "user", "content": "and?", "name": "bo"}]}])
    pq.write_table(table, tmp_path / "c.parquet")
    found = load(str(tmp_path / "c.parquet"), chatml)
    assert texts(found, chatml, True) == ["42<|im_end|>\n"] * 2
    assert found.counts.duplicates == 1 and found.counts.trimmed_tokens > 0  # the last user turn is never seen by a loss


def test_text_file_is_cut_into_windows_that_lose_nothing(write, chatml):
    text = "the quick brown fox says: hello there\n\n  - one\n" * 9
    found = load(write("t.txt", text), chatml, max_length=16)
    assert "".join(texts(found, chatml)) == text + "<|im_end|>"
    assert found.ids.tolist() == [*chatml(text, add_special_tokens=False)["input_ids"], chatml.eos_token_id]
    assert set(found.lengths[:-1]) == {16} and found.counts.supervised_tokens == found.counts.tokens - len(found)
    assert found.counts.dropped_overlong == 0 and any("windows of 16" in n for n in found.notes)
    assert len(load(write("t.txt", text), chatml, max_length=16, limit=3)) == 3


def test_blocks_of_a_large_text_keep_the_tokens(chatml, monkeypatch):
    text = "hello there\n\n  - one\nuser: 42 foxes\n" * 40
    monkeypatch.setattr("karui.trainers.data.dataset._BLOCK_CHARS", 100)
    blocks = list(_blocks(text))
    assert "".join(blocks) == text and len(blocks) > 10
    assert [i for b in blocks for i in chatml(b)["input_ids"]] == chatml(text)["input_ids"]


def test_shipped_samples(chatml):
    assert set(shipped_samples()) == {"gsm8k-sample", "gsm8k-sample-test"}
    section = DataSection(train="gsm8k-sample", eval="gsm8k-sample-test", prompt="question", completion="answer", max_length=2048)
    train, held_out = (load_samples(section, chatml, split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (512, 64)
    assert "Natalia" in chatml.decode(train[0].ids)
    assert chatml.decode(train[0].ids[train[0].loss_mask]).endswith("#### 72<|im_end|>\n")
    assert not {s.ids.tobytes() for s in train} & {s.ids.tobytes() for s in held_out}


# ---- length policy, splits, counts ------------------------------------------------------------------------------------


def pairs(n, long_at=()):
    return [{"prompt": f"{i}?", "completion": "hello there " * (40 if i in long_at else 1)} for i in range(n)]


def test_overlong_policies(write, chatml):
    path = write("p.jsonl", pairs(6, long_at=(2, 4)))
    dropped = load(path, chatml, max_length=64)
    assert (dropped.counts.rows, dropped.counts.used, dropped.counts.dropped_overlong) == (6, 4, 2)
    assert dropped.source_rows.tolist() == [0, 1, 3, 5] and dropped.counts.longest > 64
    cut = load(path, chatml, max_length=64, overlong="truncate")
    whole = load(path, chatml, max_length=2000)
    assert (cut.counts.truncated, cut.counts.used, cut.lengths.max()) == (2, 6, 64)
    assert cut[2].ids.tolist() == whole[2].ids[:64].tolist() and cut[2].loss_mask.tolist() == whole[2].loss_mask[:64].tolist()
    with pytest.raises(KaruiError, match=r"p.jsonl line 3: \d+ tokens, more than data.max_length=64"):
        load(path, chatml, max_length=64, overlong="error")


def test_truncation_that_leaves_no_label_is_counted_not_trained(write, chatml):
    path = write("p.jsonl", [PAIR, {"prompt": "hello there " * 60, "completion": "42"}])
    found = load(path, chatml, max_length=48, overlong="truncate")
    assert (found.counts.truncated, found.counts.unsupervised, found.counts.used) == (1, 1, 1)


def test_holdout_and_limit(write, chatml):
    path = write("p.jsonl", pairs(10))
    assert load(path, chatml, holdout=3).source_rows.tolist() == list(range(7))
    assert load(path, chatml, "eval", holdout=3).source_rows.tolist() == [7, 8, 9]
    assert load(path, chatml, holdout=3, limit=4).source_rows.tolist() == [0, 1, 2, 3]
    assert load(path, chatml, "eval", holdout=3, limit=4).source_rows.tolist() == [7, 8, 9]
    assert load(path, chatml, limit=2).counts.rows == 2
    nothing = load(path, chatml, "eval")
    assert len(nothing) == 0 and nothing.counts.rows == 0
    other = write("e.jsonl", pairs(2))
    assert len(load(path, chatml, "eval", eval=other, limit=1)) == 2 and len(load(path, chatml, eval=other, holdout=3)) == 10
    with pytest.raises(KaruiError, match="holdout is 10, but there are only 10 rows"):
        load(path, chatml, holdout=10)


def test_text_windows_are_held_out_too(write, chatml):
    path = write("t.txt", "hello there\n" * 200)
    train, held = load(path, chatml, max_length=16, holdout=2), load(path, chatml, "eval", max_length=16, holdout=2)
    whole = load(path, chatml, max_length=16)
    assert len(held) == 2 and [*train.ids, *held.ids] == whole.ids.tolist()


def test_counts_add_up(write, chatml):
    rows = [*pairs(5, long_at=(1,)), {"prompt": "0?", "completion": "hello there "}]
    c = load(write("p.jsonl", rows), chatml, max_length=64).counts
    assert c.rows == c.used + c.dropped_overlong + c.unsupervised + c.empty and c.duplicates == 1 and c.used == 5


def test_progress_is_told(write, chatml):
    seen = []
    load_samples(DataSection(train=write("p.jsonl", pairs(300))), chatml, "train", progress=seen.append)
    assert seen == [256, 300]


# ---- bad input --------------------------------------------------------------------------------------------------------

GOOD = json.dumps(CHAT)
U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def chat(*messages, **more):
    return {"messages": list(messages), **more}


BAD_ROWS = {
    "no field": ([PAIR, {"prompt": "x"}],
                 "line 2: no column 'completion'; there are 'prompt'.*format prompt reads 'prompt', 'completion'"),
    "no known column": ([{"question": "x", "answer": "y"}],
                        "line 1: columns 'question', 'answer' fit no format; expected 'messages'"),
    "number as content": ([chat(U, {"role": "assistant", "content": 42})],
                          r"line 1, messages\[1\]: .*assistant message is an integer"),
    "null content": ([chat(U, {"role": "assistant"})], r"messages\[1\]: the content of this assistant message is null"),
    "parts as content": ([chat({"role": "user", "content": [{"type": "text"}]}, A)],
                         "is a list; expected a string. Lists of content"),
    "empty assistant": ([CHAT, chat(U, {"role": "assistant", "content": " \n"})], r"line 2, messages\[1\]: empty assistant turn"),
    "unknown role": ([chat(U, {"role": "asistant", "content": "x"})], "unknown role 'asistant'.*Did you mean 'assistant'"),
    "role not a string": ([chat(U, {"role": 3, "content": "x"})], "unknown role 3"),
    "no messages": ([{"messages": []}], "holds an empty list; expected a list of messages"),
    "messages not a list": ([{"messages": 7}], "holds an integer; expected a list of messages"),
    "messages not json": ([{"messages": "hello"}], "is a string; expected a list of messages"),
    "message not an object": ([{"messages": ["hello"]}], r"messages\[0\]: a message is an object"),
    "mixed: chat then pair": ([CHAT, PAIR], "line 2: no column 'messages'; there are 'prompt', 'completion'"),
    "mixed: string then list": ([PAIR, {"prompt": [U], "completion": [A]}],
                                "line 2: mixed schemas: column 'prompt' holds a list"),
    "mixed: list then string": ([{"prompt": [U], "completion": [A]}, PAIR], "mixed schemas: column 'prompt' holds a string"),
    "completion number": ([{"prompt": "x", "completion": 42}], "column 'completion' is an integer; expected a string"),
    "completion empty": ([PAIR, {"prompt": "x", "completion": ""}], "line 2: column 'completion' is empty"),
    "completion null": ([PAIR, {"prompt": "x", "completion": None}], "line 2: column 'completion' is null; expected a string"),
    "completion without assistant": ([{"prompt": [U], "completion": [U]}], "has no assistant message"),
    "text number": ([{"text": 3}], "column 'text' is an integer; expected a string"),
    "row is a list": ([[1, 2]], "line 1: a row is an object with named fields, this one is a list"),
    "tools not a list": ([chat(U, A, tools="{")], "'tools' is a string that is not JSON"),
    "tools numbers": ([chat(U, A, tools=[1])], "'tools' holds a list; expected a list of JSON schemas"),
    "call without name": ([chat(U, {**A, "tool_calls": [{"function": {}}]})], "a tool call is .* without a name"),
    "call arguments": ([chat(U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]})],
                       "call to 'f' are not JSON"),
    "calls not a list": ([chat(U, {**A, "tool_calls": {"a": 1}})], "tool_calls holds an object"),
    "no assistant anywhere": ([chat(U)], r"no sample has a supervised token \(1 rows: 1 without assistant"),
    "all empty text": ([{"text": " "}], "all 1 rows are empty text"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(name, write, chatml):
    rows, message = BAD_ROWS[name]
    with pytest.raises(KaruiError, match=f"(?s){message}"):
        load(write("bad.jsonl", rows), chatml)


BAD_FILES = {
    "empty": ("a.jsonl", b"", "a.jsonl: the file is empty"),
    "blank": ("a.jsonl", b"\n \n", "the file is empty"),
    "empty json": ("a.json", b"", "the file is empty"),
    "empty list": ("a.json", b"[]", "the data set is empty"),
    "empty text": ("a.txt", b" \n", "the file is empty"),
    "malformed line": ("a.jsonl", f"{GOOD}\n{GOOD[:-3]}\n".encode(), "a.jsonl line 2: malformed JSON at column"),
    "half a character": ("a.jsonl", b'{"text": "\\ud83d"}\n', "line 1: .*half of a surrogate pair"),
    "half a character in json": ("a.json", b'[{"text": "\\uDE00"}]', "a.json: .*half of a surrogate pair"),
    "deep": ("a.jsonl", b"[" * 100_000, "line 1: malformed JSON: nested too deep"),
    "malformed json": ("a.json", b'[{"text": "x"},\n{]', "a.json: malformed JSON at line 2 column 2"),
    "lines in .json": ("a.json", f"{GOOD}\n{GOOD}\n".encode(), "One object per line belongs in a .jsonl"),
    "json of another shape": ("a.json", b'{"rows": 1}', "expected a list of objects"),
    "latin1 line": ("a.jsonl", GOOD.encode() + b'\n{"text": "caf\xe9"}\n',
                    "a.jsonl line 2: not valid UTF-8 .byte 0xe9 at offset 13"),
    "latin1 text": ("a.txt", b"caf\xe9", "a.txt: not valid UTF-8"),
    "not parquet": ("a.parquet", b"PAR1 no", "a.parquet: not a readable parquet file"),
    "unknown suffix": ("a.csv", b"a,b", "suffix '.csv' is not known; expected .jsonl"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name, write, chatml):
    file, content, message = BAD_FILES[name]
    with pytest.raises(KaruiError, match=message):
        load(write(file, content), chatml)


def test_truncated_parquet(chatml, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "x" * 1000}] * 100), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptError, match="not a readable parquet"):
        load(str(path), chatml)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/nowhere/data", "gsm8k"])
def test_missing_files(name, chatml):
    with pytest.raises(KaruiError, match="no such file or folder.*shipped: gsm8k-sample"):
        load(name, chatml)


def test_near_names_are_suggested(chatml):
    with pytest.raises(KaruiError, match="Did you mean 'gsm8k-sample'"):
        load("gsm8k-smaple", chatml)


def test_folders(write, chatml, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(KaruiError, match="no .jsonl.* files in this folder"):
        load(str(tmp_path / "none"), chatml)
    write("two/a.jsonl", [PAIR])
    write("two/b.txt", "hello")
    with pytest.raises(KaruiError, match="mixes jsonl and txt"):
        load(str(tmp_path / "two"), chatml)


def test_hub_offline_is_a_clear_error(chatml, monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(KaruiError, match="the hub's data set 'owner/name' cannot be fetched .ConnectionError.*Offline"):
        load("owner/name", chatml)


def test_hub_splits(chatml, monkeypatch):
    import datasets

    asked = []

    def serve(name, config, split):
        asked.append((name, config, split))
        if split == "test":
            raise ValueError('Unknown split "test". Should be one of [\'train\', \'validation\'].')
        return datasets.Dataset.from_list([PAIR] * 3)

    monkeypatch.setattr(datasets, "load_dataset", serve)
    section = DataSection(train="owner/name:main:train[:10%]", eval="owner/name", limit=2)
    assert len(load_samples(section, chatml, "train", cache=False)) == 2 and asked[0] == ("owner/name", "main", "train[:10%]")
    assert len(load_samples(section, chatml, "eval", cache=False)) == 3 and asked[-1] == ("owner/name", None, "validation")
    with pytest.raises(KaruiError, match="Unknown split.*owner/name:split"):
        load("owner/name:test", chatml)


def test_everything_too_long(write, chatml):
    with pytest.raises(KaruiError, match=r"every sample is longer than data.max_length=8 \(the longest has \d+ tokens\)"):
        load(write("p.jsonl", pairs(3)), chatml, max_length=8)


def test_everything_unsupervised_after_truncation(write, chatml):
    with pytest.raises(KaruiError, match="no sample has a supervised token.*of which 3 after truncation"):
        load(write("p.jsonl", pairs(3)), chatml, max_length=8, overlong="truncate")


def test_chat_needs_a_template(write, tokenizers_by_name):
    plain = tokenizers_by_name["none"]
    with pytest.raises(KaruiError, match="line 1: this is chat data, but the model's tokenizer has no chat template"):
        load(write("c.jsonl", [CHAT]), plain)
    with pytest.raises(KaruiError, match="no chat template"):
        load(write("c.jsonl", [{"prompt": [U], "completion": [A]}]), plain)
    with pytest.raises(KaruiError, match="data.system is set, but"):
        load(write("c.jsonl", [PAIR]), plain, system="x")


def test_nothing_is_cached_when_it_fails(write, chatml, own_cache):
    with pytest.raises(KaruiError):
        load(write("c.jsonl", [chat(U)]), chatml)
    assert not files(own_cache)


# ---- cache ------------------------------------------------------------------------------------------------------------


def files(cache):
    return sorted(p for p in cache.rglob("*") if p.is_file())


def test_cache_returns_the_same_set(write, chatml, own_cache):
    path = write("p.jsonl", pairs(6, long_at=(2,)))
    fresh = load(path, chatml, max_length=64)
    assert len(files(own_cache)) == 1
    kept = load(path, chatml, max_length=64)
    assert isinstance(kept.ids, np.memmap)
    for name in ("ids", "loss_mask", "offsets", "source_rows"):
        ours, theirs = getattr(kept, name), getattr(fresh, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    assert (kept.counts, kept.notes, kept.format, kept.source) == (fresh.counts, fresh.notes, fresh.format, fresh.source)


def test_cache_key_covers_files_section_template_tokenizer_and_code(write, own_cache, monkeypatch):
    from karui.trainers.data import cache as module
    from tests.trainers_data.conftest import CHATML, TAGGED, make_tokenizer

    tokenizer, path = make_tokenizer(CHATML), write("p.jsonl", pairs(4))
    load(path, tokenizer)
    for n, change in enumerate([
        lambda: load(path, tokenizer, system="Be brief."),
        lambda: load(path, tokenizer, max_length=500),
        lambda: load(path, tokenizer, train_on="all"),
        lambda: load(path, make_tokenizer(TAGGED)),
        lambda: load(path, make_tokenizer(CHATML, eos="<|eot_id|>")),
        lambda: load(path, make_tokenizer(CHATML, vocab_size=300)),
        lambda: load(write("p.jsonl", pairs(3)), tokenizer),
        lambda: (monkeypatch.setattr(module, "_code", lambda: "other"), load(path, tokenizer)),
    ]):
        change()
        assert len(files(own_cache)) == n + 2, n
    load(path, tokenizer, packing=False, shuffle=False)  # these decide no token
    assert len(files(own_cache)) == 9


def test_a_file_of_the_same_size_and_time_is_not_taken_for_the_old_one(write, chatml):
    path = write("p.jsonl", [{"prompt": "a", "completion": "xyz"}])
    stat = os.stat(path)
    before = load(path, chatml)
    write("p.jsonl", [{"prompt": "a", "completion": "zyx"}])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load(path, chatml).ids.tolist() != before.ids.tolist()


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "garbage"])
def test_damaged_cache_is_made_again(damage, write, chatml, own_cache, caplog):
    path = write("p.jsonl", pairs(4))
    fresh = load(path, chatml)
    (file,) = files(own_cache)
    data = file.read_bytes()
    file.write_bytes({"cut": data[:-5], "header": data[:20], "empty": b"", "garbage": b"\xff" * len(data)}[damage])
    with caplog.at_level(logging.WARNING):
        assert load(path, chatml).ids.tolist() == fresh.ids.tolist()
    assert "damaged" in caplog.text and file.read_bytes() == data


def test_a_cache_that_cannot_be_written_is_only_a_warning(write, chatml, own_cache, caplog, monkeypatch):
    import safetensors.numpy

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with caplog.at_level(logging.WARNING):
        assert len(load(write("p.jsonl", pairs(4)), chatml)) == 4
    assert "No space left" in caplog.text and not files(own_cache)
