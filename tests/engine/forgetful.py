"""A model that forgets as `cache/eviction.py` says, computed densely: what the engine must say.

Runs of tokens between evictions are computed one after the other; each layer's keys and values
are kept in an array a layer, from which rows are taken as tokens leave.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.nn.rope import shift


class Forgetful:
    """An attention context; `forget` after each run that ends where tokens leave."""

    def __init__(self, config, eviction):
        self.config, self.eviction = config, eviction
        self.first = {}  # of each layer the keys of the first tokens, as they were
        self.rows = {}  # and all that is left: keys, values
        self.weights = {}
        self.start = 0

    def _windowed(self, layer):
        window = self.config.windows[layer]
        return window is not None and window < self.eviction.budget

    def attend(self, layer, q, k, v, spec):
        T, N, _ = q.shape
        K = k.shape[1]
        if layer in self.rows:
            keys, values = self.rows[layer]
            k, v = jnp.concatenate([keys, k]), jnp.concatenate([values, v])
        else:
            self.first[layer] = k[: self.eviction.kept]
        self.rows[layer] = (k, v)
        k, v = (jnp.repeat(x, N // K, axis=1) for x in (k, v))
        scores = jnp.einsum("tnh,cnh->ntc", q, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        distance = (len(k) - T + np.arange(T))[:, None] - np.arange(len(k))[None]
        seen = distance >= 0
        if self._windowed(layer):
            seen &= distance < self.config.windows[layer]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        self.weights[layer] = np.asarray(weights)
        return jnp.einsum("ntc,cnh->tnh", weights, v)

    def forget(self, dropped):
        for layer, (k, v) in self.rows.items():
            if self._windowed(layer):
                continue
            keep = self._selected(layer) if self.eviction.selects else self._sinks(len(k))
            k, v = (np.stack([np.asarray(x)[i, h] for h, i in enumerate(keep)], 1) for x in (k, v))
            if not self.eviction.selects:
                by = shift(self.config.ropes[layer], jnp.full(1, dropped))
                k[: self.eviction.kept] = turned(np.asarray(self.first[layer]), by)
            self.rows[layer] = (jnp.asarray(k), jnp.asarray(v))

    def _sinks(self, count):
        e = self.eviction
        keep = [*range(e.kept), *range(e.kept + e.quantum, count)]
        return [keep] * self.config.num_kv_heads

    def _selected(self, layer):
        e, K = self.eviction, self.config.num_kv_heads
        mass = self.weights[layer][:, -e.looks_back :]
        mass = mass.reshape(K, -1, *mass.shape[1:]).sum((1, 2))
        keep = []
        for head in mass:
            old = e.budget - e.recent
            best = [head[:old][max(0, i - 3) : i + 4].max() for i in range(old)]
            best[:4] = [np.inf] * 4
            chosen = np.argsort(-np.array(best), kind="stable")[: e.kept]
            keep.append([*sorted(chosen), *range(old, len(head))])
        return keep


def turned(keys, by):
    cos, sin = np.asarray(by.cos)[0], np.asarray(by.sin)[0]
    half = len(cos)
    z = (keys[..., :half] + 1j * keys[..., half : 2 * half]) * (cos + 1j * sin)
    return np.concatenate([z.real, z.imag, keys[..., 2 * half :]], -1)


def logprobs(model, eviction, tokens):
    """float32 log-probabilities after each of the tokens, [T, V]."""
    context = Forgetful(model.config, eviction)
    out, start = [], 0
    while start < len(tokens):
        if start and eviction.dropped(start):
            context.forget(eviction.dropped(start))
        end = min(len(tokens), eviction.run_end(start))
        at = jnp.arange(start, end)
        hidden = model.hidden(jnp.array(tokens[start:end]), at, at + 1, context)
        out.append(jax.nn.log_softmax(model.logits(hidden)))
        start = end
    return np.concatenate(out)
