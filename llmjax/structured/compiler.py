"""From what a request asks for to a grammar that its sequences follow.

Grammars are compiled in threads of their own: however long one takes, the others' tokens go on. One
that takes too long, or crashes the compiler, is found out in a process of its own before that.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from jaxtyping import Int
from llguidance import (
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    StructTag,
    TokenizerWrapper,
    regex_to_lark,
)
from llguidance.numpy import fill_next_token_bitmask

from ..errors import InvalidRequestError, QueueFullError
from ..request import SamplingParams
from ..structured_outputs import StructuredOutputs
from ..tokenizer import Tokenizer
from .closing import closed
from .constraint import BadWords, Constraint, as_bits
from .ending import LEAST_ROOM, EndFinder, Ending
from .formats import without_unknown_formats
from .lark import WHITESPACE, after_reasoning, or_calls
from .limits import check_choice, check_regex, check_schema, check_source, refuse
from .prover import FUEL, Prover
from .thinking import ThinkingBudget

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_REMEMBERED, _CHARS_REMEMBERED = 256, 500_000
"""Compiled grammars, and characters of what they were asked as: each is some hundred bytes."""
_CHARS_IN_USE = 4_000_000
"""Characters of what requests of clients are bound to at once, the same counted once."""
_CHARS_KEPT = 16_384
"""Of a schema that is remembered to be sound."""
_ENDED = ("json", "json_object", "grammar", "structural_tag")
"""Kinds of outputs that are brought to their end: what is left out of others is what was asked."""
_LIMITS = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)


@dataclass(frozen=True)
class Rules:
    """What the outputs of a request are bound to; see `Constraint`."""

    matcher: LLMatcher | None
    allowed: Int[np.ndarray, " W"] | None
    bad_words: BadWords
    thinking: ThinkingBudget | None = None
    ends: EndFinder | None = None

    def start(self, room: int) -> Constraint:
        """Those of one sequence, before its first token.

        Args:
            room: most tokens of its output.
        """
        matcher = self.matcher and self.matcher.deep_copy()
        thinking = None if self.thinking is None else self.thinking.start()
        ending = Ending(self.ends, room) if self.ends and room >= LEAST_ROOM else None
        return Constraint(matcher, self.allowed, self.bad_words, thinking, ending)


class GrammarCompiler:
    """Compiles what requests ask for, and remembers grammars. Any thread may use it.

    Args:
        vocab_size: of the model, whose logits the masks are for.
        num_threads: that compile at once.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, num_threads: int = 2):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(num_threads, "llmjax-grammar")
        self._lock = threading.RLock()  # rules may be collected wherever they are
        self._known: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._in_use: Counter[StructuredOutputs] = Counter()
        self._chars_in_use = 0
        special = {i: tokenizer.token_text(i) for i in tokenizer.special_ids if i < vocab_size}
        self._prover = Prover(vocab_size, special, sorted(tokenizer.eos_token_ids))

    def compile(self, params: SamplingParams, *, is_bounded: bool = False) -> Future[Rules] | None:
        """What a request's parameters bind its outputs to, some time later; None is nothing.

        Args:
            is_bounded: refuse what would take too much memory beside what is in use.

        The future raises `InvalidRequestError` where there is no such grammar, and
        `QueueFullError` where there is too much of it already.
        """
        if not params.constrained:
            return None
        wanted = params.structured_outputs
        if wanted is None:
            return self._pool.submit(self._rules, params, None)
        rules: Future[Rules] = Future()
        rules.set_running_or_notify_cancel()  # who waits may go, what is settled stays
        unsettled = [rules]  # a remembered grammar's future goes on to hold `settle`

        def settle(grammar: Future[LLMatcher]) -> None:
            rules = unsettled.pop()
            try:
                found = self._rules(params, grammar.result())
            except BaseException as error:
                self._let_go(wanted)
                rules.set_exception(error)
            else:
                weakref.finalize(found, self._let_go, wanted).atexit = False
                rules.set_result(found)

        try:
            self._use(wanted, is_bounded)
        except QueueFullError as error:
            rules.set_exception(error)
        else:
            self._grammar(wanted).add_done_callback(settle)
        return rules

    def _use(self, wanted: StructuredOutputs, is_bounded: bool) -> None:
        with self._lock:
            if not self._in_use[wanted]:
                chars = self._chars_in_use + wanted.size
                if is_bounded and chars > _CHARS_IN_USE:
                    raise QueueFullError(
                        f"{wanted.label}: requests under way would be bound to {chars} characters "
                        f"of schemas and grammars, allowed: up to {_CHARS_IN_USE}"
                    )
                self._chars_in_use = chars
            self._in_use[wanted] += 1

    def _let_go(self, wanted: StructuredOutputs) -> None:
        with self._lock:
            self._in_use[wanted] -= 1
            if not self._in_use[wanted]:
                del self._in_use[wanted]
                self._chars_in_use -= wanted.size

    def _rules(self, params: SamplingParams, matcher: LLMatcher | None) -> Rules:
        # Here, as jax comes with it, which a frontend does without.
        from ..sampling import mask_words

        allowed, words = params.allowed_token_ids, mask_words(self._vocab_size)
        bits = as_bits(allowed, words) if allowed is not None else None
        bad_words = self._bad_words(params.bad_words or ())
        wanted = params.structured_outputs
        ends = self._ends if wanted is not None and wanted.kind in _ENDED else None
        return Rules(matcher, bits, bad_words, self._thinking(params), ends)

    def _thinking(self, params: SamplingParams) -> ThinkingBudget | None:
        tokens, tags = params.thinking_token_budget, params.reasoning
        if tokens is None:
            return None
        if tags is None:
            raise refuse(
                "thinking_token_budget",
                "allowed in chats with a model whose reasoning can be told from its answer",
            )
        budget = ThinkingBudget(tags, tokens, self._tokenizer)
        allowed = params.allowed_token_ids
        if allowed is not None and not set(budget.end_ids) <= set(allowed):
            raise refuse(
                "allowed_token_ids",
                f"without {tags.end} a reasoning cannot end at its thinking_token_budget; allowed "
                f"are ids with {budget.end_ids} among them",
            )
        return budget

    def _bad_words(self, words: Iterable[str]) -> BadWords:
        """As vLLM's: a word alone, and behind a space where that makes it one token more."""
        found: BadWords = {}
        for word in words:
            alone, behind = (
                self._tokenizer.encode(text, add_special_tokens=False)
                for text in (word.lstrip() or word, " " + word.lstrip())
            )
            for ids in (alone, behind):
                if ids and (ids is alone or (ids[0] != alone[0] and len(ids) == len(alone))):
                    found.setdefault(tuple(ids[:-1]), []).append(ids[-1])
        return found

    def _grammar(self, wanted: StructuredOutputs) -> Future[LLMatcher]:
        with self._lock:
            future = self._known.get(wanted)
            # An error that is raised again and again gathers tracebacks: it is found anew.
            if future is None or (future.done() and future.exception() is not None):
                future = self._known[wanted] = self._pool.submit(self._compile, wanted)
            self._known.move_to_end(wanted)
            size = sum(one.size for one in self._known)
            while len(self._known) > _REMEMBERED or size > _CHARS_REMEMBERED:
                size -= self._known.popitem(last=False)[0].size
            return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._prover.close()

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        label, value, vocabulary = wanted.label, wanted.value, self._vocabulary
        if wanted.kind == "grammar":
            check_source(value, label)
            # Python converts it, in time that may grow with the square of its rules.
            value = self._prover.lark(value, label) if "::=" in value else value
        source = _SOURCES[wanted.kind](value, wanted, label)
        if wanted.or_calls is not None:
            source = or_calls(source, wanted.or_calls)
        if wanted.after is not None:
            source = after_reasoning(source, wanted.after, self._tokenizer.special_tokens)
        self._prover.check(source, label)
        matcher = LLMatcher(vocabulary, source, limits=_LIMITS, log_level=0)
        # What has no beginning is found out where the first token is looked for.
        beginning = matcher.deep_copy()
        fill_next_token_bitmask(beginning, np.zeros((1, -(-self._vocab_size // 32)), np.int32), 0)
        for one in (matcher, beginning):
            if one.is_error():
                raise refuse(label, one.get_error().strip() or "nothing matches it")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        eos = sorted(self._tokenizer.eos_token_ids)
        if not eos:
            raise InvalidRequestError(
                "structured_outputs: the model has no end-of-sequence token, by which they end",
                param="structured_outputs",
            )
        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer, self._token_bytes, eos[0]))
        return LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=eos)

    @cached_property
    def _ends(self) -> EndFinder:
        return EndFinder(self._token_bytes, self._tokenizer.encode_within)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]


