"""Channel by channel, a place's input is divided by a scale and its matrices are multiplied by it.

What makes the input takes the division, so that in floats nothing changes.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from .layer import Layer, Place


def fold(
    layer: Layer, place: Place, scale: Float[np.ndarray, " channels"]
) -> Float[np.ndarray, " K"]:
    """Divides what comes before a place and multiplies the place's matrices.

    Args:
        scale: of the channels of `place.before`, above zero.

    Returns:
        What each channel of the input was divided by. It differs from what was asked for by what a
        norm is rounded to where it is stored, so that rounding changes nothing either.
    """
    assert place.before is not None
    parameters, weight = layer.parameters, f"{place.before}.weight"
    before = parameters[weight]
    if before.ndim == 1:
        after = layer.change(weight, before / scale)
        scale = np.where(after == 0, scale, before / np.where(after == 0, 1, after))
    else:
        layer.change(weight, before / scale[:, None])
        bias = f"{place.before}.bias"
        if bias in parameters:
            layer.change(bias, parameters[bias] / scale)
    across = scale[place.channels].astype(np.float32)
    for linear in place.linears:
        path = f"{linear}.weight"
        layer.change(path, parameters[path] * across)
    return across


def gathered(
    place: Place, values: Float[np.ndarray, " K"], how: np.ufunc
) -> Float[np.ndarray, " channels"]:
    """What is known of the input's channels, by the channels that make them.

    Args:
        how: of several channels that one makes (a value head that query heads share).
    """
    out = np.full(place.channels.max() + 1, how.identity or 0, np.float32)
    how.at(out, place.channels, values)
    return out
