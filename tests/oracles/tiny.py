"""Tiny random models and what transformers says of them.

Run in an environment with torch and transformers; see `make_families.py`.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
SEQUENCE = 160
POSITIONS = (0, 1, 31, 32, 63, 64, 100, 159)
PROMPT, GREEDY = 16, 24
# float32 sums in another order move logits by about 1e-5; a greedy step closer than this
# would test rounding
MIN_MARGIN = 5e-3


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def random_parameter(name: str, shape: tuple[int, ...], rng: torch.Generator, gemma: bool):
    """Large enough that attention is far from uniform and no norm is near one."""
    normal = torch.randn(shape, generator=rng)
    if name.endswith("norm.weight"):
        multiplier = 0.5 + torch.rand(shape, generator=rng)
        if name == "model.norm.weight":
            multiplier *= 3
        return multiplier - 1 if gemma else multiplier
    if name.endswith(".bias"):
        return 0.3 * normal
    if "embed_tokens" in name:
        return 0.1 * normal  # small, or a tied head repeats its input
    gain = 0.6 if "lm_head" in name else 1.6
    return gain * normal / shape[-1] ** 0.5


def write_config(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_weights(folder: Path, *, bfloat16: bool = False) -> None:
    """Random weights for the folder's config.json, as the hub would have them."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    rng = seeded(folder.name)
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = random_parameter(name, tuple(value.shape), rng, "gemma" in config.model_type)
        tensors[name] = value.bfloat16() if bfloat16 else value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(config: dict, weights: Path):
    """transformers' model of `config` with the weights beside `weights`/config.json."""
    with tempfile.TemporaryDirectory() as tmp:
        write_config(Path(tmp), config)
        Path(tmp, "model.safetensors").symlink_to(weights / "model.safetensors")
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    return model.eval()


@torch.no_grad()
def logits(model, ids: list[int]) -> np.ndarray:
    """[T V] of one sequence computed at once, without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def greedy(model, prompt: list[int]) -> tuple[list[int], float]:
    """The continuation, and the smallest gap between the best token and the next."""
    ids, margin = list(prompt), np.inf
    for _ in range(GREEDY):
        last = logits(model, ids)[-1]
        second, best = np.argsort(last)[-2:]
        margin = min(margin, float(last[best] - last[second]))
        ids.append(int(best))
    return ids[len(prompt) :], margin


def reference(model, name: str, *, hidden_states: bool = False) -> dict[str, np.ndarray]:
    """What ref.npz holds.

    ids [160], positions [8], logits [8 V] there; prompt [16], its last prompt_logits [V]
    when computed alone (dynamic and longrope differ by length), greedy [24]; hidden
    [L+1 16 D] of the prompt, the last one normed.
    """
    vocab = model.config.vocab_size
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    ids = rng.integers(0, vocab, SEQUENCE).tolist()
    for start in range(SEQUENCE - PROMPT):
        prompt = ids[start : start + PROMPT]
        tokens, margin = greedy(model, prompt)
        if margin > MIN_MARGIN and len(set(tokens)) > 6:
            break
    else:
        raise AssertionError(f"{name}: every prompt has a near tie")
    out = {
        "ids": np.array(ids, np.int32),
        "positions": np.array(POSITIONS, np.int32),
        "logits": logits(model, ids)[list(POSITIONS)],
        "prompt": np.array(prompt, np.int32),
        "prompt_logits": logits(model, prompt)[-1],
        "greedy": np.array(tokens, np.int32),
    }
    if hidden_states:
        with torch.no_grad():
            result = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
        out["hidden"] = torch.stack([h[0] for h in result.hidden_states]).numpy()
    spread = float(np.abs(out["logits"]).max())
    assert 1 < spread < 50, f"{name}: largest logit {spread}"
    return out
