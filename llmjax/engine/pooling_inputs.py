"""From texts to what a model that pools computes, and from its vectors to answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..checkpoint import PoolingModel
from ..checks import shown
from ..errors import InvalidRequestError
from ..models import EncoderConfig

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""sentence-transformers' names of the prompts of either side of a search."""


class PoolingInput(NamedTuple):
    """Tokens of a text or pair, all within the vocabulary and no more than the model takes.

    Attributes:
        types: the kind of each token (`EncoderConfig.num_types`); empty: all of kind 0.
        of_tokens: a vector of each token is wanted, not one of all.
    """

    token_ids: list[int]
    types: list[int]
    of_tokens: bool = False


class Plan(NamedTuple):
    """What a request needs computed.

    Attributes:
        finish: from the vectors of `inputs` to the answers, one for each text or pair asked for.
    """

    inputs: list[PoolingInput]
    finish: Callable[[Sequence[np.ndarray]], list]

    @property
    def num_tokens(self) -> int:
        return sum(len(i.token_ids) for i in self.inputs)


class InputMaker:
    """Reads texts as a model wants them. Safe to share by threads.

    All its methods raise InvalidRequestError that names the parameter at fault, and take

        truncate: tokens of a text or pair that stay, its first ones and the special ones; -1
            is what the model takes. None refuses what is too long.
    """

    def __init__(self, model: PoolingModel, max_model_len: int):
        self._tokenizer, self._pooling = model.tokenizer, model.pooling
        self._vocab_size, self._max_model_len = model.config.vocab_size, max_model_len
        self._hidden_size = model.config.hidden_size
        config = model.config
        self._has_types = isinstance(config, EncoderConfig) and config.num_types > 1

    def embeddings(
        self,
        texts: Sequence[str | list[int]],
        *,
        param: str = "input",
        truncate: int | None = None,
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        of_tokens: bool = False,
    ) -> Plan:
        """Of texts or token ids; the answers are float32 vectors.

        Args:
            prompt_name: which of the model's prompts goes before texts.
            dimensions: of the vectors, where the model allows it to be cut.
            of_tokens: of each token, special ones too, [T, D]; each has length 1 where those of
                texts have.
        """
        self._require("embed")
        self._check_dimensions(dimensions)
        inputs = self._inputs(texts, param, truncate, add_special_tokens, prompt_name)
        if of_tokens:
            inputs = [each._replace(of_tokens=True) for each in inputs]
            return Plan(inputs, lambda states: [self._tokens(s, dimensions) for s in states])
        return Plan(inputs, lambda vectors: [self._cut(v, dimensions) for v in vectors])

    def of_task(
        self,
        task: str | None,
        texts: Sequence[str | list[int]],
        *,
        param: str = "input",
        truncate: int | None = None,
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> Plan:
        """Whatever a model that pools makes of single texts.

        Args:
            task: of `POOLING_TASKS`; None, as in vLLM, is the model's own: vectors of tokens, or
                a score.
        """
        task = task or ("classify" if self.task == "score" else "token_embed")
        if task != "classify":
            return self.embeddings(
                texts,
                param=param,
                truncate=truncate,
                add_special_tokens=add_special_tokens,
                prompt_name=prompt_name,
                dimensions=dimensions,
                of_tokens=task == "token_embed",
            )
        for name, value in (("dimensions", dimensions), ("prompt_name", prompt_name)):
            if value is not None:
                raise InvalidRequestError(
                    f"{name} is {shown(value)}, allowed: none where the task is classify",
                    param=name,
                )
        return self._classes(texts, param, truncate, add_special_tokens)

    def _classes(
        self, texts: Sequence[str | list[int]], param: str, truncate: int | None, special: bool
    ) -> Plan:
        """The answers are lists of the score of the model's label."""
        self._require("score")
        inputs = self._inputs(texts, param, truncate, special, None)
        return Plan(inputs, lambda logits: [[self._activated(x.item())] for x in logits])

    def scores(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        params: tuple[str, str] = ("text_1", "text_2"),
        truncate: int | None = None,
        is_search: bool = False,
    ) -> Plan:
        """Of pairs of texts; the answers are floats.

        Args:
            params: names of the two sides.
            is_search: the first of each pair is a query for the second, which embeddings may
                have prompts for.
        """
        if self._pooling.task == "score":
            inputs = [self._pair(a, b, params, truncate) for a, b in pairs]
            return Plan(inputs, lambda logits: [self._activated(x.item()) for x in logits])
        sides = (QUERY_PROMPTS, DOCUMENT_PROMPTS) if is_search else ((), ())
        prompts = [self._prompt(next((n for n in s if n in self._names), None)) for s in sides]
        # Each text once, however often it is compared.
        places: dict[tuple[str, str], int] = {}
        inputs = []
        for pair in pairs:
            for text, prompt, param in zip(pair, prompts, params, strict=True):
                if (prompt, text) not in places:
                    places[prompt, text] = len(inputs)
                    inputs.append(self._text(text, param, truncate, prompt, True))
        at = [(places[prompts[0], a], places[prompts[1], b]) for a, b in pairs]
        return Plan(
            inputs, lambda vectors: [self._similarity(vectors[i], vectors[j]) for i, j in at]
        )

    @property
    def task(self) -> str:
        """ "embed" or "score"."""
        return self._pooling.task

    @property
    def _names(self) -> set[str]:
        return set(self._pooling.prompts)

    def _require(self, task: str) -> None:
        if self._pooling.task == task:
            return
        message = "the model embeds texts and has no classes; use embed or token_embed"
        if task == "embed":
            message = "the model scores pairs of texts and has no embeddings; use score or rerank"
        raise InvalidRequestError(message, code="unsupported_task")

    def _inputs(
        self,
        texts: Sequence[str | list[int]],
        param: str,
        truncate: int | None,
        special: bool,
        prompt_name: str | None,
    ) -> list[PoolingInput]:
        prompt = self._prompt(prompt_name)
        return [
            self._text(text, param, truncate, prompt, special)
            if isinstance(text, str)
            else self._ids(text, param, truncate)
            for text in texts
        ]

    def _text(
        self, text: str, param: str, truncate: int | None, prompt: str, special: bool
    ) -> PoolingInput:
        if not text:
            raise InvalidRequestError(f"{param} is empty, allowed: some text", param=param)
        text = prompt + text
        ids = self._tokenizer.encode(text.lower() if self._pooling.lowercase else text, special)
        suffix = self._tokenizer.suffix if special else []
        most = self._most(truncate, len(self._tokenizer.encode("")) if special else 0)
        if most is not None and len(ids) > most:
            ids = ids[: most - len(suffix)] + suffix
        return self._checked(ids, [], param)

    def _ids(self, ids: list[int], param: str, truncate: int | None) -> PoolingInput:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {shown(token)} in {param} is not in the vocabulary, allowed: 0 to "
                    f"{self._vocab_size - 1}",
                    param=param,
                )
        return self._checked(ids[: self._most(truncate, 0)], [], param)

    def _pair(self, a: str, b: str, params: tuple[str, str], truncate: int | None) -> PoolingInput:
        for text, param in zip((a, b), params, strict=True):
            if not text:
                raise InvalidRequestError(f"{param} is empty, allowed: some text", param=param)
        most = self._most(truncate, self._tokenizer.num_special_of_pair + 1)
        ids, types = self._tokenizer.encode_pair(a, b, most)
        return self._checked(ids, types if self._has_types else [], params[1])

    def _checked(self, ids: list[int], types: list[int], param: str) -> PoolingInput:
        if not ids:
            raise InvalidRequestError(f"{param} has no tokens, allowed: one or more", param=param)
        if len(ids) > self._max_model_len:
            raise InvalidRequestError(
                f"{param} has {len(ids)} tokens, allowed: up to {self._max_model_len}, what the "
                "model takes; truncate_prompt_tokens keeps the first so many",
                param=param,
                code="context_length_exceeded",
            )
        return PoolingInput(ids, types)

    def _most(self, truncate: int | None, special: int) -> int | None:
        if truncate is None:
            return None
        most = self._max_model_len if truncate == -1 else truncate
        if not special < most <= self._max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {truncate}, allowed: {special + 1} to "
                f"{self._max_model_len}, or -1 for the latter",
                param="truncate_prompt_tokens",
            )
        return most

    def _prompt(self, name: str | None) -> str:
        prompts = self._pooling.prompts
        if name is None:
            return prompts[self._pooling.default_prompt] if self._pooling.default_prompt else ""
        if name not in prompts:
            allowed = ", ".join(prompts) or "none, as the model has no prompts"
            raise InvalidRequestError(
                f"prompt_name is {shown(name)}, allowed: {allowed}", param="prompt_name"
            )
        return prompts[name]

    def _check_dimensions(self, dimensions: int | None) -> None:
        allowed, most = self._pooling.dimensions, self._hidden_size
        if dimensions is None or dimensions == most:
            return
        if allowed == "any" and 1 <= dimensions < most:
            return
        if allowed == "any" or dimensions not in allowed:
            words = f"1 to {most}" if allowed == "any" else ", ".join(map(str, (*allowed, most)))
            raise InvalidRequestError(
                f"dimensions is {dimensions}, allowed for this model: {words}", param="dimensions"
            )

    def _cut(self, vector: np.ndarray, dimensions: int | None) -> np.ndarray:
        if dimensions is None or dimensions == len(vector):
            return vector
        short = vector[:dimensions]
        return short / max(np.linalg.norm(short), 1e-12) if self._pooling.normalize else short

    def _tokens(self, states: np.ndarray, dimensions: int | None) -> np.ndarray:
        states = states[:, :dimensions]
        if not self._pooling.normalize:
            return states
        return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-12)

    def _similarity(self, a: np.ndarray, b: np.ndarray) -> float:
        product = float(a @ b)
        if self._pooling.similarity == "dot":
            return product
        return product / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)

    def _activated(self, logit: float) -> float:
        if self._pooling.activation == "identity":
            return logit
        # exp of a large number would overflow.
        return float(np.exp(-np.logaddexp(0.0, -logit)))
