"""Rows to quantise, of many kinds, and an importance of their inputs."""

from __future__ import annotations

import numpy as np


def rows() -> tuple[np.ndarray, np.ndarray]:
    """float32 [24, 512] and [512]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((24, 512)) * 0.05
    x[1] = 0
    x[2, 256:] = 0
    x[3], x[4] = 0.3, -0.3
    x[5] = np.abs(x[5])
    x[6] *= rng.random(512) > 0.9
    x[7, 40:80] = 1e-20
    x[8] = np.round(x[8] * 100) / 100
    x[9] *= 1e-6
    x[10] *= 1e4
    x[11] = np.linspace(-1, 1, 512)
    x[12:] *= 10 ** rng.uniform(-3, 1, (12, 512))
    importance = rng.random(512) ** 4 * 10
    importance[:40] = 0
    return x.astype(np.float32), importance.astype(np.float32)
