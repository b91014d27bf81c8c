"""Chat templates: sandboxed Jinja with the functions that model authors write against.

The dialect is that of Hugging Face's `apply_chat_template` (transformers 5): blocks
trimmed, `break` and `continue`, `raise_exception`, `strftime_now`, a `tojson` that keeps
characters as they are, and `{% generation %}` blocks, which mark text for training only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..checks import shown
from ..errors import ChatTemplateError, InvalidRequestError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def compile_template(source: str) -> jinja2.Template:
    """Raises ChatTemplateError where the source is not Jinja."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error


@lru_cache(64)
def template_variables(source: str) -> frozenset[str]:
    """What a template reads that it does not set itself. Raises ChatTemplateError, as above."""
    compile_template(source)
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


class ChatTemplate:
    """One Jinja template, compiled when first used.

    Args:
        variables: what every rendering sees beside its arguments (`bos_token`, ...).
    """

    def __init__(self, source: str, variables: Mapping[str, str]):
        self.source = source
        self._variables = dict(variables)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return compile_template(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        mark: Callable[[Any], Any] | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **kwargs: Any,
    ) -> str:
        """Text of the conversation.

        Args:
            mark: changes what people say, before the template reads it.

        Raises:
            InvalidRequestError: the arguments make no conversation.
            ChatTemplateError: the template refused (its own words) or failed.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        conversation = _plain(messages)
        if mark is not None:
            conversation, tools, documents = map(mark, (conversation, tools, documents))
        tail = _mark_final(conversation) if continue_final_message else ""
        arguments = {
            **self._variables,
            **kwargs,
            "messages": conversation,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled
        try:
            text = template.render(arguments)
        except _Refusal as error:
            raise ChatTemplateError(str(error), param="messages") from error
        except Exception as error:
            # Any operation in a template can fail, in as many ways as Python's own.
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        return _cut_at_mark(text, tail) if continue_final_message else text


class _Arguments(dict[str, Any]):
    """Of a call. Most templates write them as JSON; DeepSeek's add them to text, as they are."""

    def __radd__(self, text: str) -> str:
        return text + _tojson(self)


def _call(call: Any) -> Any:
    """A call with its arguments as an object; OpenAI's API has them as text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
    if not isinstance(arguments, Mapping):
        return call
    given = {key: value for key, value in call.items() if value is not None}
    return {**given, "function": {**function, "arguments": _Arguments(arguments)}}


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy that may be changed, without the nulls that clients send for absent fields."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise InvalidRequestError(
            f"messages is {shown(messages)}, allowed: a list of one or more objects with a role "
            "and content",
            param="messages",
        )
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    for message in plain:
        if isinstance(calls := message.get("tool_calls"), list | tuple):
            message["tool_calls"] = [_call(call) for call in calls]
    return plain


def _mark_final(conversation: list[dict[str, Any]]) -> str:
    """Append the tag to the last message's text; returns that text."""
    final = conversation[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_TAG
        return content
    listed = content if isinstance(content, list) else []
    parts = [dict(part) if isinstance(part, Mapping) else part for part in listed]
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + _CONTINUE_TAG
            final["content"] = parts
            return text
    raise InvalidRequestError(
        "continue_final_message needs text in the content of the last message", param="messages"
    )


def _cut_at_mark(text: str, tail: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if tag not in text or tail.strip() not in text:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not write out the last message's "
            "content, so there is nothing to continue",
            param="messages",
        )
    head, _, rest = text.rpartition(tag)
    # A template that trims content has trimmed the tag's own space: trim what precedes it too.
    return head if rest.startswith(" ") else head.rstrip()
