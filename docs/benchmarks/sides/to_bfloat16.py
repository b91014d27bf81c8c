"""A GGUF file as the safetensors folder in bfloat16 that vLLM takes. Usage: to_bfloat16.py
MODEL.gguf FOLDER"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

file, folder = Path(sys.argv[1]), sys.argv[2]
where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
model = AutoModelForCausalLM.from_pretrained(
    **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
# What is no longer quantised must not be said, or taken, to be.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
