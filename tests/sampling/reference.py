"""What the sampler promises, written plainly in float64 numpy."""

import numpy as np

from llmjax.sampling import SamplingRows, mask_words
from llmjax.sampling.truncation import MAX_GAP

NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "position": 0,
    "prompt_len": 0,
    "kv_len": 0,
    "num_bias": 0,
    "num_logprobs": -1,
    "masked": False,
}


def make_rows(S, *, seed=None, slot=None, **params):
    """SamplingRows of S rows; each parameter is a number or S numbers."""
    fields = {}
    for name, neutral in NEUTRAL.items():
        dtype = np.float32 if isinstance(neutral, float) else type(neutral)
        dtype = np.int32 if dtype is int else dtype
        fields[name] = np.broadcast_to(np.asarray(params.pop(name, neutral), dtype), (S,))
    assert not params, params
    words = np.zeros((S, 2), np.uint32)
    words[:, 1] = 0 if seed is None else seed
    slots = np.arange(S, dtype=np.int32) if slot is None else np.asarray(slot, np.int32)
    return SamplingRows(seed=words, slot=slots, **fields)


def no_masks(logits):
    return np.zeros((len(logits), mask_words(logits.shape[1])), np.int32)


def as_masks(allowed):
    """Bits of bool [S, V]."""
    S, V = allowed.shape
    padded = np.zeros((S, 32 * mask_words(V)), bool)
    padded[:, :V] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def penalise(logits, prompt, output, repetition, presence, frequency):
    x = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in output:
        x[token] -= frequency
    for token in {*output}:
        x[token] -= presence
    return x


def probabilities(x):
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def kept(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, slack=0.0):
    """Mask of the tokens that stay; positive slack lets those in that just miss top_p."""
    scaled = logits.astype(np.float64) / temperature
    mask = scaled >= scaled.max() - MAX_GAP
    mask &= probabilities(scaled) >= min_p * probabilities(scaled).max() * (1 - slack)
    if 0 < top_k < len(logits):
        greater = (scaled[None, :] > scaled[:, None]).sum(1)
        mask &= greater < top_k
    if top_p < 1:
        p = np.where(mask, probabilities(scaled), 0)
        before = np.array([p[scaled > value].sum() for value in scaled])
        mask &= before < top_p * p.sum() + slack
    return mask


def distribution(logits, temperature, **truncation):
    p = probabilities(logits.astype(np.float64) / temperature)
    p = np.where(kept(logits, temperature, **truncation), p, 0)
    return p / p.sum()


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def chi_square_is_plausible(counts, expected_p):
    """Whether counts fit the probabilities, at a level of about 1e-4 (Wilson-Hilferty)."""
    n = counts.sum()
    assert counts[expected_p == 0].sum() == 0
    order = np.argsort(expected_p)
    counts, expected = counts[order], n * expected_p[order]
    # Cells that expect little are joined with their neighbours.
    cell = np.minimum(np.floor(np.cumsum(expected) / 8), np.floor(n / 8) - 1).astype(int)
    observed, expected = np.bincount(cell, counts), np.bincount(cell, expected)
    used = expected > 0
    df = used.sum() - 1
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    if df == 0:
        return True
    critical = df * (1 - 2 / (9 * df) + 3.72 * np.sqrt(2 / (9 * df))) ** 3
    return statistic < critical
