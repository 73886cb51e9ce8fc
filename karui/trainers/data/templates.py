"""Conversations to text, and which characters of it carry loss.

The supervised span of an assistant turn is what the model itself has to write: everything that the template puts after the
generation prompt up to the next message, so content, tool calls, the end-of-turn token, and in ChatML the newline behind it.
A template with `{% generation %}` tags says so itself; for the others the span is found by rendering prefixes of the
conversation, which is exact whenever every prefix's text is a prefix of the whole text, and refused when it is not.
No mask is ever made by comparing tokens with the padding token, so `pad == eos` still trains the model to stop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from karui.configs.errors import KaruiError, UnsupportedError
from karui.trainers.data.formats import Example

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A document as text. `spans`: supervised character ranges, in order, not touching."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """The chat template of one tokenizer.

    Attributes:
        tagged: it has `{% generation %}` tags, whose ranges are taken as they are.
        open_turns: turns rendered so far whose tagged range leaves out the special token that follows, so that the model
            would not learn to end them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self.open_turns = 0
        specials = {*tokenizer.all_special_tokens, *map(str, tokenizer.get_added_vocab())}
        self._specials = tuple(sorted(t for t in specials if t))

    @staticmethod
    def exists(tokenizer: Any) -> bool:
        return bool(getattr(tokenizer, "chat_template", None))

    def tagged(self, tools: Any) -> bool:
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self._source(tools)) is not None

    def render(self, example: Example, train_on: str) -> Rendered:
        """Text and supervised spans of a conversation.

        Raises:
            KaruiError: the template refuses the conversation, or its prefixes do not nest.
            UnsupportedError: the template leaves out the tools or tool calls of the conversation.
        """
        assert example.messages is not None
        messages, tools = list(example.messages), list(example.tools) if example.tools else None
        trained = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= example.trained_from]
        if train_on == "all":
            text = self._text(messages, tools, example.place)
            spans: list[Span] = [(0, len(text))]
        elif self.tagged(tools):
            text, spans = self._tagged(messages, tools, example)
        else:
            text = self._text(messages, tools, example.place)
            spans = [self._turn(messages, tools, i, text, example.place) for i in trained]
        self._check_tools(messages, tools, example.place)
        return Rendered(text, tuple(_joined(spans)))

    def _turn(self, messages: list[dict[str, Any]], tools: Any, turn: int, text: str, place: str) -> Span:
        """The range of one assistant turn: after the generation prompt of the turns before it, to the end of its own."""
        last = turn == len(messages) - 1
        through = text if last else self._text(messages[: turn + 1], tools, place)
        if turn == 0:
            prompt = self._generation_prompt(tools, place)
            start = through.find(prompt) + len(prompt) if prompt in through else -1
        else:
            opening = self._text(messages[:turn], tools, place, add_generation_prompt=True)
            start = len(opening) if through.startswith(opening) else -1
        if start < 0 or not text.startswith(through) or start >= len(through):
            what = "what it writes for a turn changes with the messages that follow" if start >= 0 else (
                "what it writes for the turn does not begin with its own generation prompt")
            raise KaruiError(
                f"{place}: the chat template of {self.name} has no {{% generation %}} tags, and {what} (message {turn}), so the "
                "assistant's tokens cannot be told from the rest. Use a template with those tags (a chat_template.jinja in the "
                "model's folder), rows with one assistant turn at the end, or data.train_on: all.")
        return start, len(through)

    def _tagged(self, messages: list[dict[str, Any]], tools: Any, example: Example) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, found = cast(Any, render_jinja_template)(  # what apply_chat_template(return_assistant_tokens_mask=True) calls
                conversations=[messages], tools=tools, chat_template=self._source(tools), return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map)
        except Exception as error:
            raise self._refused(error, example.place) from error
        text, spans = texts[0], [(int(a), int(b)) for a, b in found[0]]
        untrained = sum(m["role"] == "assistant" for m in messages[: example.trained_from])
        if untrained:
            turns = sum(m["role"] == "assistant" for m in messages)
            if turns != len(spans):
                raise KaruiError(f"{example.place}: the chat template of {self.name} marks {len(spans)} ranges for {turns} "
                                 "assistant turns, so the prompt's turns cannot be told from the completion's.")
            spans = spans[untrained:]
        self.open_turns += sum(text.startswith(self._specials, end) and not text.endswith(self._specials, 0, end)
                               for _, end in spans)
        return text, spans

    def _generation_prompt(self, tools: Any, place: str) -> str:
        user = [{"role": "user", "content": "x"}]
        return self._text(user, tools, place, add_generation_prompt=True)[len(self._text(user, tools, place)):]

    def _check_tools(self, messages: list[dict[str, Any]], tools: Any, place: str) -> None:
        """Every tool and call is in the text: under names that no content can hold, as "search" is in many a question."""
        names: list[tuple[str, str]] = []

        def renamed(what: str, function: dict[str, Any]) -> dict[str, Any]:
            names.append((what, str(function.get("name", ""))))
            return {**function, "name": f"karui_name_{len(names)}_"}

        probe = [{**m, "tool_calls": [{**c, "function": renamed("the call to", c["function"])} for c in m["tool_calls"]]}
                 if m.get("tool_calls") else m for m in messages]
        shown = [{**t, "function": renamed("the tool", t["function"])} if isinstance(t.get("function"), dict)
                 else renamed("the tool", t) for t in tools or ()] or None
        if not names:
            return
        text = self._text(probe, shown, place)
        lost = next((found for i, found in enumerate(names, 1) if f"karui_name_{i}_" not in text), None)
        if lost:
            raise UnsupportedError(f"{place}: the chat template of {self.name} leaves out {lost[0]} {lost[1]!r}: it does not "
                                   "know tools. Use a model whose template does, or write the call into the content.")

    def _text(self, messages: list[dict[str, Any]], tools: Any, place: str, add_generation_prompt: bool = False) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                                          add_generation_prompt=add_generation_prompt))
        except Exception as error:  # jinja's errors, and whatever a template's expressions raise
            raise self._refused(error, place) from error

    def _refused(self, error: Exception, place: str) -> KaruiError:
        return KaruiError(f"{place}: the chat template of {self.name} refuses this conversation: {error}")

    def _source(self, tools: Any) -> str:
        return str(self.tokenizer.get_chat_template(None, tools))


def _joined(spans: list[Span]) -> list[Span]:
    """Spans in order, empty ones left out, touching ones made one (two assistant turns in a row)."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > start:
            out.append((start, end))
    return out
