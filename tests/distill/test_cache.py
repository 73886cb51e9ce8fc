"""Behavioural tests of the teacher cache: what is read is what was written, resumed, counted, and never another teacher's."""

import numpy as np
import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.distill.cache import TeacherCache, document_key
from karui.distill.teacher_rows import SampledRows, TopKRows

IDENTITY = {"teacher": "abc", "tokenizer": "t", "template": "x", "temperature": 1.0, "data": "d", "kind": "topk", "k": 50, "vocabulary": 49152}


def documents(n, rows=40, vocab=49152, k=50, seed=0):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        tokens = torch.randint(0, vocab, (rows + 5,), generator=g).numpy()
        mask = np.arange(rows + 5) >= 5
        out.append((document_key(tokens, mask), TopKRows.of(torch.randn(rows, vocab, generator=g) * 4, k)))
    return out


def test_rows_come_back_in_any_order_and_cost_few_bytes(tmp_path):
    made = documents(6)
    cache = TeacherCache.open(tmp_path, IDENTITY)
    assert cache.fill(made, lambda d: d, batch=2, rows_per_shard=80) == 6
    assert len(list(cache.folder.glob("shard-*"))) == 3
    assert 202 <= cache.bytes_per_token <= 215
    again = TeacherCache.open(tmp_path, IDENTITY)
    found = again.rows([made[4][0], made[1][0]])
    wanted = [made[4][1], made[1][1]]
    assert torch.equal(found.ids, torch.cat([w.ids for w in wanted]))
    torch.testing.assert_close(found.logprobs, torch.cat([w.logprobs for w in wanted]), rtol=2**-11, atol=1e-4)
    torch.testing.assert_close(found.tail, torch.cat([w.tail for w in wanted]), rtol=2**-11, atol=1e-4)
    masses = found.logprobs.exp().sum(-1) + found.tail.exp()
    torch.testing.assert_close(masses, torch.ones_like(masses), atol=2e-3, rtol=0)


def test_a_killed_fill_goes_on_and_repeats_are_scored_once(tmp_path):
    made = documents(5)
    calls = []

    def score(batch):
        calls.append(len(batch))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return batch

    cache = TeacherCache.open(tmp_path, IDENTITY)
    with pytest.raises(KeyboardInterrupt):
        cache.fill(made, score, batch=2, rows_per_shard=80)
    again = TeacherCache.open(tmp_path, IDENTITY)
    assert len(again) == 4
    assert again.fill([*made, made[4]], lambda d: d, batch=2) == 1
    assert again.fill(made, lambda d: d) == 0
    assert not [p for p in again.folder.iterdir() if "tmp" in p.name]


def test_large_vocabularies_keep_their_ids(tmp_path):
    made = documents(1, vocab=151936)
    cache = TeacherCache.open(tmp_path, {**IDENTITY, "vocabulary": 151936})
    cache.fill(made, lambda d: d)
    assert torch.equal(cache.rows([made[0][0]]).ids, made[0][1].ids) and made[0][1].ids.max() > 65536
    assert cache.bytes_per_token <= 300


def test_sampled_rows(tmp_path):
    cache = TeacherCache.open(tmp_path, {**IDENTITY, "kind": "sampled", "k": 8, "temperature": 2.0})
    rows = SampledRows.of(torch.randn(3, 20), 8, torch.Generator().manual_seed(0), 2.0)
    key = document_key(np.arange(4), np.ones(4))
    cache.fill([(key, rows)], lambda d: d)
    found = cache.rows([key])
    assert torch.equal(found.ids, rows.ids) and found.temperature == 2.0
    torch.testing.assert_close(found.weights, rows.weights)


def test_another_identity_has_another_folder_and_is_refused_when_pointed_at(tmp_path):
    a = TeacherCache.open(tmp_path, IDENTITY)
    b = TeacherCache.open(tmp_path, {**IDENTITY, "template": "y"})
    assert a.folder != b.folder
    with pytest.raises(KaruiError, match="another teacher's cache .template: 'x' there, 'y' needed"):
        TeacherCache.open(a.folder, {**IDENTITY, "template": "y"})
    with pytest.raises(KaruiError, match="teacher: 'abc' there, 'zzz' needed"):
        TeacherCache.open(a.folder, {**IDENTITY, "teacher": "zzz"})


def test_damage_and_gaps_are_named(tmp_path):
    cache = TeacherCache.open(tmp_path, IDENTITY)
    with pytest.raises(KaruiError, match="does not hold a document"):
        cache.rows([b"0" * 16])
    cache.fill(documents(1), lambda d: d)
    shard = next(cache.folder.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CorruptError, match="scored again"):
        TeacherCache.open(tmp_path, IDENTITY)


def test_a_document_is_its_tokens_and_its_mask():
    tokens, mask = np.arange(9), np.arange(9) > 3
    assert document_key(tokens, mask) == document_key(tokens.astype(np.int32), mask.astype(np.int64))
    assert document_key(tokens, mask) != document_key(tokens, np.arange(9) > 4)
    assert document_key(tokens, mask) != document_key(tokens[::-1], mask)
