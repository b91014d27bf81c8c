"""The arrays that every attention kernel takes. Knows nothing of models or requests.

Shapes: T tokens in the step, S sequences, P pages of a sequence, K kv heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from .kv_format import KVFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer, in pages that any sequence may own.

    Attributes:
        format: how rows are kept; W is its `width(H)`.
    """

    k: Shaped[Array, "pages page_size K W"]
    v: Shaped[Array, "pages page_size K W"]
    format: KVFormat = field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """The tokens of a step: S runs of consecutive tokens, one run a sequence, then padding.

    Attributes:
        positions: of each token in its sequence.
        is_token: false for padding tokens.
        token_seqs: the row in [0, S) each token belongs to (0 for padding).
        query_starts: run s is tokens query_starts[s] to query_starts[s + 1].
        kv_lens: tokens of each sequence after this step, 0 for padding rows.
        block_tables: page ids in order of position; what lies beyond kv_lens is not read
            into any result, but must be a valid page id.
        decode_only: every run has one token and token t is row t (then T == S).
    """

    positions: Int[Array, " T"]
    is_token: Bool[Array, " T"]
    token_seqs: Int[Array, " T"]
    query_starts: Int[Array, " S_plus_1"]
    kv_lens: Int[Array, " S"]
    block_tables: Int[Array, "S P"]
    decode_only: bool = field(metadata={"static": True})


def make_ragged_batch(
    query_starts: Int[Array, " S_plus_1"],
    kv_lens: Int[Array, " S"],
    block_tables: Int[Array, "S P"],
    num_tokens: int,
    *,
    decode_only: bool,
) -> RaggedBatch:
    """Derives the per-token arrays of a step of `num_tokens` (T) tokens, on the device."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # A search that is a loop would have the host of a GPU wait for each of its turns.
    token_seqs = token
    if not decode_only:
        token_seqs = jnp.searchsorted(query_starts, token, side="right", method="compare_all") - 1
    is_token = token < query_starts[-1]
    token_seqs = jnp.where(is_token, token_seqs, 0).astype(jnp.int32)
    query_lens = query_starts[1:] - query_starts[:-1]
    first_position = kv_lens - query_lens
    positions = first_position[token_seqs] + token - query_starts[token_seqs]
    return RaggedBatch(
        positions=jnp.where(is_token, positions, 0),
        is_token=is_token,
        token_seqs=token_seqs,
        query_starts=query_starts,
        kv_lens=kv_lens,
        block_tables=block_tables,
        decode_only=decode_only,
    )
