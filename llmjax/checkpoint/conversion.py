"""Rewrites a model as an orbax checkpoint."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from ..config import DTYPES
from ..errors import ConfigError
from .architecture import require_decoder
from .base import FLOAT_TYPES
from .detect import open_checkpoint
from .load import load_weights, own_dtype


def convert(
    src: str | Path, dst: str | Path, *, dtype: str = "auto", progress: bool = True
) -> Path:
    """Writes the model at `src` as an orbax folder that loads like any other model.

    The folder appears under its name when it is complete.

    Args:
        dtype: of the weights; "auto" keeps the checkpoint's own, float32 where it is
            quantised (dequantised weights are exact there).

    Returns:
        `dst`.

    Raises:
        ConfigError: `dst` exists already or cannot be written.
        ModelLoadError: `src` cannot be loaded.
    """
    from .orbax_folder import write_orbax  # slow to import, as `open_checkpoint` says

    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    src, dst = Path(src).expanduser(), Path(dst).expanduser()
    if dst.exists():
        raise ConfigError(f"{dst} exists already; remove it or choose another name")
    checkpoint = open_checkpoint(src)
    found, table = checkpoint.read_architecture()
    config = require_decoder(found)
    quantised = any(info.type_name not in FLOAT_TYPES for info in checkpoint.tensors.values())
    own = None if quantised else own_dtype(checkpoint, table)
    chosen = own or jnp.dtype(jnp.float32) if dtype == "auto" else jnp.dtype(dtype)
    host = SingleDeviceSharding(_host_device())
    with _scratch_beside(dst) as scratch:
        _, state = load_weights(
            checkpoint, config, table, chosen, lambda path, shape: host, progress=progress
        )
        arrays = {".".join(map(str, keys)): leaf[...] for keys, leaf in nnx.to_flat_state(state)}
        folder = Path(scratch) / dst.name
        folder.mkdir()
        write_orbax(folder, config, arrays)
        checkpoint.copy_text_side(folder)
        os.rename(folder, dst)
    return dst


def _scratch_beside(dst: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{dst.name}.", dir=dst.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {dst}: {error}") from error


def _host_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        return jax.local_devices()[0]
