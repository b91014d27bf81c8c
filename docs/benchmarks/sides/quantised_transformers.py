"""What transformers makes of a quantised folder.

Usage: quantised_transformers.py FOLDER WINDOWS.npy COUNT PROMPT ANSWER

Prints a line of JSON: "nll", the mean loss of each of COUNT windows, and "ids": the windows' first
PROMPT tokens and the ANSWER likeliest ones, one after the other. Products are in float32 where the
format's reader allows; inputs are rounded where the folder says so.
"""

import json
import sys

import numpy as np
import torch
import transformers
import worker
from transformers import AutoModelForCausalLM

answers = worker.claim_stdout()
folder, windows, *numbers = sys.argv[1:]
count, prompt, answer = map(int, numbers)
ids = torch.tensor(np.load(windows)[:count].astype(np.int64))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
losses = []
with torch.no_grad():
    for window in ids:
        found = model(window[None]).logits[0, :-1].float().log_softmax(-1)
        losses.append(-found.gather(1, window[1:, None]).mean().item())
    given = ids[:, :prompt]
    texts = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        min_new_tokens=answer,
        max_new_tokens=answer,
        do_sample=False,
    )
version = f"transformers {transformers.__version__}"
print(json.dumps({"version": version, "nll": losses, "ids": texts.tolist()}), file=answers)
