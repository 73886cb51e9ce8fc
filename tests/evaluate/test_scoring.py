"""Reference and behavioural: losses against transformers and by hand, the protocol, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.inference.evaluate.scoring import encode_completions, engine_scorer, held_out_loss, model_scorer, perplexity
from karui.inference.evaluate.tasks import final_number, gsm8k, read_questions
from tests.evaluate.tiny import engine, tokenizer
from tests.speculative.conftest import tiny_config, tiny_weights

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 6


def reference_model() -> torch.nn.Module:
    """The tiny weights inside transformers' llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = tiny_config(258)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=258, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_context, tie_word_embeddings=True,
        rope_parameters={"rope_theta": c.rope_theta, "rope_type": "default"})).eval()
    missing = model.load_state_dict(tiny_weights(c), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    return model


@pytest.mark.parametrize("windows", [None, 2])
def test_perplexity_equals_transformers_by_hand(windows: int | None) -> None:
    model = reference_model()
    ids = tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    losses = []
    for at in list(range(0, len(ids), 64))[:windows]:
        part = torch.tensor([ids[at:at + 64]])
        with torch.no_grad():
            logits = model(part).logits[0, :-1].double()
        losses += torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="none").tolist()
    expected = sum(losses) / len(losses)
    for scorer in (engine_scorer(engine()), model_scorer(model)):
        got = perplexity(scorer, TEXT, tokenizer(), window=64, windows=windows)
        assert got.mean_nll == pytest.approx(expected, abs=2e-5)
        assert got.perplexity == pytest.approx(math.exp(expected), rel=1e-4) and got.tokens == len(losses)
    assert "windows of 64" in got.protocol and f"{got.tokens} tokens" in got.protocol
    assert ("first 2 of" in got.protocol) == (windows == 2)


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    got = perplexity(lambda ids: [-math.log(258)] * (len(ids) - 1), TEXT, tokenizer(), window=100)
    assert got.perplexity == pytest.approx(258) and got.tokens == len(TEXT) - got.windows


def test_a_single_token_left_over_is_not_a_window() -> None:
    seen: list[int] = []

    def scorer(ids: list[int]) -> list[float]:
        seen.append(len(ids))
        return [0.0] * (len(ids) - 1)

    perplexity(scorer, "abcdefg", tokenizer(), window=3)    # type: ignore[arg-type]
    assert seen == [3, 3]


def test_bad_text_and_numbers_are_refused(tmp_path: Path) -> None:
    fine = engine_scorer(engine())
    for text, kwargs, message in [("a", {}, "1 tokens"), ("abc", {"window": 1}, "window"), ("abc", {"windows": 0}, "windows"),
                                  (tmp_path / "none.txt", {}, "does not exist"), (tmp_path, {}, "cannot be read: Is a directory")]:
        with pytest.raises(KaruiError, match=message):
            perplexity(fine, text, tokenizer(), **kwargs)
    (tmp_path / "bad.txt").write_bytes(b"fine \xff not")
    with pytest.raises(KaruiError, match="byte 5"):
        perplexity(fine, tmp_path / "bad.txt", tokenizer())
    with pytest.raises(KaruiError, match="not finite"):
        perplexity(lambda ids: [float("nan")] * (len(ids) - 1), "abc", tokenizer())


def test_held_out_loss_counts_supervised_tokens_only() -> None:
    scorer = engine_scorer(engine())
    a, b = [5, 6, 7, 8, 9], [9, 8, 7]
    sa, sb = scorer(a), scorer(b)
    got = held_out_loss(scorer, [(a, [0, 0, 1, 0, 1]), (b, [1, 1, 1]), (b, [1, 0, 0]), (a * 20, [1] * 100)], max_tokens=50)
    assert got.loss == pytest.approx(-(sa[1] + sa[3] + sb[0] + sb[1]) / 4)
    assert (got.tokens, got.samples, got.left_out) == (4, 2, 2)
    with pytest.raises(KaruiError, match="none of the 1"):
        held_out_loss(scorer, [(a, [1, 0, 0, 0, 0])])
    with pytest.raises(KaruiError, match="mask of 2"):
        held_out_loss(scorer, [(a, [1, 1])])


def test_completion_rows_supervise_the_completion_and_the_end() -> None:
    t = tokenizer()
    ((ids, mask),) = encode_completions([{"prompt": "2+2?", "completion": "4"}], t)
    assert t.decode(ids) == "<user>2+2?\n<assistant>4</s>"
    assert t.decode([i for i, m in zip(ids, mask) if m]) == "4</s>"
    ((ids, _),) = encode_completions([{"prompt": "2+2?", "completion": "4"}], tokenizer(chat=False))
    assert t.decode(ids) == "2+2?4</s>"
    with pytest.raises(KaruiError, match=r"row 0.*\['question'\]"):
        encode_completions([{"question": "?"}], t)


@pytest.mark.parametrize(("answer", "number"), [
    ("so it is\n#### 1,234", "1234"), ("#### -5.50 dollars", "-5.5"), ("no mark 7", None), ("#### none", None),
    ("#### 3\n#### 4", "4"), ("#### 10", "10"), ("#### 2.0", "2"), ("#### 4\nQuestion: 9", "4")])
def test_final_number(answer: str, number: str | None) -> None:
    assert final_number(answer) == number


def test_gsm8k_asks_and_compares(tmp_path: Path) -> None:
    rows = [{"question": "one?", "answer": "a\n#### 1"}, {"question": "two?", "answer": "#### 2"},
            {"question": "three?", "answer": "#### 3"}]
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    assert read_questions(file) == rows and len(read_questions(file, 2)) == 2

    def generate(prompts: list[str], limit: int) -> list[str]:
        assert limit == 9 and prompts[0] == "Question: one?\nAnswer: a\n#### 1\n\nQuestion: two?\nAnswer:"
        return [" so\n#### 2\nQuestion: x #### 5", " no idea"]

    got = gsm8k(generate, rows[1:], shots=rows[:1], max_tokens=9)
    assert (got.correct, got.answered, got.total, got.accuracy) == (1, 1, 2, 0.5) and "1 shots" in got.protocol
    file.write_text('{"question": "x"}')
    with pytest.raises(KaruiError, match="line 1"):
        read_questions(file)
    file.write_text("")
    with pytest.raises(KaruiError, match="no questions"):
        read_questions(file)
