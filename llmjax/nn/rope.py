"""Rotary position embedding (Su et al., 2021) and its published context extensions.

linear: Chen et al. 2023. dynamic: NTK-aware, growing with the sequence. llama3: Llama 3.1.
yarn: Peng et al. 2023. longrope: Ding et al. 2024. Frequencies match transformers'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: base of the geometric frequency series.
        dim: channels of a head that rotate (less than head_dim where partial).
        kind: scaling, by the names of Hugging Face's `rope_type`.
        factor: context extension factor.
        original_max_position: context length before scaling.
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
        attention_factor: multiplies cos and sin (yarn, longrope); None derives it.
        short_factor, long_factor: longrope, `dim // 2` divisors each.
        freq_factors: explicit divisors of the frequencies, `dim // 2` (GGUF's
            rope_freqs.weight), applied as they are.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    freq_factors: tuple[float, ...] = ()

    def regime(self, prompt_len: int) -> int:
        """Prompts of the same regime rotate a token at the same position by the same angles."""
        if self.kind not in ("dynamic", "longrope") or prompt_len <= self.original_max_position:
            return 0
        return prompt_len if self.kind == "dynamic" else 1


class Rotation(NamedTuple):
    """cos and sin of each token's angles, float32, [T, dim // 2]."""

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]


def rotation(
    config: RopeConfig, positions: Int[Array, " T"], context_lens: Int[Array, " T"]
) -> Rotation:
    """The angles at which to rotate each token's queries and keys.

    Args:
        positions: of the tokens.
        context_lens: how long the sequence is taken to be at each token: its prompt's
            length for prompt tokens, position + 1 after. "dynamic" and "longrope" choose
            their frequencies by it, as transformers does when it computes a prompt in one
            go and then extends it; so the result does not depend on chunking.
    """
    frequencies = _frequencies(config, context_lens)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    factor = _attention_factor(config)
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def shift(config: RopeConfig, by: Int[Array, " T"]) -> Rotation:
    """The angles that take keys `by` positions on from where they were rotated to.

    Not of "dynamic" and "longrope", whose angles depend on more than the position.
    """
    angles = by[:, None].astype(jnp.float32) * _frequencies(config, by)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "T heads H"], by: Rotation) -> Float[Array, "T heads H"]:
    """Rotates the first 2R channels of each head, pairing channel i with i + R."""
    half = by.cos.shape[-1]
    cos, sin = by.cos[:, None], by.sin[:, None]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = (first * cos - second * sin, second * cos + first * sin)
    parts = [part.astype(x.dtype) for part in turned]
    return jnp.concatenate([*parts, x[..., 2 * half :]], axis=-1)


def divisors(config: RopeConfig) -> Float[np.ndarray, " R"]:
    """What each frequency is divided by, of kinds whose frequencies are always the same."""
    scaled = _frequencies(config, jnp.zeros(1, jnp.int32))
    return _geometric(config.theta, config.dim) / np.asarray(scaled)


def _frequencies(config: RopeConfig, context_lens: Array) -> Array:
    """Radians per position: [R], or [T, R] where they depend on the context's length."""
    base = _geometric(config.theta, config.dim)
    if config.freq_factors:
        base = base / np.array(config.freq_factors, np.float32)
    match config.kind:
        case "default":
            return jnp.asarray(base)
        case "linear":
            return jnp.asarray(base / np.float32(config.factor))
        case "llama3":
            return jnp.asarray(_llama3(base, config))
        case "yarn":
            return jnp.asarray(_yarn(base, config))
        case "longrope":
            short = base / np.array(config.short_factor, np.float32)
            long = base / np.array(config.long_factor, np.float32)
            extended = context_lens > config.original_max_position
            return jnp.where(extended[:, None], long, short)
        case "dynamic":
            return _dynamic(config, context_lens)


def _geometric(theta: float, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)


def _dynamic(config: RopeConfig, context_lens: Array) -> Array:
    original = config.original_max_position
    length = jnp.maximum(context_lens, original).astype(jnp.float32)
    growth = config.factor * length / original - (config.factor - 1)
    theta = config.theta * growth ** (config.dim / (config.dim - 2))
    exponents = np.arange(0, config.dim, 2, dtype=np.float32) / np.float32(config.dim)
    return 1.0 / theta[:, None] ** exponents


def _llama3(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    wavelength = 2 * math.pi / base
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * base / config.factor + smooth * base
    scaled = np.where(wavelength > low, base / config.factor, base)
    medium = (wavelength <= low) & (wavelength >= high)
    return np.where(medium, blended, scaled).astype(np.float32)


def _yarn(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    def channel_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = channel_of(config.beta_fast), channel_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    span = max(high - low, 0.001)
    ramp = np.clip((np.arange(config.dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return (base / config.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(config.factor) + 1 if config.factor > 1 else 1.0

        if config.mscale and config.mscale_all_dim:
            return mscale(config.mscale) / mscale(config.mscale_all_dim)
        return mscale(1.0)
    if config.kind == "longrope":
        factor = config.factor
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(config.original_max_position))
    return 1.0
