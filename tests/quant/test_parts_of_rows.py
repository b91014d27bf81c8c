"""Codes of some places are read without the others."""

from __future__ import annotations

import numpy as np
import pytest
from quant_files import awq_gemm_tensors, awq_gemv_tensors, gptq_tensors, make_folder
from quant_oracles import our_oracle

from llmjax.checkpoint.data_file import DataFile
from llmjax.checkpoint.detect import open_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FOLDERS = {
    "GPTQ": (GPTQ, gptq_tensors, {"symmetric": False}),
    "GPTQ, 3 bits": (GPTQ | {"bits": 3}, gptq_tensors, {"bits": 3}),
    "GPTQ, act-order": (GPTQ, gptq_tensors, {"act_order": True}),
    "AWQ": (AWQ, awq_gemm_tensors, {"symmetric": False}),
    "AWQ, gemv": (AWQ | {"version": "gemv"}, awq_gemv_tensors, {"symmetric": False}),
}
OURS = ["ct-mixed", "ct-w4a8", "ct-nvfp4", "ct-mxfp8", "bnb-nf4-nested", "bnb-int8"]
READS_ALL = ("bnb-nf4-nested",)
"""Whose rows are no whole bytes."""


@pytest.mark.parametrize("name", [*FOLDERS, *OURS])
def test_codes_of_some_places(name, tmp_path, tiny_model, monkeypatch):
    if name in FOLDERS:
        settings, pack_as, how = FOLDERS[name]
        path = make_folder(tmp_path / "m", tiny_model, settings, pack_as, **how).write()
    else:
        path = our_oracle(name, tmp_path)
    counted = []
    read = DataFile._read_to

    def count(self, out, offset):
        counted.append(len(out))
        return read(self, out, offset)

    monkeypatch.setattr(DataFile, "_read_to", count)

    def read_bytes(matrix, *asked):
        counted.clear()
        found = matrix.rows(*asked)
        return found, sum(counted)

    for matrix in open_checkpoint(path).matrices.values():
        (N, K), _ = matrix.shape, matrix.coding
        whole, of_all = read_bytes(matrix, 0, N)
        none, of_none = read_bytes(matrix, 0, N, slice(0, 0))
        half, of_half = read_bytes(matrix, 0, N, slice(K // 2, K))
        some = matrix.rows(8, 24, slice(16, 48))
        np.testing.assert_array_equal(half.codes, whole.codes[:, K // 2 :])
        np.testing.assert_array_equal(some.codes, whole.codes[8:24, 16:48])
        np.testing.assert_array_equal(none.scales, whole.scales)
        np.testing.assert_array_equal(some.scales, whole.scales[8:24])
        assert none.codes.shape == (N, 0)
        if whole.minima is not None:
            np.testing.assert_array_equal(half.minima, whole.minima)
        if name not in READS_ALL and matrix.order is None:
            # The scales, and half of the codes; 3 bits of 32 inputs are a piece.
            assert of_half - of_none <= (of_all - of_none) * 2 / 3
