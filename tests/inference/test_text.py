"""Behavioural: incremental detokenization and stop texts on a byte-level tokenizer made here; prompts with one BOS."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.catalogue.byte_level import BYTE_ALPHABET
from karui.configs.errors import KaruiError
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.text import Detokenizer, encode_chat, encode_prompt, token_bytes, token_text
from tests.inference.conftest import tiny


def byte_tokenizer():
    """Every byte is a token; <s> is put in front, <e> ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<e>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<e>")
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"
    return made


TOKENIZER = byte_tokenizer()
BACKEND = TOKENIZER.backend_tokenizer


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_up_to_the_first_stop(text, stops):
    stream = Detokenizer(BACKEND, stops)
    pieces = []
    for token in ids_of(text):
        pieces.append(stream.feed(token))
        if stream.stopped is not None:
            break
    pieces.append(stream.flush())
    joined = "".join(pieces)
    if stream.stopped is None:
        assert joined == text and not any(s in text for s in stops)
    else:
        # The character that completes a stop decides; of stops completed by it the leftmost counts.
        assert stream.stopped in stops and text.startswith(joined + stream.stopped)
        assert not any(s in joined for s in stops)


@given(st.text(min_size=1, max_size=12))
def test_no_piece_holds_half_a_character(text):
    stream = Detokenizer(BACKEND)
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in map(stream.feed, ids_of(text)))


def test_half_a_character_at_the_end_is_dropped():
    stream = Detokenizer(BACKEND)
    tokens = ids_of("a漢")
    assert [stream.feed(t) for t in tokens[:-1]] == ["a", "", ""] and stream.flush() == ""


def test_text_that_may_become_a_stop_is_held_back():
    stream = Detokenizer(BACKEND, ["END"])
    said = [stream.feed(t) for t in ids_of("xENyEN")]
    assert said == ["x", "", "", "ENy", "", ""] and stream.flush() == "EN"


def test_one_bos_at_most():
    assert encode_prompt(TOKENIZER, "hi") == [256, *ids_of("hi")]
    assert encode_prompt(TOKENIZER, "<s>hi") == [256, *ids_of("hi")]
    chat = encode_chat(TOKENIZER, [{"role": "user", "content": "hi"}])
    assert chat == [256, *ids_of("user:hi\nassistant:")]


def test_bad_text_is_an_error_that_says_so():
    with pytest.raises(KaruiError, match="character 2 is a lone surrogate"):
        encode_prompt(TOKENIZER, "ab\ud800")
    with pytest.raises(KaruiError, match="the conversation is not valid UTF-8: character 8 is a lone surrogate"):
        encode_chat(TOKENIZER, [{"role": "user", "content": "\ud800"}])
    with pytest.raises(KaruiError, match="refused the messages"):
        encode_chat(TOKENIZER, [3])
    plain = byte_tokenizer()
    plain.chat_template = None
    with pytest.raises(KaruiError, match="no chat template"):
        encode_chat(plain, [{"role": "user", "content": "hi"}])


def test_the_engine_stops_at_a_text_and_streams_the_rest():
    model, config, weights = tiny("llama", vocab_size=258)
    engine = Engine(TorchRunner(config, weights), TOKENIZER, memory="8MB", block_size=4)
    tokens = engine.generate(["some text"], SamplingParams(max_tokens=40))[0].token_ids
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    stop = next(whole[i:i + 2] for i in range(5, len(whole)) if "\ufffd" not in whole[i:i + 2])
    at = whole.index(stop)
    deltas = list(engine.stream(Request(prompt="some text", params=SamplingParams(max_tokens=40, stop=stop))))
    text = "".join(d.text for d in deltas)
    assert text == whole[:at] and deltas[-1].finish_reason == "stop"
    out = engine.generate(["some text"], SamplingParams(max_tokens=40, stop=(stop,)))[0].completions[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (text, "stop", stop)
    assert out.token_ids == tokens[:len(out.token_ids)] and len(out.token_ids) < 40
    engine.check_integrity()


def test_bytes_of_tokens_join_to_the_text_where_characters_are_split():
    ids = ids_of("na\u00efve \U0001f984")
    assert b"".join(token_bytes(BACKEND, t) for t in ids).decode() == "na\u00efve \U0001f984"
    assert [token_text(BACKEND, t) for t in ids[:3]] == ["n", "a", "\ufffd"]
    assert sorted(BYTE_ALPHABET) == sorted(c for c in TOKENIZER.get_vocab() if len(c) == 1) and sorted(BYTE_ALPHABET.values()) == list(range(256))


def test_tokens_of_a_sentencepiece_vocabulary_keep_their_space_and_their_bytes():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<unk>": 0, "\u2581of": 1, "of": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert [token_text(backend, t) for t in (1, 2, 3 + 65)] == [" of", "of", "A"]
    assert [token_bytes(backend, t) for t in (1, 3 + 65, 3 + 0xE6)] == [b" of", b"A", b"\xe6"]
