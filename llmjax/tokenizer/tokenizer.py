"""Text to token ids and back, and conversations to text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import tokenizers

from ..checks import shown
from ..errors import ChatTemplateError, InvalidRequestError
from .chat import ChatTemplate
from .detokenizer import TextStream
from .marks import Marks
from .pieces import Pieces

INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""What stands before the text, before what follows the gap, and where the gap is filled."""
_BEFORE = "\x02"
"""A character that no token begins with and goes on behind."""


class Tokenizer:
    """A vocabulary with its special tokens and chat templates. Safe to share by threads.

    Args:
        backend: splits text; its own special-token template, padding and truncation
            are not used.
        prefix, suffix: ids that a text begins and ends with (BOS; EOS where the model
            wants one).
        chat_templates: Jinja source by name; "default", and "tool_use" where the model
            has another one for requests with tools.
        template_variables: what templates see beside the messages (`bos_token`, ...).

    Attributes:
        vocab_size: one above the highest id.
        eos_token_ids: every id that ends a generation.
        special_ids: ids that `skip_special_tokens` leaves out.
        pieces: bytes of each token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        template_variables: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(), *(i + 1 for i in added)])
        self.pieces = Pieces(backend)
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._variables = dict(template_variables or {})
        self._templates = {
            name: ChatTemplate(source, self._variables)
            for name, source in (chat_templates or {}).items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Processes hand it on: what it was made of is enough."""
        options: dict[str, Any] = {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": self.eos_token_ids,
            "prefix": self._prefix,
            "suffix": self._suffix,
            "chat_templates": {name: one.source for name, one in self._templates.items()},
            "template_variables": self._variables,
        }
        return partial(type(self), **options), (self.backend,)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by their texts."""
        return {self.token_text(i): i for i in self.special_ids}

    @property
    def tool_template(self) -> str | None:
        """Jinja source of the template that is used where there are tools."""
        template = self._templates.get("tool_use") or self._templates.get("default")
        return template.source if template else None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default template; assigning one replaces all of the model's."""
        template = self._templates.get("default")
        return template.source if template else None

    @chat_template.setter
    def chat_template(self, source: str) -> None:
        self._templates = {"default": ChatTemplate(source, self._variables)}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja source of all templates, by name."""
        return {name: template.source for name, template in self._templates.items()}

    @property
    def template_variables(self) -> dict[str, str]:
        """What templates see beside the messages."""
        return dict(self._variables)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        With `add_special_tokens` the ids begin with BOS (and end with EOS) where the model
        wants it, once: a text that already begins with it gets no second.

        Raises:
            InvalidRequestError: it is no text, or holds half a surrogate pair.
        """
        ids = self._encode(text)
        return self._begin(ids) + self._suffix if add_special_tokens else ids

    def encode_within(self, text: str) -> list[int]:
        """Token ids of a text as it stands in another: special tokens are text like any other, and
        nothing is put before it, as some tokenizers put a space before all text.

        A text that the tokenizer changes, as to small letters, is spelled byte by byte.
        """
        spelled = text.encode()
        ids = self._encode_plain(text)
        if self._spelled(ids) == spelled:
            return ids
        ids, start, length = self._encode_plain(_BEFORE + text), 0, 0
        for start in range(len(ids) - 1, -1, -1):
            length += len(self.token_bytes(ids[start]))
            if length >= len(spelled):
                break
        if self._spelled(ids[start:]) == spelled:
            return ids[start:]
        return [self._byte_ids[byte] for byte in spelled]

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._marks.encode(self._marks.put(text))
        return self._encode(text) if ids is None else ids

    def _spelled(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        """Tokens of a byte each."""
        pieces = ((i, self.token_bytes(i)) for i in range(self.vocab_size - 1, -1, -1))
        return {piece[0]: i for i, piece in pieces if len(piece) == 1}

    def _encode(self, text: str) -> list[int]:
        return self._encoding(text).ids

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self.backend.encode(text, add_special_tokens=False)
        except TypeError as error:
            if not isinstance(text, str):
                raise InvalidRequestError(f"text is {shown(text)}, allowed: a string") from error
            half = re.search("[\ud800-\udfff]", text)
            if half is None:
                raise
            raise InvalidRequestError(
                f"the text holds half a surrogate pair (U+{ord(half[0]):04X} at {half.start()}), "
                "which is no character"
            ) from error

    def _begin(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        stream = TextStream(self.pieces, self.special_ids if skip_special_tokens else frozenset())
        return "".join(map(stream.push, ids)) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds within a text; empty where there is no such token."""
        return self.pieces(token_id) or b""

    def token_text(self, token_id: int) -> str:
        """The token for a reader, alone; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def _marks(self) -> Marks:
        return Marks(self.backend)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The conversation as the model was trained to read it; arguments as of `encode_chat`.

        Raises:
            InvalidRequestError: the arguments make no conversation.
            ChatTemplateError: there is no template, or it refused (its own words) or failed.
        """
        return self._marks.remove(self._render(messages, **kwargs))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        split_special_tokens: bool = True,
        **kwargs: Any,
    ) -> str:
        """With marks where what people say has special tokens."""
        if chat_template is not None:
            template = ChatTemplate(chat_template, self._variables)
        else:
            template = self._template(tools)
        marks = self._marks
        try:
            return template.render(
                messages,
                marks.put if split_special_tokens else None,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except ChatTemplateError as error:
            raise ChatTemplateError(marks.remove(str(error)), param=error.param) from error

    def _template(self, tools: object) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            others = ", ".join(sorted(self._templates))
            raise ChatTemplateError(
                "the model has no default chat template, only " + others
                if others
                else "the model has no chat template; give one, or send a text prompt",
                param="messages",
            )
        return self._templates[name]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation as the model was trained to read it; one BOS, whoever writes
        it.

        Args:
            add_special_tokens: what texts end with is put behind the template's, too.
            kwargs: any other variables that the template reads, and

                tools: JSON schemas of functions, for templates that know them.
                documents: objects with a title and text, for templates that know them.
                add_generation_prompt: end with what opens the assistant's answer (True).
                continue_final_message: end within the last message, for the model to go on;
                    excludes `add_generation_prompt` (False).
                chat_template: Jinja source to take instead of the model's own.
                split_special_tokens: special tokens that are written in messages, tools and
                    documents are text as any other (True); else they are what they say.

        Raises:
            InvalidRequestError: the arguments make no conversation.
            ChatTemplateError: there is no template, or it refused (its own words) or failed.
        """
        text = self._render(messages, **kwargs)
        marked = self._marks.encode(text)
        ids = self._begin(self._encode(text) if marked is None else marked)
        return ids + self._suffix if add_special_tokens else ids

    @property
    def prefix(self) -> list[int]:
        """Ids that a text begins with."""
        return list(self._prefix)

    @property
    def suffix(self) -> list[int]:
        """Ids that a text ends with."""
        return list(self._suffix)

    def encode_pair(self, a: str, b: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """Token ids of two texts with the model's special tokens, and which text each is of.

        Args:
            most: tokens that stay, special ones included; the longer text loses its end first.

        Raises:
            InvalidRequestError: see `encode`.
        """
        one, other = self._encoding(a), self._encoding(b)
        room = None if most is None else most - self.num_special_of_pair
        if room is not None and len(one.ids) + len(other.ids) > room:
            # As `tokenizers` shares it out by "longest first".
            short = min(len(one.ids), len(other.ids))
            kept_short = min(short, room // 2)
            kept = kept_short, room - kept_short
            kept_one, kept_other = kept[::-1] if len(one.ids) > len(other.ids) else kept
            one.truncate(kept_one)
            other.truncate(kept_other)
        pair = self.backend.post_process(one, other, True)
        return pair.ids, pair.type_ids

    @property
    def num_special_of_pair(self) -> int:
        """Special tokens that `encode_pair` adds."""
        return self.backend.num_special_tokens_to_add(is_pair=True)

    def encode_infill(self, prefix: str, suffix: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text with a gap, for the model to fill.

        With `add_special_tokens` they begin with BOS where the model wants it.

        Raises:
            InvalidRequestError: the model has no tokens for that.
        """
        for names in INFILL_TOKENS:
            ids = [i for name in names if (i := self.backend.token_to_id(name)) is not None]
            if len(ids) == len(names):
                before, after, middle = ids
                text = [before, *self._encode(prefix), after, *self._encode(suffix), middle]
                return self._begin(text) if add_special_tokens else text
        raise InvalidRequestError(
            "suffix: the model has no fill-in-the-middle tokens; leave it out", param="suffix"
        )
