"""What transformers, compressed-tensors and gptqmodel answer to folders that llmjax quantised.

In an environment with those: `python tests/oracles/make_quantised.py OUT`, where
`tests/quantize/peer_folders.py OUT` has written the folders. Writes
tests/quantize/fixtures/peers.npz: of each folder the logits [T V] of the same ids.

GPTQ and AWQ are read by gptqmodel, which computes in float16; four-bit floats in bfloat16, as no
other type loads them; all others in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from gptqmodel import BACKEND, GPTQModel
from transformers import AutoModelForCausalLM

FIXTURE = Path(__file__).parents[1] / "quantize" / "fixtures" / "peers.npz"
IDS = torch.arange(7, 19)[None] * 5 % 256


def load(folder: Path) -> torch.nn.Module:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    backends = {"gptq": BACKEND.GPTQ_TORCH, "awq": BACKEND.TORCH_AWQ}
    backend = backends.get(settings["quant_method"])
    if backend is None:
        dtype = torch.bfloat16 if "fp4" in settings["format"] else torch.float32
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return GPTQModel.load(str(folder), device="cpu", dtype=torch.float16, backend=backend).model


@torch.no_grad()
def logits(folder: Path) -> np.ndarray:
    return load(folder).eval()(IDS).logits[0].float().numpy()


def main() -> None:
    out, found = Path(sys.argv[1]), {}
    for folder in sorted(path for path in out.iterdir() if path.is_dir() and path.name != "source"):
        found[folder.name] = logits(folder)
        ours = np.load(out / f"{folder.name}.npy")
        print(f"{folder.name:20} {np.abs(found[folder.name] - ours).max():.2e}", flush=True)
    FIXTURE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FIXTURE, **{k: v.astype(np.float32) for k, v in found.items()})


main()
