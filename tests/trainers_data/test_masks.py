"""Assistant masks against brute force: the supervised tokens, decoded, are what the template writes for the assistant's turns.

The expected text of a turn is written down here per template, not taken from the code under test.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import DataSection
from karui.trainers.data import load_samples
from karui.trainers.data.formats import Example
from karui.trainers.data.masks import Encoder, encode_masked
from karui.trainers.data.templates import ChatTemplate

TURN = {
    "chatml": lambda c: c + "<|im_end|>\n",
    "llama3": lambda c: c.strip() + "<|eot_id|>",
    "tagged": lambda c: c + "<|im_end|>",
    "plain": lambda c: c + "\n",
}
pieces = st.sampled_from([*"abc xyz  \n\n-:42", "the ", "hello ", "日", "🙂", "ü"])
contents = st.lists(pieces, min_size=1, max_size=14).map("".join).filter(str.strip)


@st.composite
def chats(draw):
    """An optional system message, then user and assistant turns in any order, at least one assistant turn after the first."""
    turns = draw(st.lists(st.sampled_from(["user", "user", "assistant"]), min_size=1, max_size=5))
    roles = [*draw(st.sampled_from([[], ["system"]])), "user", *turns, "assistant", *draw(st.sampled_from([[], ["user"]]))]
    return [{"role": r, "content": draw(contents)} for r in roles]


def masked(tokenizer, messages, train_on="assistant", **more):
    template = ChatTemplate(tokenizer)
    rendered = template.render(Example(place="here", row=0, messages=tuple(messages), **more), train_on)
    return rendered, encode_masked(Encoder(tokenizer), [rendered])[0]


def runs(tokens):
    """Maximal runs of supervised ids."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.mask.astype(int), [0]])))
    return [tokens.ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2])]


def decode(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", TURN)
@given(messages=chats())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_supervised_tokens_decode_to_the_assistant_turns(name, messages, tokenizers_by_name):
    tokenizer = tokenizers_by_name[name]
    rendered, tokens = masked(tokenizer, messages)
    assert decode(tokenizer, tokens.ids) == rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
    said = [TURN[name](m["content"]) for m in messages if m["role"] == "assistant"]
    assert "".join(decode(tokenizer, run) for run in runs(tokens)) == "".join(said)
    hushed = tokens.ids[~tokens.mask].tolist()
    assert len(hushed) + int(tokens.mask.sum()) == len(tokens.ids)


@pytest.mark.parametrize("name", TURN)
@given(messages=chats())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompt_is_tokenized_as_at_inference(name, messages, tokenizers_by_name):
    """What stands before the first answer is, id by id, what the generation prompt encodes to on its own."""
    tokenizer = tokenizers_by_name[name]
    _, tokens = masked(tokenizer, messages)
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    prompt = tokenizer.apply_chat_template(messages[:first], add_generation_prompt=True, return_dict=False)
    assert tokens.ids[: int(np.argmax(tokens.mask))].tolist() == list(prompt)


@given(messages=chats())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_generation_tags_agree_with_transformers(messages, tokenizers_by_name):
    """transformers masks by offsets on the whole text, so it is compared where no token lies across a border."""
    tokenizer = tokenizers_by_name["tagged"]
    _, tokens = masked(tokenizer, messages)
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    if not tokens.merged:
        assert tokens.ids.tolist() == list(theirs["input_ids"])
        assert tokens.mask.astype(int).tolist() == list(theirs["assistant_masks"])


def test_a_merge_across_the_border_is_cut(tokenizers_by_name):
    """The newline of the generation prompt and those of the answer would be one token that the model can never be asked for."""
    tokenizer = tokenizers_by_name["chatml"]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\n\n42"}]
    rendered, tokens = masked(tokenizer, messages)
    whole = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert tokens.ids.tolist() != whole and tokens.merged == 1, "this corpus no longer makes the merge the test is about"
    assert decode(tokenizer, runs(tokens)[0]) == "\n\n42<|im_end|>\n"


def test_tokenizers_that_prefix_a_space_keep_the_whole_text():
    """A sentencepiece-like tokenizer cannot encode pieces: the mask is found on the whole text's tokens."""
    from tests.trainers_data.conftest import PLAIN, metaspace_tokenizer

    tokenizer = metaspace_tokenizer(PLAIN)
    messages = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "hello there"},
                {"role": "user", "content": "more"}, {"role": "assistant", "content": "42 foxes"}]
    rendered, tokens = masked(tokenizer, messages)
    assert tokens.ids.tolist() == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert [decode(tokenizer, r).strip() for r in runs(tokens)] == ["hello there", "42 foxes"] and tokens.merged == 0


@pytest.mark.parametrize("name", ["chatml", "llama3", "tagged"])
def test_stop_token_is_trained_though_pad_equals_eos(name, tokenizers_by_name):
    tokenizer = tokenizers_by_name[name]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    _, tokens = masked(tokenizer, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}] * 2)
    assert [run.count(tokenizer.eos_token_id) for run in runs(tokens)] == [1, 1]


