"""Codes that are small floats, as compressed-tensors has them: FP8 E4M3, NVFP4 and MXFP4.

Sources: OCP Microscaling Formats 1.0 (MXFP4: E2M1 in blocks of 32, scales E8M0); NVIDIA's NVFP4
(E2M1 in blocks of 16, scales E4M3, and one float32 scale of a tensor).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from llmjax_kernels.quant_matmul import RANGES

from .layer import Coded

E4M3_MAX, E2M1_MAX = RANGES["fp8_e4m3"][1], RANGES["e2m1"][1]
NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
FP8_BLOCK = 128
"""A side of a weight's block in DeepSeek's and Qwen's FP8."""
_E4M3_LEAST = 2.0**-9
_E2M1_EXPONENT = 2
"""Of E2M1's greatest power of two."""
_E8M0_BIAS = 127

Matrix = Float[np.ndarray, "N K"]


def fp8(weight: Matrix, granularity: str, dtype: np.dtype) -> Coded:
    """E4M3 with scales in `dtype`: one of the "tensor", of each "channel" (row), or "block"."""
    N, K = weight.shape
    if granularity == "block":
        greatest = _block_greatest(weight)
    else:
        axis = None if granularity == "tensor" else 1
        greatest = np.max(np.abs(weight), axis=axis, keepdims=True)
    scale = _stored(greatest / E4M3_MAX, dtype)
    spread = scale
    if granularity == "block":
        spread = scale.repeat(FP8_BLOCK, 0)[:N].repeat(FP8_BLOCK, 1)[:, :K]
    # Rounded to the scales' type first, as compressed-tensors does: the bytes are the same.
    codes = _e4m3((weight / spread).astype(dtype).astype(np.float32))
    stored = scale.reshape(-1) if granularity == "tensor" else scale
    tensors = {"weight": codes, "weight_scale": stored.astype(dtype)}
    return Coded(codes.astype(np.float32) * spread, tensors)


def nvfp4(weight: Matrix, greatest: float) -> Coded:
    """E2M1 in blocks of 16 inputs.

    Args:
        greatest: magnitude among all matrices that kernels take as one, which share a scale.
    """
    blocks = weight.reshape(len(weight), -1, NVFP4_BLOCK)
    whole = np.float32(E4M3_MAX * E2M1_MAX / (greatest or 1.0))
    scales = np.max(np.abs(blocks), axis=2) / np.float32(E2M1_MAX) * whole
    scales = _e4m3(np.maximum(scales, np.float32(_E4M3_LEAST)))
    spread = (scales.astype(np.float32) / whole)[:, :, None]
    codes, values = _e2m1(blocks / spread)
    tensors = {
        "weight_packed": _pairs(codes.reshape(weight.shape)),
        "weight_scale": scales,
        "weight_global_scale": whole.reshape(1),
    }
    return Coded((values * spread).reshape(weight.shape), tensors)


def mxfp4(weight: Matrix) -> Coded:
    """E2M1 in blocks of 32 inputs, scales a power of two.

    The specification's exponent lets a block's greatest saturate. Where that would take more than
    a seventh of it, from 7 steps on, the next exponent is taken, as compressed-tensors does.
    """
    blocks = weight.reshape(len(weight), -1, MXFP4_BLOCK)
    fraction, exponents = np.frexp(np.max(np.abs(blocks), axis=2))  # the fraction is 0.5 to 1
    exponents = exponents - 1 - _E2M1_EXPONENT + (fraction >= 7 / 8)
    exponents = np.clip(exponents, -_E8M0_BIAS, _E8M0_BIAS)
    scale = np.ldexp(np.float32(1), exponents)[:, :, None]
    codes, values = _e2m1(blocks / scale)
    tensors = {
        "weight_packed": _pairs(codes.reshape(weight.shape)),
        "weight_scale": (exponents + _E8M0_BIAS).astype(np.uint8),
    }
    return Coded((values * scale).reshape(weight.shape), tensors)


def _block_greatest(weight: Matrix) -> Float[np.ndarray, "rows columns"]:
    (N, K), side = weight.shape, FP8_BLOCK
    padded = np.pad(np.abs(weight), ((0, -N % side), (0, -K % side)))
    return padded.reshape(-(-N // side), side, -(-K // side), side).max(axis=(1, 3))


def _stored(scale: Float[np.ndarray, "*S"], dtype: np.dtype) -> Float[np.ndarray, "*S"]:
    """As rounded where it is stored, and above zero."""
    least = float(ml_dtypes.finfo(dtype).tiny)
    return np.maximum(scale, np.float32(least)).astype(dtype).astype(np.float32)


def _e4m3(values: Float[np.ndarray, "*S"]) -> np.ndarray:
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


def _e2m1(
    values: Float[np.ndarray, "*S"],
) -> tuple[UInt8[np.ndarray, "*S"], Float[np.ndarray, "*S"]]:
    codes = np.clip(values, -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8), codes.astype(np.float32)


def _pairs(codes: UInt8[np.ndarray, "N K"]) -> UInt8[np.ndarray, "N half"]:
    """Two codes a byte, the first in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4
