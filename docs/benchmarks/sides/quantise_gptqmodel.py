"""GPTQ or AWQ by gptqmodel, from the same windows as ours.

Usage: quantise_gptqmodel.py SRC DST WINDOWS.npy '{"bits": 4, "group_size": 64, ...}'
"""

import json
import os
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # by itself it has fewer than it asks for

import numpy as np
import torch
from gptqmodel import GPTQModel, QuantizeConfig

src, dst, windows, settings = sys.argv[1:]
rows = [
    {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.long)}
    for ids in np.load(windows).astype(np.int64)
]
model = GPTQModel.load(src, QuantizeConfig(device="cpu", **json.loads(settings)))
model.quantize(rows, batch_size=1)
model.save(dst)
