"""How the answer to a chat request is made and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError
from ..output import RequestOutput
from ..request import SamplingParams
from ..structured_outputs import Reasoning, StructuredOutputs
from .answer import AnswerParser
from .calls import CallParser
from .channels import Channels
from .grammar import calls_grammar, strict_grammar
from .reasoning import REASONING, Tags, detect_reasoning
from .syntaxes import PLAIN_JSON, SYNTAXES, Syntax, detect_syntax
from .tools import ToolUse

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

_PROMPT_END = 16
"""Tokens of a prompt in which a template opens the reasoning."""


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes calls and reasoning; None where that is not known."""

    syntax: Syntax | None
    tags: Tags | Channels | None

    @staticmethod
    @lru_cache(64)
    def of(
        tool_call_parser: str | None, reasoning_parser: str | None, template: str | None
    ) -> ChatFormat:
        """The parsers of these names; "auto" goes by the text of the chat template."""
        text = template or ""
        syntax: Syntax | None = None
        tags: Tags | Channels | None = None
        if tool_call_parser == "auto":
            syntax = detect_syntax(text)
        elif tool_call_parser is not None:
            syntax = SYNTAXES[tool_call_parser]
        if reasoning_parser == "auto":
            tags = detect_reasoning(text)
        elif reasoning_parser is not None:
            tags = REASONING[reasoning_parser]
        if syntax is SYNTAXES["gpt_oss"]:
            tags = REASONING["gpt_oss"]  # It knows calls by their channel.
        return ChatFormat(syntax, tags)


@dataclass(frozen=True)
class AnswerPlan:
    """How one request's answers are read.

    Attributes:
        use: the tools, read by `syntax`.
        reasoning: what the answers begin with, or may, written with `tags`.
        reasoning_end_id: the token that ends it, where it is one token.
    """

    syntax: Syntax | None = None
    use: ToolUse | None = None
    tags: Tags | Channels | None = None
    reasoning: Reasoning | None = None
    reasoning_end_id: int | None = None

    def parser(self) -> AnswerParser:
        """Of one answer."""
        calls = reasoning = None
        if self.use is not None and self.syntax is not None:
            names = {tool.name for tool in self.use.tools}
            calls = CallParser(self.syntax, names, None if self.use.parallel else 1)
        if self.tags is not None and self.reasoning is not None:
            reasoning = self.tags.parser(self.reasoning)
        return AnswerParser(reasoning, calls, self.reasoning_end_id)

    def reader(self) -> Callable[[RequestOutput], RequestOutput]:
        """Takes the outputs of a request, whole or as they come, and fills in their messages."""
        parsers: defaultdict[int, AnswerParser] = defaultdict(self.parser)

        def read(output: RequestOutput) -> RequestOutput:
            for choice in output.outputs:
                parsers[choice.index].read(choice)
            return output

        return read


def plan_answer(
    form: ChatFormat,
    use: ToolUse | None,
    params: SamplingParams,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    begun: str | None = None,
) -> tuple[SamplingParams, AnswerPlan]:
    """Binds `params` to what a request asks for, and says how the answers are read.

    Args:
        begun: what there is of the answer in the prompt, where that is to be continued.

    Raises:
        InvalidRequestError: names the field that cannot be had.
    """
    special = tokenizer.special_tokens
    reasoning = _reasoning(form, tokenizer, prompt_ids, begun)
    plan = AnswerPlan(*_bound_syntax(form, use), form.tags, reasoning)
    wanted = params.structured_outputs
    if plan.use is not None and plan.syntax is not None:
        wanted = _bound(plan.syntax, plan.use, params.structured_outputs, special)
    params = _bound_thinking(form, params, reasoning, tokenizer, begun)
    texts = list(plan.syntax.special) if plan.syntax is not None else []
    if form.tags is not None and reasoning is not None:
        texts += form.tags.special
        end = tokenizer.encode(reasoning.end, add_special_tokens=False)
        plan = replace(plan, reasoning_end_id=end[0] if len(end) == 1 else None)
        if wanted is not None:
            _check_can_be_bound(form.tags, wanted)
            wanted = replace(wanted, after=reasoning)
    kept = (*params.kept_special_ids, *(special[text] for text in texts if text in special))
    return replace(params, structured_outputs=wanted, kept_special_ids=kept), plan


def _bound_syntax(form: ChatFormat, use: ToolUse | None) -> tuple[Syntax | None, ToolUse | None]:
    if use is None:
        return None, None
    if use.is_forced:
        has_frame = form.syntax is not None and form.syntax.frame is not None
        return form.syntax if has_frame else PLAIN_JSON, use
    if form.syntax is None:
        raise InvalidRequestError(
            "tool_choice is auto, allowed where it is known how the model writes calls: name that "
            f"by --tool-call-parser ({', '.join(SYNTAXES)}), or send none, required or one "
            "function's name",
            param="tool_choice",
        )
    return form.syntax, use


def _bound(
    syntax: Syntax, use: ToolUse, wanted: StructuredOutputs | None, special: dict[str, int]
) -> StructuredOutputs | None:
    """What answers must be, where content must be what is `wanted`.

    Answers that must be calls have no content.
    """
    frame = syntax.frame
    if use.is_forced:
        assert frame is not None
        return calls_grammar(frame, use, special)
    if wanted is not None:
        if frame is None:
            raise InvalidRequestError(
                f"{wanted.label} and tools exclude each other, as there is no grammar of how the "
                "model writes calls; send tool_choice none, required or a function's name",
                param=wanted.label.split(".")[0],
            )
        return replace(wanted, or_calls=calls_grammar(frame, use, special).grammar)
    if frame is not None and syntax.tagged and any(tool.strict for tool in use.tools):
        return strict_grammar(frame, syntax.markers[0], use, special)
    return None


def _check_can_be_bound(tags: Tags | Channels, wanted: StructuredOutputs) -> None:
    if not tags.can_precede_grammar:
        raise InvalidRequestError(
            f"{wanted.label} and the reasoning parser gpt_oss exclude each other: channels have "
            "no grammar yet",
            param=wanted.label.split(".")[0],
        )


def _bound_thinking(
    form: ChatFormat,
    params: SamplingParams,
    reasoning: Reasoning | None,
    tokenizer: Tokenizer,
    begun: str | None,
) -> SamplingParams:
    """`params` that say what the budget is of; none where the prompt has ended the reasoning."""
    budget = params.thinking_token_budget
    if budget is None:
        return params
    if not isinstance(form.tags, Tags):
        raise InvalidRequestError(
            f"thinking_token_budget is {budget}, allowed where a model's reasoning stands between "
            "two tags; name how it writes it by --reasoning-parser "
            f"({', '.join(name for name, tags in REASONING.items() if isinstance(tags, Tags))})",
            param="thinking_token_budget",
        )
    if reasoning is None:
        return replace(params, thinking_token_budget=None)
    thought = (begun or "").partition(reasoning.begin)[2]
    spent = len(tokenizer.encode(thought, add_special_tokens=False))
    return replace(params, thinking_token_budget=max(0, budget - spent), reasoning=reasoning)


def _reasoning(
    form: ChatFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int], begun: str | None
) -> Reasoning | None:
    if form.tags is None:
        return None
    if begun is None:
        ids = prompt_ids[-_PROMPT_END:]
        return form.tags.at_end_of(tokenizer.decode(ids, skip_special_tokens=False))
    return form.tags.within(begun)
