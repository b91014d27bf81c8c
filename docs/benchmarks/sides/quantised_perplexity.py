"""How transformers reads quantised folders: perplexity on windows, and KL divergence to the floats.

Usage: quantised_perplexity.py FLOATS WINDOWS.json FOLDER... Prints a line of JSON a folder.
`WINDOWS.json` has "ids", which are cut into windows of 512. Products are in float32; inputs are
rounded where a folder says so. Needs torch, transformers, compressed-tensors and gptqmodel.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

WINDOW = 512


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def log_probabilities(model, window):
    return model(torch.tensor(window[None])).logits[0, :-1].float().log_softmax(-1)


def main():
    floats, windows, *folders = sys.argv[1:]
    ids = np.array(json.loads(Path(windows).read_text())["ids"])
    ids = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    model = load(floats)
    with tempfile.TemporaryFile() as file:
        shape = (len(ids), WINDOW - 1, model.config.vocab_size)
        wanted = np.memmap(file, np.float32, "w+", shape=shape)
        for i, window in enumerate(ids):
            wanted[i] = log_probabilities(model, window).numpy()
        for folder in [floats, *folders]:
            model, start = load(folder), time.monotonic()
            losses, divergences = [], []
            for window, true in zip(ids, wanted, strict=True):
                found, true = log_probabilities(model, window), torch.from_numpy(np.array(true))
                losses.append(-found.gather(1, torch.tensor(window[1:, None])).mean().item())
                divergences.append((true.exp() * (true - found)).sum(-1).mean().item())
            row = {
                "folder": Path(folder).name,
                "perplexity": float(np.exp(np.mean(losses))),
                "kl": float(np.mean(divergences)),
                "seconds": round(time.monotonic() - start, 1),
            }
            print(json.dumps(row), flush=True)


main()