def check_json(schema: Any, label: str) -> None:
    """Raises InvalidRequestError, which names `label`, where no JSON can be bound to the schema."""
    source = _from_json(schema, StructuredOutputs(json_object=True), label)
    if len(source) <= _CHARS_KEPT:
        _check_source(source, label)
    else:
        _prover().check(source, label)


@lru_cache(1024)
def _check_source(source: str, label: str) -> None:
    """Remembers what is good: the same tools come with every turn of a conversation."""
    _prover().check(source, label)


@lru_cache(1)
def _prover() -> Prover:
    """Of those for whom the vocabulary has no part in it."""
    return Prover()


class _Vocabulary:
    """A tokenizer as llguidance takes one."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_token_id: int):
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        self.tokens = tokens
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < len(tokens))
        self._encode = tokenizer.encode_within

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _read(value: Any, label: str) -> Any:
    """JSON that may come as text."""
    if not isinstance(value, str):
        return value
    check_source(value, label)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refuse(label, f"it is no JSON: {error}") from error


def _from_json(value: Any, wanted: StructuredOutputs, label: str) -> str:
    value = _read(value, label)
    value = {} if value is True else value
    if not isinstance(value, dict):
        raise refuse(label, "allowed is a JSON schema that is an object, or true")
    check_schema(value, label)
    if wanted.disable_additional_properties:
        value = closed(value)
    if wanted.disable_any_whitespace:
        options: JsonCompileOptions = {"whitespace_flexible": False}
    else:
        pattern = wanted.whitespace_pattern or WHITESPACE
        check_regex(pattern, "whitespace_pattern")
        options = {"whitespace_pattern": pattern}
    schema = json.dumps(without_unknown_formats(value))
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:  # a number or a text that Python's JSON has, and no other
        raise refuse(label, f"it is no JSON: {error}") from error


def _from_json_object(value: Any, wanted: StructuredOutputs, label: str) -> str:
    return _from_json({"type": "object"}, wanted, label)


def _from_regex(value: Any, wanted: StructuredOutputs, label: str) -> str:
    check_regex(value, label)
    # \d, \w and \s are ASCII, as in JSON schemas and in what people mean.
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'dws')}/")


def _from_choice(value: Any, wanted: StructuredOutputs, label: str) -> str:
    check_choice(value, label)
    # One terminal: a parser's alternatives may be no more than 2,000.
    choices = " | ".join(map(json.dumps, value))
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")


def _from_grammar(value: Any, wanted: StructuredOutputs, label: str) -> str:
    return LLMatcher.grammar_from_lark(value)


def _from_structural_tag(value: Any, wanted: StructuredOutputs, label: str) -> str:
    value = _read(value, label)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not (isinstance(structures, list) and _are_texts(triggers) and structures):
        raise refuse(label, "allowed: `structures` and `triggers`, a list of objects, one of texts")
    tags = []
    for one in structures:
        if not isinstance(one, dict) or set(one) != {"begin", "end", "schema"}:
            raise refuse(label, "a structure has the keys begin, end, schema")
        if not _are_texts([one["begin"], one["end"]]) or not isinstance(one["schema"], dict):
            raise refuse(label, "begin and end of a structure are texts, its schema an object")
        trigger = next((t for t in triggers if t and one["begin"].startswith(t)), None)
        if trigger is None:
            raise refuse(label, f"no trigger begins {one['begin']!r}")
        check_schema(one["schema"], label)
        schema = without_unknown_formats(one["schema"])
        tags.append(StructTag(trigger=trigger, begin=one["begin"], grammar=schema, end=one["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


_SOURCES: dict[str, Callable[[Any, StructuredOutputs, str], str]] = {
    "json": _from_json,
    "json_object": _from_json_object,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_structural_tag,
}
