"""Algorithms once more, in plain float64 numpy, and small matrices to try them on."""

from __future__ import annotations

import numpy as np


def matrices(seed: int, N: int = 24, K: int = 64, tokens: int = 512):
    """A weight [N, K] and inputs [tokens, K] whose channels differ in size and go together."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, K)) @ (np.eye(K) + 0.3 * rng.standard_normal((K, K)))
    x = mixed * np.exp(rng.standard_normal(K))
    return rng.standard_normal((N, K)).astype(np.float32), x.astype(np.float32)


def output_error(weight: np.ndarray, rounded: np.ndarray, x: np.ndarray) -> float:
    """The squared error of x W^T, summed."""
    return float(np.sum((x.astype(np.float64) @ (rounded - weight).T.astype(np.float64)) ** 2))


def fit(low, high, bits, symmetric, dtype=np.float32):
    """Scale and zero point of a group."""
    last = 2**bits - 1
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if symmetric:
        scale = (2 * np.maximum(-low, high) / last).astype(dtype).astype(np.float64)
        return scale, np.full_like(scale, 2 ** (bits - 1))
    scale = ((high - low) / last).astype(dtype).astype(np.float64)
    return scale, np.clip(np.round(-low / scale), 0, last)


def nearest(weight, bits, group, symmetric, dtype=np.float32):
    """Each weight rounded by itself, [N, K]."""
    grouped = weight.reshape(len(weight), -1, group).astype(np.float64)
    low, high = grouped.min(2, keepdims=True), grouped.max(2, keepdims=True)
    scale, zero = fit(low, high, bits, symmetric, dtype)
    codes = np.clip(np.round(grouped / scale) + zero, 0, 2**bits - 1)
    return ((codes - zero) * scale).reshape(weight.shape)


def gptq(weight, gram, bits, group, symmetric, damp, order=None, static=False):
    """Optimal brain quantisation in a fixed order: after each input H^-1 is shrunk by it.

    That is what GPTQ's Cholesky factor stands for (its section 3.3), done the long way.
    """
    W = weight.astype(np.float64).copy()
    N, K = W.shape
    H = gram.astype(np.float64) + damp * np.mean(np.diag(gram)) * np.eye(K)
    order = np.arange(K) if order is None else order
    inverse = np.linalg.inv(H)
    done = np.empty_like(W)
    codes = np.empty((N, K), int)
    scale = zero = None
    whole = W.reshape(N, -1, group)
    fixed = fit(whole.min(2), whole.max(2), bits, symmetric)
    for place, k in enumerate(order):
        if static:
            scale, zero = (part[:, k // group] for part in fixed)
        elif place % group == 0:
            own = W[:, order[place : place + group]]
            scale, zero = fit(own.min(1), own.max(1), bits, symmetric)
        codes[:, k] = np.clip(np.round(W[:, k] / scale) + zero, 0, 2**bits - 1)
        done[:, k] = (codes[:, k] - zero) * scale
        error = (W[:, k] - done[:, k]) / inverse[k, k]
        W -= np.outer(error, inverse[k])
        inverse = inverse - np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return done, codes
