"""GPTQ, AWQ, SmoothQuant or rounding to nearest by llmcompressor, from the same windows as ours.

Usage: quantise_llmcompressor.py SRC DST WINDOWS.npy JSON, where JSON has "modifier" (nearest, gptq,
awq or smoothquant) and "scheme", a name of its own, or "weights" and "inputs", arguments of
`QuantizationArgs`.
"""

import json
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
from transformers import AutoModelForCausalLM, AutoTokenizer

src, dst, windows, asked = sys.argv[1:]
asked = json.loads(asked)
if not torch.cuda.is_available():
    # It pins memory, which needs an accelerator.
    IntermediatesCache._pin_intermediate = classmethod(lambda cls, i: None)

what = {"ignore": ["lm_head"]}
if "scheme" in asked:
    what |= {"targets": "Linear", "scheme": asked["scheme"]}
else:
    parts = {"weights": asked["weights"], "input_activations": asked.get("inputs")}
    args = {
        name: QuantizationArgs(**({"type": "int", "symmetric": True} | given))
        for name, given in parts.items()
        if given
    }
    what["config_groups"] = {"group_0": QuantizationScheme(targets=["Linear"], **args)}
recipe = {
    "nearest": lambda: [QuantizationModifier(**what)],
    "gptq": lambda: [GPTQModifier(**what)],
    "awq": lambda: [AWQModifier(), QuantizationModifier(**what)],
    "smoothquant": lambda: [
        SmoothQuantModifier(smoothing_strength=0.8),
        QuantizationModifier(**what),
    ],
}[asked["modifier"]]()

rows = np.load(windows).tolist()
data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
tokenizer = AutoTokenizer.from_pretrained(src)
model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16)
oneshot(
    model=model,
    tokenizer=tokenizer,
    dataset=data,
    recipe=recipe,
    max_seq_length=len(rows[0]),
    num_calibration_samples=len(rows),
)
model.save_pretrained(dst, save_compressed=True)
tokenizer.save_pretrained(dst)
