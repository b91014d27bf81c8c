"""Triton's own interpreter in the place of jax-triton: kernels on a CPU, program by program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

# Read when Triton is first imported: its own helpers are interpreted as well, or not.
os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

GUARD = 1 << 16
"""Bytes around an array."""


class Memory:
    """A numpy array with what the interpreter asks of a tensor on a device."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def untyped_storage(self) -> Memory:
        return self

    def cpu(self) -> Memory:
        return self

    def new_empty(self, size: int, device: str) -> Memory:
        return Memory(np.empty(size, self.dtype))

    def set_(self, storage: Memory, offset: int, size: Any, stride: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def copy_(self, other: Memory) -> None:
        """Nothing: the host's memory is the device's."""


class Guarded(Memory):
    """A copy of an array between bytes of 255."""

    def __init__(self, array: np.ndarray):
        self._around = np.full(array.nbytes + 2 * GUARD, 255, np.uint8)
        inside = self._around[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        super().__init__(inside)

    def is_intact(self) -> bool:
        return bool((self._around[:GUARD] == 255).all() and (self._around[-GUARD:] == 255).all())


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    *,
    gpu: object,
    warps: int = 4,
    stages: int = 1,
    **constants: Any,
) -> list[jax.Array]:
    """As `triton_call.launch`. What a kernel does not write of its outputs is NaN (or 255), and
    so is what lies around every array, which it must not touch."""
    arguments = [x if isinstance(x, int | float) else Guarded(np.asarray(x)) for x in inputs]
    results: dict[int, Memory] = {to: arguments[source] for source, to in aliases.items()}
    for i, output in enumerate(outputs):
        if i not in results:
            results[i] = Guarded(np.full(output.shape, np.nan, output.dtype))
    made = [results[i] for i in range(len(outputs))]
    with np.errstate(all="ignore"):
        kernel[grid](*arguments, *made, **constants)
    for memory in (*arguments, *made):
        assert not isinstance(memory, Guarded) or memory.is_intact(), f"{kernel} wrote outside"
    return [jnp.asarray(memory.array) for memory in made]


def _dot(plain: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits, and would multiply these."""

    def values(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(
            x.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32
        )

    return lambda self, a, b, *rest: plain(self, values(a), values(b), *rest)


def _cast(plain: Any) -> Any:
    """It cuts float32 off to bfloat16, where a GPU rounds."""

    def cast(self, x: Any, to: Any, *rest: Any) -> Any:
        if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return plain(self, x, to, *rest)
        bits = x.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    return cast


def _patch_tensor(plain: Any) -> Any:
    """It keeps scalars as arrays of one element, which numpy 2.5 makes no integers of."""

    def patch(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patch


_builder = interpreter.InterpreterBuilder
_builder.create_dot = _dot(_builder.create_dot)
_builder.cast_impl = _cast(_builder.cast_impl)
_builder.create_fp_to_fp = _cast(_builder.create_fp_to_fp)
interpreter._patch_lang_tensor = _patch_tensor(interpreter._patch_lang_tensor)
