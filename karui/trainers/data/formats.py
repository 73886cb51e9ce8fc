"""From a row's columns to an `Example`: chat, prompt-completion or raw text, checked field by field.

Which one is decided once, by the first row (`format: auto`) or by the recipe; every later row must fit it. Message lists may
be in OpenAI's form (`role`, `content`, `tool_calls`) or ShareGPT's (`from`, `value`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError, nearest
from karui.trainers.data.sources import Row

if TYPE_CHECKING:
    from karui.configs.recipe import DataSection

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row, checked. Exactly one of `messages`, `text`, and `prompt` with `completion` is given.

    Attributes:
        place: where the row is, for errors.
        row: its number.
        messages: the conversation, as chat templates take it.
        tools: JSON schemas of the functions the model may call.
        trained_from: assistant turns before this message carry no loss (the prompt of a prompt-completion pair).
    """

    place: str
    row: int
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    trained_from: int = 0
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class Format:
    """What every row of a source must look like.

    Attributes:
        kind: chat, prompt or text.
        columns: the columns that are read.
        as_messages: prompt only: prompt and completion are lists of messages, not strings.
        templated: strings are rendered with the chat template (prompt as user, completion as assistant).
        why: how it was decided, for the preflight.
    """

    kind: str
    columns: tuple[str, ...]
    as_messages: bool
    templated: bool
    why: str


def decide_format(section: DataSection, first: Row, has_template: bool) -> Format:
    """The format of a source, from the recipe and its first row.

    Raises:
        KaruiError: the columns fit no format, or not the one asked for; names row, columns there and columns expected.
    """
    there = first.fields
    messages = section.messages if section.messages in there or "conversations" not in there else "conversations"
    columns = {"chat": (messages,), "prompt": (section.prompt, section.completion), "text": (section.text,)}
    if section.format == "auto":
        fitting = [kind for kind, names in columns.items() if all(name in there for name in names)]
        if not fitting:
            raise KaruiError(f"{first.place}: columns {_names(there)} fit no format; expected {_names(columns['chat'])} (chat), "
                             f"{_names(columns['prompt'])} (prompt) or {_names(columns['text'])} (text). If they have "
                             "other names, say so, e.g. data.prompt=question data.completion=answer.")
        kind, why = fitting[0], f"columns {', '.join(columns[fitting[0]])}"
        if len(fitting) > 1:
            why += f"; {' and '.join(fitting[1:])} would fit as well, set data.format to choose"
    else:
        kind, why = section.format, "set in the recipe"
        _need(first, columns[kind], kind)
    as_messages = kind == "prompt" and isinstance(there[section.prompt], list)
    if not has_template and (kind == "chat" or as_messages):
        raise KaruiError(f"{first.place}: this is chat data, but the model's tokenizer has no chat template, so there is no way "
                         "to write a conversation as text. Use an instruction-tuned model, put a chat_template.jinja into the "
                         "model's folder, or give prompt and completion as strings.")
    templated = kind == "chat" or (kind == "prompt" and has_template)
    if section.system and not templated:
        raise KaruiError("data.system is set, but this data is not rendered with a chat template "
                         f"({'raw text' if kind == 'text' else 'the tokenizer has none'}); remove data.system.")
    return Format(kind, columns[kind], as_messages, templated, why)


def read_example(row: Row, form: Format, section: DataSection) -> Example | None:
    """Check one row and turn it into an `Example`; None for a row of raw text that is empty.

    Raises:
        KaruiError: a missing field, a content that is not a string, an empty assistant turn, an unknown role, or a row of
            another shape than the first.
    """
    _need(row, form.columns, form.kind)
    fields = row.fields
    if form.kind == "text":
        text = _string(fields[form.columns[0]], row.place, f"column {form.columns[0]!r}")
        return Example(place=row.place, row=row.index, text=text) if text.strip() else None
    if form.kind == "chat":
        messages = _messages(fields[form.columns[0]], row.place, form.columns[0])
        return _conversation(row, _with_system(messages, section.system), 0)
    prompt, completion = (fields[name] for name in form.columns)
    for name, value in zip(form.columns, (prompt, completion)):
        if isinstance(value, (str, list)) and isinstance(value, list) != form.as_messages:
            raise KaruiError(f"{row.place}: mixed schemas: column {name!r} holds {_kind(value)} here, but the first row makes it "
                             f"{'a list of messages' if form.as_messages else 'a string'}; keep each kind in a file of its own.")
    if form.as_messages:
        before = _with_system(_messages(prompt, row.place, form.columns[0]), section.system)
        after = _messages(completion, row.place, form.columns[1])
        if not any(m["role"] == "assistant" for m in after):
            raise KaruiError(f"{row.place}: column {form.columns[1]!r} has no assistant message: nothing to train on.")
        return _conversation(row, before + after, len(before))
    prompt = _string(prompt, row.place, f"column {form.columns[0]!r}")
    completion = _string(completion, row.place, f"column {form.columns[1]!r}")
    if not completion.strip():
        raise KaruiError(f"{row.place}: column {form.columns[1]!r} is empty: nothing to learn; remove or fill the row.")
    if not form.templated:
        return Example(place=row.place, row=row.index, prompt=prompt, completion=completion)
    turns = _with_system([{"role": "user", "content": prompt}], section.system)
    return _conversation(row, [*turns, {"role": "assistant", "content": completion}], len(turns))


