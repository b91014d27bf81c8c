"""What models that embed or score give back. No jax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """Attributes:
    embedding: float32 [D].
    prompt_token_ids: what was embedded, special tokens and the model's prompt included.
    """

    embedding: np.ndarray
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
