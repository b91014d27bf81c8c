"""What models that embed or score give back. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

POOLING_TASKS = ("embed", "token_embed", "classify")
"""What may be asked of a model that pools: a vector of a text, one of each of its tokens, or the
score of a text alone."""


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """Attributes:
    embedding: float32 [D].
    prompt_token_ids: what was embedded, special tokens and the model's prompt included.
    """

    embedding: np.ndarray
    prompt_token_ids: list[int]


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """Attributes:
    data: float32: [T, D] of each token, [D] of a text, or [1], its score.
    prompt_token_ids: as `EmbeddingOutput.prompt_token_ids`, the T tokens.
    """

    data: np.ndarray
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class ScoreOutput:
    """Attributes:
    score: the higher, the better the two texts go together: of a cross-encoder what its
        activation gives (0 to 1 for a sigmoid), of embeddings their similarity.
    """

    score: float


@dataclass(frozen=True)
class RerankOutput:
    """Attributes:
    index: of the document among those that were given.
    score: as `ScoreOutput.score`.
    """

    index: int
    document: str
    score: float


def pair_up(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of the texts of two sides: one to one, or one to all.

    Raises:
        InvalidRequestError: their numbers allow neither.
    """
    if len(one) == 1:
        one = list(one) * len(other)
    if len(one) != len(other) or not one:
        raise InvalidRequestError(
            f"text_1 has {len(one)} texts and text_2 {len(other)}, allowed: as many in both, or "
            "one in text_1",
            param="text_1",
        )
    return list(zip(one, other, strict=True))


def best_first(scores: Sequence[float]) -> list[int]:
    """Places of the scores, the highest first, equal ones in their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def cannot_generate(name: str, task: str) -> InvalidRequestError:
    """What asking a model that embeds or scores for text is answered with."""
    does = "embeds texts: /v1/embeddings, LLM.embed, LLM.encode, and /score, /rerank by similarity"
    if task == "score":
        does = "scores pairs of texts: /score, /rerank, LLM.score, LLM.rerank"
    return InvalidRequestError(f"{name} does not generate text; it {does}", code="unsupported_task")


def cannot_pool(name: str) -> InvalidRequestError:
    """What asking a model that generates for vectors or scores is answered with."""
    return InvalidRequestError(
        f"{name} generates text; it embeds and scores only where it is loaded with pooling "
        "(--pooling last or mean), which makes embeddings of its hidden states",
        code="unsupported_task",
    )
