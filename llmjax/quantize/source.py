"""A decoder's parameters, read a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..checkpoint import Checkpoint
from ..checkpoint.architecture import require_decoder
from ..checkpoint.load import own_dtype
from ..checkpoint.plan import plan_weights
from ..models import make_model

Parameters = dict[str, np.ndarray]
"""float32, by path."""


class Source:
    """An open checkpoint as a decoder.

    Attributes:
        config: the decoder's.
        own_dtype: of its floats; None where it is quantised.

    Raises:
        ModelLoadError: it is no decoder, or its tensors are not those that its configuration
            needs; all of them are checked here.
    """

    def __init__(self, checkpoint: Checkpoint):
        found, table = checkpoint.read_architecture()
        self.config = require_decoder(found)
        self.own_dtype = own_dtype(checkpoint, table)
        self._checkpoint = checkpoint
        abstract = nnx.eval_shape(lambda: make_model(self.config, jnp.dtype(jnp.float32)))
        flat = nnx.to_flat_state(nnx.split(abstract)[1])
        shapes = {".".join(map(str, keys)): leaf for keys, leaf in flat}
        self._shapes = {path: tuple(leaf.shape) for path, leaf in shapes.items()}
        self._plan = plan_weights(checkpoint, self.config, table, shapes)

    def layer(self, index: int) -> Parameters:
        """Those of a layer, by their paths within it ("attn.q.weight")."""
        prefix = f"layers.{index}."
        return {
            path.removeprefix(prefix): value
            for path, value in self._read(lambda path: path.startswith(prefix))
        }

    def outer(self) -> Parameters:
        """Those of no layer: embedding, final norm, and head where it is not the embedding."""
        return dict(self._read(lambda path: not path.startswith("layers.")))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, by path."""
        return self._shapes

    def read(self, paths: Collection[str]) -> Parameters:
        """Some parameters, by path."""
        return dict(self._read(lambda path: path in paths))

    def _read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, np.ndarray]]:
        for name, uses in self._plan.items():
            some = [use for use in uses if wanted(use.path)]
            if not some:
                continue
            stored = self._checkpoint.read(name)
            for path, transform in some:
                value = stored if transform is None else transform(stored, self.config)
                yield path, np.asarray(value, np.float32)
