"""The loops that measure what the CPU can do."""

from __future__ import annotations

from ctypes import c_int64, c_uint64, c_void_p

import numpy as np
import pytest

from llmjax.bench import roofline
from llmjax.errors import ConfigError
from llmjax_kernels.native import available, instruction_set, library

pytestmark = pytest.mark.skipif(not available(), reason="the native kernels are not built")


def test_reading_reads_every_word():
    words = np.random.default_rng(0).integers(0, 2**64, 64 * 5, np.uint64)
    read = library().llmjax_read
    read.argtypes, read.restype = [c_void_p, c_int64], c_uint64
    assert read(words.ctypes.data, words.nbytes) == int(words.sum(dtype=np.uint64))


def test_operations_are_counted_by_the_instruction():
    ops = library().llmjax_int8_ops
    ops.argtypes, ops.restype = [c_int64], c_int64
    # 12 instructions a round on 64 or 32 bytes, a product and a sum of each; or one loop of 64;
    # or 4 of which each multiplies 16 x 64 with 64 x 16.
    a_round = {
        "amx": 4 * 16 * 16 * 64 * 2,
        "avx512": 12 * 64 * 2,
        "avx2": 12 * 32 * 2,
        "generic": 64 * 2,
    }
    assert ops(5) == 5 * a_round[instruction_set()]


def test_measuring_gives_positive_rates():
    limits = roofline.measure(buffer_bytes=1 << 16, rounds=10)
    assert limits.read > 0 and limits.int8 > 0 and limits.threads >= 1
    assert limits.instruction_set == instruction_set()


def test_without_native_kernels_it_is_refused(monkeypatch):
    monkeypatch.setenv("LLMJAX_KERNELS", "xla")
    with pytest.raises(ConfigError, match="native CPU kernels"):
        roofline.measure()
