"""A layer that is being quantised: its parameters, what flows through it, what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llmjax_kernels.quant_matmul import InputFormat

from ..errors import CheckpointFormatError
from ..models.config import DecoderConfig
from .forward import like, run_layer, sequences_at_once
from .hub import Target, as_stored

SAMPLED_ROWS = 1024
"""Of a place's inputs that are kept as they are, evenly spaced."""


class Place(NamedTuple):
    """Where linear layers have one input in common.

    Attributes:
        linears: "attn.q", ...
        before: what scales that input channel by channel: a norm, or a linear layer whose rows
            go into it without being mixed; None where there is none.
        channels: of each channel of the input, which of `before` makes it.
    """

    linears: tuple[str, ...]
    before: str | None
    channels: Int[np.ndarray, " K"]


class Inputs(NamedTuple):
    """What a place was given by the calibration text, over all of its tokens.

    Attributes:
        greatest: |x| of each channel.
        typical: the greatest |x| of a window, on average.
        mean: of |x|, of each channel.
        gram: X^T X / tokens; zero by zero where it was not asked for.
        rows: some of X.
    """

    greatest: Float[Array, " K"]
    typical: Float[Array, ""]
    mean: Float[Array, " K"]
    gram: Float[Array, "K K"]
    rows: Float[Array, "R K"]


class Coded(NamedTuple):
    """A target that is quantised.

    Attributes:
        values: that a reader multiplies with, float32 [N, K].
        tensors: what is written, by the ends of their names ("qweight").
    """

    values: Float[np.ndarray, "N K"]
    tensors: dict[str, np.ndarray]


def places_of(config: DecoderConfig) -> tuple[Place, ...]:
    """In the order in which a layer comes to them."""
    D, N, H = config.hidden_size, config.num_heads, config.head_dim
    is_before = config.norm_placement != "post"
    head, channel = np.divmod(np.arange(N * H), H)
    kv_channels = head // (N // config.num_kv_heads) * H + channel
    return (
        Place(("attn.q", "attn.k", "attn.v"), "attn_norm" if is_before else None, np.arange(D)),
        Place(("attn.o",), "attn.v", kv_channels),
        Place(("mlp.gate", "mlp.up"), "mlp_norm" if is_before else None, np.arange(D)),
        Place(("mlp.down",), "mlp.up", np.arange(config.mlp_size)),
    )