def test_no_double_bos(tokenizers_by_name, write):
    """The template writes BOS and the tokenizer would add one; raw text and plain pairs get exactly one, too."""
    llama3, plain = tokenizers_by_name["llama3"], tokenizers_by_name["none_bos"]
    bos = llama3.bos_token_id
    _, tokens = masked(llama3, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    assert tokens.ids.tolist().count(bos) == 1 and tokens.ids[0] == bos and not tokens.mask[0]
    path = write("t.jsonl", [{"text": "hello there"}, {"text": "<|begin_of_text|>hello there"}])
    ids = [s.ids.tolist() for s in load_samples(DataSection(train=path), plain, "train")]
    assert ids[0] == ids[1] and ids[0].count(bos) == 1 and ids[0][0] == bos
    pairs = write("p.jsonl", [{"prompt": p + "6 * 7?", "completion": " 42"} for p in ("", "<|begin_of_text|>")])
    pair = load_samples(DataSection(train=pairs), plain, "train")
    assert pair[0].ids.tolist() == pair[1].ids.tolist() and pair[0].ids.tolist().count(bos) == 1
    assert [decode(plain, s.ids[s.loss_mask]) for s in pair] == [" 42<|im_end|>"] * 2


def test_tokens_are_the_tokenizers_own_whatever_its_file_asks_for(tokenizers_by_name):
    texts = ["", "the sum of two numbers", "a <|im_end|> b\n\n  c", "déjà vu \u4f60\u597d"]
    for tokenizer in tokenizers_by_name.values():
        wanted = tokenizer(texts, add_special_tokens=False)["input_ids"]
        tokenizer.backend_tokenizer.enable_truncation(3)
        tokenizer.backend_tokenizer.enable_padding()
        assert Encoder(tokenizer)(texts) == wanted


def test_prompt_turns_carry_no_loss(tokenizers_by_name):
    """A conversation as prompt: its assistant turns are context, only the completion's are trained."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
                {"role": "user", "content": "more"}, {"role": "assistant", "content": "there"}]
    for name in TURN:
        tokenizer = tokenizers_by_name[name]
        _, tokens = masked(tokenizer, messages, trained_from=3)
        assert [decode(tokenizer, r) for r in runs(tokens)] == [TURN[name]("there")], name


def test_train_on_all(tokenizers_by_name):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    _, tokens = masked(tokenizers_by_name["chatml"], messages, "all")
    assert tokens.mask[1:].all() and not tokens.mask[0]


def test_conversation_that_opens_with_the_assistant(tokenizers_by_name):
    tokenizer = tokenizers_by_name["chatml"]
    _, tokens = masked(tokenizer, [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}])
    assert [decode(tokenizer, r) for r in runs(tokens)] == ["hello<|im_end|>\n"]


def test_tool_calls_are_supervised(tokenizers_by_name):
    tokenizer = tokenizers_by_name["tools"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = ({"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}},)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    _, tokens = masked(tokenizer, messages, tools=tools)
    said = [decode(tokenizer, r) for r in runs(tokens)]
    assert said == ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n', "It is 2.<|im_end|>\n"]


def test_a_template_that_leaves_out_tools_is_refused(tokenizers_by_name):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    user = {"role": "user", "content": "1+1"}
    with pytest.raises(UnsupportedError, match="leaves out the call to 'add'"):
        masked(tokenizers_by_name["chatml"], [user, {"role": "assistant", "content": "", "tool_calls": [call]}])
    asked = {"role": "user", "content": "Please add 1 and 1"}  # the name stands in the text, the call does not
    with pytest.raises(UnsupportedError, match="leaves out the call to 'add'"):
        masked(tokenizers_by_name["chatml"], [asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(UnsupportedError, match="leaves out the tool 'sub'"):
        masked(tokenizers_by_name["chatml"], [user, {"role": "assistant", "content": "2"}],
               tools=({"type": "function", "function": {"name": "sub"}},))


def test_a_template_whose_prefixes_do_not_nest_is_refused(tokenizers_by_name):
    one = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    tokenizer = tokenizers_by_name["forgetful"]
    _, tokens = masked(tokenizer, one)  # a single turn is fine
    assert [decode(tokenizer, r) for r in runs(tokens)] == ["hello<|im_end|>\n"]
    with pytest.raises(KaruiError, match=r"here: the chat template of .* has no \{% generation %\} tags, and what it writes"):
        masked(tokenizer, one + one)


def test_a_template_that_refuses_is_named(tokenizers_by_name):
    with pytest.raises(KaruiError, match="here: the chat template of .* refuses this conversation: System role not supported"):
        masked(tokenizers_by_name["strict"], [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"},
                                              {"role": "assistant", "content": "hello"}])
