"""What `LLM` does with models that embed texts or score pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arguments import Prompt, as_batch, as_token_ids, is_list, refused
from .engine.pooling import PoolingEngine
from .engine.pooling_inputs import Plan
from .pooled import (
    POOLING_TASKS,
    EmbeddingOutput,
    PoolingOutput,
    RerankOutput,
    ScoreOutput,
    best_first,
    pair_up,
)

_TEXT = "a string, or a list of token ids"


class PoolingAPI:
    """The methods that need a `PoolingEngine`."""

    @property
    def pooler(self) -> PoolingEngine:
        """Raises InvalidRequestError where the model generates text, ShutdownError once closed."""
        raise NotImplementedError

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """One vector for each text.

        Args:
            texts: a string or token ids, which are taken as they are; or a list of these.
            prompt_name: which of the model's prompts goes before texts, such as "query".
            dimensions: of the vectors, of a model that allows them to be cut (Matryoshka).
            truncate_prompt_tokens: the first so many tokens of a text stay, special ones
                included; -1 is what the model takes. None refuses what is too long.

        Raises:
            InvalidRequestError: a text cannot be embedded, or the model does not embed.
        """
        plan = self.pooler.inputs.embeddings(
            _inputs(texts),
            param="texts",
            truncate=truncate_prompt_tokens,
            prompt_name=prompt_name,
            dimensions=dimensions,
        )
        ids = [i.token_ids for i in plan.inputs]
        return [EmbeddingOutput(v, i) for v, i in zip(self._finish(plan), ids, strict=True)]

    def encode(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingOutput]:
        """What the model makes of each text: a vector of each of its tokens, of all, or a score.

        Args:
            pooling_task: "token_embed", one of each token, special ones too, and what None is where
                the model embeds; "embed", as `embed`; "classify", the score that a cross-encoder
                gives a text alone.
            prompt_name, dimensions, truncate_prompt_tokens: as in `embed`, the first two not for
                "classify".

        Raises:
            InvalidRequestError: a text cannot be encoded, or the model has no such task.
        """
        if pooling_task not in (None, *POOLING_TASKS):
            raise refused("pooling_task", pooling_task, f"{', '.join(POOLING_TASKS)}, or None")
        plan = self.pooler.inputs.of_task(
            pooling_task,
            _inputs(texts),
            param="texts",
            truncate=truncate_prompt_tokens,
            prompt_name=prompt_name,
            dimensions=dimensions,
        )
        ids = [i.token_ids for i in plan.inputs]
        answers = [np.asarray(answer, np.float32) for answer in self._finish(plan)]
        return [PoolingOutput(a, i) for a, i in zip(answers, ids, strict=True)]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """How well texts go together, pair by pair: by a cross-encoder, or how similar the
        embeddings are.

        Args:
            text_1: one for each of `text_2`, or one for all of them.
            truncate_prompt_tokens: tokens of a pair (of a text, with embeddings) that stay.

        Raises:
            InvalidRequestError: the texts make no pairs, or cannot be scored.
        """
        pairs = pair_up(_texts(text_1, "text_1"), _texts(text_2, "text_2"))
        plan = self.pooler.inputs.scores(pairs, truncate=truncate_prompt_tokens)
        return [ScoreOutput(score) for score in self._finish(plan)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """Documents by how well they answer a query, best first.

        Embeddings are made with the model's prompts for queries and documents, where it has any.

        Args:
            top_n: at most so many of them.
            truncate_prompt_tokens: as in `score`.

        Raises:
            InvalidRequestError: the texts cannot be scored.
        """
        if not isinstance(query, str):
            raise refused("query", query, "a string")
        if top_n is not None and (not isinstance(top_n, int) or top_n < 1):
            raise refused("top_n", top_n, "an integer from 1, or None")
        read = _texts(documents, "documents")
        plan = self.pooler.inputs.scores(
            [(query, document) for document in read],
            params=("query", "documents"),
            truncate=truncate_prompt_tokens,
            is_search=True,
        )
        scores = self._finish(plan)
        return [RerankOutput(i, read[i], scores[i]) for i in best_first(scores)[:top_n]]

    def _finish(self, plan: Plan) -> list[Any]:
        futures = self.pooler.submit(plan.inputs)
        try:
            return plan.finish([future.result() for future in futures])
        finally:
            for future in futures:
                future.cancel()  # Ctrl-C: what has not begun need not


def _inputs(texts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    return [t if isinstance(t, str) else as_token_ids(t, "texts", _TEXT) for t in as_batch(texts)]


def _texts(values: Any, param: str) -> list[str]:
    values = [values] if isinstance(values, str) else values
    if not is_list(values) or not len(values) or not all(isinstance(v, str) for v in values):
        raise refused(param, values, "a string or a list of strings, one or more")
    return list(values)