class Layer:
    """What a method works on: it changes `parameters` and calls `put`.

    Args:
        index: of the layer.
        parameters: float32, by path within the layer ("attn.q.weight").
        targets: all of the layer's.
        quantised: which of them to quantise.
        hidden: what flows in; None where nothing is calibrated.
        dtype: of scales, and of what stays in floats.

    Attributes:
        config: the decoder's.
        hidden: what flows in.
        places: that have a matrix to quantise.
        floats: what stays so; the parameters are as rounded to `dtype`.
        coded: what `put` was given, by the target's name.
    """

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        parameters: dict[str, np.ndarray],
        targets: Iterable[Target],
        quantised: Callable[[Target], bool],
        hidden: Float[np.ndarray, "S T D"] | None,
        dtype: np.dtype,
    ):
        self.index, self.parameters, self.dtype = index, parameters, dtype
        self.coded: dict[str, Coded] = {}
        self.config, self.hidden = config, hidden
        targets = list(targets)
        self._targets = [target for target in targets if quantised(target)]
        self.floats = [target for target in targets if not quantised(target)]
        for target in self.floats:
            self.parameters |= as_stored(target, self.parameters, dtype)
        self._roundings: dict[str, InputFormat] = {}
        self._static: dict[str, np.ndarray] = {}
        self.places = tuple(place for place in places_of(config) if self.targets_at(place))

    def targets_at(self, place: Place) -> list[Target]:
        """The matrices to quantise that have this input."""
        paths = {f"{linear}.weight" for linear in place.linears}
        return [target for target in self._targets if paths & set(target.members)]

    def weight(self, target: Target) -> Float[np.ndarray, "N K"]:
        """The target's float32 values as they are now.

        Raises:
            CheckpointFormatError: not all are finite.
        """
        values = target.join(self.parameters)
        if not np.isfinite(values).all():
            raise CheckpointFormatError(f"layer {target.module} has values that are not finite")
        return values

    def change(self, path: str, value: np.ndarray) -> np.ndarray:
        """Sets a parameter, rounded where it stays in floats; gives what became of it."""
        self.parameters[path] = value
        for target in self.floats:
            if path in target.members:
                self.parameters |= as_stored(target, self.parameters, self.dtype)
        return self.parameters[path]

    def put(self, target: Target, coded: Coded) -> None:
        """Takes what a target has become, which the layer computes with from now on."""
        self.coded[target.name] = coded
        self.parameters |= target.split(coded.values)

    def round_inputs(
        self, place: Place, rounding: InputFormat, static: np.ndarray | None = None
    ) -> None:
        """Has the place's input rounded from now on, where a target has it.

        Args:
            static: scale and zero point, where it is static.
        """
        for target in self.targets_at(place):
            for path in target.members:
                linear = path.removesuffix(".weight")
                self._roundings[linear] = rounding
                if static is not None:
                    self._static[linear] = static

    def inputs(self, places: Iterable[Place], *, gram: bool = False) -> list[Inputs]:
        """What places are given, in one pass over the calibration text.

        Args:
            gram: also X^T X, which costs as much as the layer.
        """
        places = list(places)
        watched = tuple(place.linears[0] for place in places)
        sums: list[Inputs | None] = [None] * len(places)
        windows, length = self._calibration.shape[:2]
        tokens = windows * length
        stride = max(1, tokens // SAMPLED_ROWS)
        for _, seen in self._run(watched, ends=False):
            parts = [_measure(seen[name], gram=gram, stride=stride) for name in watched]
            sums = [b if a is None else _add(a, b) for a, b in zip(sums, parts, strict=True)]
        return [_over(total, windows, tokens) for total in sums if total is not None]

    def outputs(self) -> Float[np.ndarray, "S T D"] | None:
        """What flows out of the layer as it is now."""
        if self.hidden is None:
            return None
        return np.concatenate([np.asarray(out) for out, _ in self._run(())])

    @property
    def _calibration(self) -> Float[np.ndarray, "S T D"]:
        assert self.hidden is not None, "the method is one of those that calibrate"
        return self.hidden

    def _run(
        self, watched: tuple[str, ...], ends: bool = True
    ) -> Iterator[tuple[Array | None, dict[str, Array]]]:
        hidden = self._calibration
        step = sequences_at_once(*hidden.shape[:2])
        parameters = {path: jnp.asarray(value) for path, value in self.parameters.items()}
        for start in range(0, len(hidden), step):
            yield run_layer(
                parameters,
                self._static,
                hidden[start : start + step],
                config=self.config,
                index=like(self.config, self.index),
                watched=watched,
                ends=ends,
                roundings=tuple(sorted(self._roundings.items())),
            )


@partial(jax.jit, static_argnames=("gram", "stride"))
def _measure(x: Float[Array, "B T K"], *, gram: bool, stride: int) -> Inputs:
    """Sums in place of means."""
    rows = x.reshape(-1, x.shape[-1])
    sizes = jnp.abs(rows)
    product = jnp.zeros((0, 0), x.dtype)
    if gram:
        product = jnp.matmul(rows.T, rows, precision="float32")
    of_windows = jnp.sum(jnp.max(jnp.abs(x), axis=(1, 2)))
    greatest, total = jnp.max(sizes, axis=0), jnp.sum(sizes, axis=0)
    return Inputs(greatest, of_windows, total, product, rows[::stride])


def _add(a: Inputs, b: Inputs) -> Inputs:
    rows = jnp.concatenate([a.rows, b.rows])
    greatest = jnp.maximum(a.greatest, b.greatest)
    return Inputs(greatest, a.typical + b.typical, a.mean + b.mean, a.gram + b.gram, rows)


def _over(total: Inputs, windows: int, tokens: int) -> Inputs:
    return total._replace(
        typical=total.typical / windows, mean=total.mean / tokens, gram=total.gram / tokens
    )
