"""GPTQ, AWQ, SmoothQuant or rounding to nearest by llmcompressor, from the same windows as ours.

Usage: quantise_llmcompressor.py SRC DST WINDOWS.npy gptq|awq|smoothquant|int8|fp8|nvfp4|mxfp4 GROUP
"""

import sys

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM

src, dst, windows, method, group = sys.argv[1:]
# It pins memory, which needs an accelerator.
IntermediatesCache._pin_intermediate = classmethod(lambda cls, i: None)


def int4(symmetric):
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=int(group)
    )
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}


def plain(scheme):
    return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])


RECIPES = {
    "gptq": lambda: [GPTQModifier(config_groups=int4(True), ignore=["lm_head"])],
    "awq": lambda: [
        AWQModifier(),
        QuantizationModifier(config_groups=int4(False), ignore=["lm_head"]),
    ],
    "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.8), plain("W8A8")],
    "int8": lambda: [plain("W8A8")],
    "fp8": lambda: [plain("FP8_DYNAMIC")],
    "nvfp4": lambda: [plain("NVFP4A16")],
    "mxfp4": lambda: [plain("MXFP4A16")],
}

rows = np.load(windows).tolist()
data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16)
oneshot(
    model=model,
    dataset=data,
    recipe=RECIPES[method](),
    max_seq_length=len(rows[0]),
    num_calibration_samples=len(rows),
)
model.save_pretrained(dst, save_compressed=True)