def _conversation(row: Row, messages: list[dict[str, Any]], trained_from: int) -> Example:
    tools = row.fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise KaruiError(f"{row.place}: column 'tools' is a string that is not JSON ({error.msg}); "
                             "expected a list of JSON schemas.") from error
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools)):
        raise KaruiError(f"{row.place}: column 'tools' holds {_kind(tools)}; expected a list of JSON schemas.")
    return Example(place=row.place, row=row.index, messages=tuple(messages), trained_from=trained_from,
                   tools=tuple(_without_nulls(t) for t in tools) if tools else None)


def _with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    if system is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _messages(value: Any, place: str, column: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise KaruiError(f"{place}: column {column!r} is a string; expected a list of messages, e.g. "
                             '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].') from error
    if not isinstance(value, list) or not value:
        raise KaruiError(f"{place}: column {column!r} holds {'an empty list' if value == [] else _kind(value)}; "
                         "expected a list of messages.")
    return [_message(item, f"{place}, {column}[{turn}]") for turn, item in enumerate(value)]


def _message(item: Any, place: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise KaruiError(f'{place}: a message is an object {{"role": ..., "content": ...}}, this is {_kind(item)}.')
    message = _without_nulls(item)
    if "role" not in message and "from" in message and ("value" in message or "content" not in message):
        sender = message.pop("from")
        message = {**message, "role": _SHAREGPT.get(sender, sender), "content": message.pop("value", None)}
        message.pop("value", None)
    role = message.get("role")
    if role not in ROLES:
        raise KaruiError(f"{place}: unknown role {role!r}; expected {', '.join(ROLES)}."
                         f"{nearest(role, ROLES) if isinstance(role, str) else ''}")
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = [_tool_call(call, place) for call in _list(calls, place)]
    if message.get("content") is None and calls:
        message["content"] = ""
    content = _string(message.get("content"), place, f"the content of this {role} message")
    if role == "assistant" and not content.strip() and not calls:
        raise KaruiError(f"{place}: empty assistant turn, there is nothing to learn from it; remove the row or the turn.")
    return message


def _list(calls: Any, place: str) -> list[Any]:
    if not isinstance(calls, list):
        raise KaruiError(f"{place}: tool_calls holds {_kind(calls)}; expected a list of calls.")
    return calls


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    """A call with its arguments as an object: templates write them with `tojson`, which would quote a string again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise KaruiError(f'{place}: a tool call is {{"type": "function", "function": {{"name": ..., "arguments": {{...}}}}}}; '
                         f"this one holds {_kind(call)}{' without a name' if isinstance(call, dict) else ''}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise KaruiError(f"{place}: the arguments of the call to {function['name']!r} are not JSON ({error.msg}).") from error
    if not isinstance(arguments, dict):
        raise KaruiError(f"{place}: the arguments of the call to {function['name']!r} are {_kind(arguments)}, not an object.")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    """Parquet and arrow give every struct every key and fill it with null; templates test with `is defined`."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _need(row: Row, columns: tuple[str, ...], kind: str) -> None:
    missing = [name for name in columns if name not in row.fields]
    if missing:
        hint = nearest(missing[0], row.fields)
        raise KaruiError(f"{row.place}: no column {_names(missing)}; there are {_names(row.fields)}, and format {kind} reads "
                         f"{_names(columns)}.{hint} Every row needs them; other names are set with data.messages, data.prompt, "
                         "data.completion and data.text.")


def _string(value: Any, place: str, what: str) -> str:
    if not isinstance(value, str):
        parts = " Lists of content parts belong to multimodal models; join their texts." if isinstance(value, list) else ""
        raise KaruiError(f"{place}: {what} is {_kind(value)}; expected a string.{parts}")
    return value


def _kind(value: Any) -> str:
    return {"NoneType": "null", "str": "a string", "list": "a list", "dict": "an object", "int": "an integer",
            "float": "a number", "bool": "a boolean"}.get(type(value).__name__, type(value).__name__)


def _names(columns: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in columns) or "none"
