"""Make tests/oracles/data/{smollm2,gemma,qwen}.json: transformers' answers for real models.

    python tests/oracles/make_real.py smollm2|gemma|qwen FILE.gguf

Needs torch, transformers and gguf; takes a few minutes for each model on two cores.
Weights are dequantised to float32, as is all arithmetic. For each prompt: token ids, the
greedy continuation (past ends of sequence), and for each generated token the margin by
which its logit leads the next one, so that a test can tell an error from a near tie.

What transformers reads from a GGUF file is right but for these, which `_model` and
`_tokenizer` check or set:
- Gemma 3: the file says neither which layers slide nor the sliding layers' rope base nor
  the attention scale; the defaults of Gemma3TextConfig are those of the published
  google/gemma-3-270m (every sixth layer is full, 10,000, 256), which is asserted. RMS norm
  weights are stored with 1 added, which transformers takes off when loading.
- SmolLM2: `tokenizer.ggml.pre` is ignored; the published tokenizer cuts out single digits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import real_prompts
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

DATA = Path(__file__).parent / "data"
SHA256 = {
    "smollm2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "qwen": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
}
GEMMA = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
WINDOW_LENGTHS = [510, 511, 512, 513, 514, 1023, 1024, 1025, 1026]
TOP = 20
BATCH = 16


def main(name: str, path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256[name]:
        raise SystemExit(f"{path} has the sha256 {digest}, expected {SHA256[name]}")
    torch.set_num_threads(2)
    model, tokenizer = _model(name, path), _tokenizer(name, path)
    content = {
        "sha256": digest,
        **{"smollm2": smollm2, "gemma": gemma, "qwen": qwen}[name](model, tokenizer),
    }
    _write(DATA / f"{name}.json", content)


def _model(name: str, path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    if name == "gemma":
        wrong = {
            k: getattr(model.config, k) for k, v in GEMMA.items() if getattr(model.config, k) != v
        }
        if wrong:
            raise SystemExit(f"transformers read another Gemma from the file: {wrong}")
    if name == "qwen" and model.lm_head.weight is model.model.embed_tokens.weight:
        raise SystemExit("the file has a head of its own, but transformers tied it")
    return model


def _tokenizer(name: str, path: Path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if name == "smollm2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
    return tokenizer


def smollm2(model, tokenizer) -> dict:
    prompts = _continue(model, tokenizer, real_prompts.smollm2(), 64)
    longest = sorted(prompts, key=lambda p: -len(p["ids"]))[:3]
    return {"prompts": prompts, "logits": [_some_logits(model, p["ids"]) for p in longest]}


def gemma(model, tokenizer) -> dict:
    prompts = _continue(model, tokenizer, real_prompts.gemma(), 64)
    text = real_prompts.wikitext(20_000, 30_000)
    ids = tokenizer(text).input_ids[: max(WINDOW_LENGTHS)]
    window = []
    for n in WINDOW_LENGTHS:
        [output] = _greedy(model, [ids[:n]], 8)
        answers = {"output": output, "margins": _margins(model, ids[:n], output)}
        window.append({"length": n, **_top_logits(model, ids[:n]), **answers})
    return {"prompts": prompts, "window_ids": ids, "window": window}


def qwen(model, tokenizer) -> dict:
    encoded = [{"text": text, "ids": tokenizer(text).input_ids} for text in real_prompts.TEXTS]
    rendered = []
    for arguments in real_prompts.CONVERSATIONS:
        options = {"add_generation_prompt": True} | arguments
        messages = options.pop("messages")
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        rendered.append({**arguments, "rendered": text})
    return {
        "prompts": _continue(model, tokenizer, real_prompts.qwen(), 32),
        "encoded": encoded,
        "rendered": rendered,
    }


def _continue(model, tokenizer, prompts: list, count: int) -> list[dict]:
    given, encoded = [], []
    for prompt in prompts:
        if isinstance(prompt, str):
            given.append({"text": prompt})
            encoded.append(tokenizer(prompt).input_ids)
        else:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            given.append({"messages": prompt})
            encoded.append(tokenizer(text, add_special_tokens=False).input_ids)
    outputs = _greedy(model, encoded, count)
    for ids, output in zip(encoded, outputs, strict=True):
        print(len(ids), repr(tokenizer.decode(output))[:80], flush=True)
    rows = zip(given, encoded, outputs, strict=True)
    return [
        {**g, "ids": ids, "output": output, "margins": _margins(model, ids, output)}
        for g, ids, output in rows
    ]


@torch.no_grad()
def _greedy(model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy continuations, in padded batches of prompts of similar lengths."""
    model.generation_config.eos_token_id = None
    outputs: list[list[int]] = [[]] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(prompts), BATCH):
        rows = by_length[start : start + BATCH]
        width = max(len(prompts[i]) for i in rows)
        pads = [width - len(prompts[i]) for i in rows]
        tokens = torch.tensor([[0] * p + prompts[i] for p, i in zip(pads, rows, strict=True)])
        mask = torch.tensor([[0] * p + [1] * (width - p) for p in pads])
        new = model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=count)
        for i, row in zip(rows, new[:, width:].tolist(), strict=True):
            outputs[i] = row
    return outputs


@torch.no_grad()
def _margins(model, ids: list[int], output: list[int]) -> list[float]:
    """Leads of the continuation's logits, from one pass over the prompt and it, unpadded.

    That pass is the second opinion on the continuation: it may differ in near ties only.
    """
    tokens = torch.tensor([ids + output[:-1]])
    logits = model(tokens, logits_to_keep=len(output)).logits[0]
    values, top = logits.topk(2)
    margins = (values[:, 0] - values[:, 1]).tolist()
    wrong = [m for m, t, o in zip(margins, top[:, 0].tolist(), output, strict=True) if t != o]
    if any(m > 1e-4 for m in wrong):
        raise SystemExit(f"transformers disagrees with itself by {max(wrong)}")
    return [round(m, 5) for m in margins]


@torch.no_grad()
def _top_logits(model, ids: list[int]) -> dict:
    values, top = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].topk(TOP)
    return {"top_ids": top.tolist(), "top_logits": [round(v, 5) for v in values.tolist()]}


@torch.no_grad()
def _some_logits(model, ids: list[int]) -> dict:
    """At a few positions, the most likely tokens and others from all over the vocabulary."""
    logits = model(torch.tensor([ids])).logits[0]
    rows = []
    for position in (0, len(ids) // 2, len(ids) - 1):
        row = logits[position]
        tokens = sorted({*row.topk(TOP).indices.tolist(), *range(0, len(row), 1000)})
        values = [round(v, 5) for v in row[tokens].tolist()]
        rows.append({"position": position, "tokens": tokens, "logits": values})
    return {"ids": ids, "rows": rows}


def _write(path: Path, content: dict) -> None:
    """One line for each entry of the lists."""

    def lines() -> Iterator[str]:
        for key, value in content.items():
            rows = value if isinstance(value, list) and isinstance(value[0], dict) else None
            if rows is None:
                yield f"{_json(key)}: {_json(value)}"
            else:
                yield f"{_json(key)}: [\n" + ",\n".join(map(_json, rows)) + "\n]"

    path.write_text("{\n" + ",\n".join(lines()) + "\n}\n", encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
