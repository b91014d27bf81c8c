"""Make tests/tokenizer/fixtures/{vocabularies,llamacpp}.json.xz: llama.cpp's token ids.

Needs gguf, tokenizers and xllamacpp (llama.cpp in a wheel), and WikiText-2:

    python tests/oracles/make_tokenizers_llamacpp.py WIKITEXT2_TEST_TXT

Each vocabulary is put into a tiny model, which llama.cpp's own server loads.
"""

from __future__ import annotations

import json
import lzma
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from tokenizer_texts import texts
from tokenizer_vocabularies import byte_level, sentencepiece, wordpiece

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/tokenizer/fixtures"
PRE_TOKENIZERS = [
    "llama-bpe",
    "dbrx",
    "minicpm5",
    "jais-2",
    "qwen2",
    "qwen35",
    "laguna",
    "ufakzeka",
    "seed-coder",
    "bailingmoe",
    "exaone-moe",
    "gpt-2",
    "smollm",
    "gpt-4o",
    "granite-embed-multi-97m",
    "tekken",
    "deepseek-v3",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "bloom",
    "viking",
    "superbpe",
    "chameleon",
    "default",
]


def cases(corpus: Path) -> dict[str, tuple[str, dict[str, Any], list[str]]]:
    """Case -> (vocabulary, metadata to change, special tokens to write in texts)."""
    marks = ["<|im_start|>", "<|im_end|>", "<think>", "  x", "<｜tool▁call｜>"]
    plain = {"tokenizer.ggml.add_bos_token": False}
    out: dict[str, tuple[str, dict[str, Any], list[str]]] = {
        name: ("byte-level", {"tokenizer.ggml.pre": name, **plain}, marks)
        for name in PRE_TOKENIZERS
    }
    out["llama-bpe with BOS"] = ("byte-level", {"tokenizer.ggml.pre": "llama-bpe"}, marks)
    spm = ["</s>", "<unk>", "<|user|>", "\n\n", "<0x0A>", "▁"]
    out["sentencepiece"] = ("sentencepiece", {}, spm)
    no_prefix = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True}
    out["sentencepiece without prefix"] = ("sentencepiece", no_prefix, spm)
    out["wordpiece"] = ("wordpiece", {}, ["[MASK]"])
    out["wordpiece cased"] = ("wordpiece", {"tokenizer.ggml.normalizer.lowercase": False}, [])
    return out


def write_model(path: Path, metadata: dict[str, Any]) -> None:
    import gguf

    width, vocabulary = 32, len(metadata["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    ones, zeros = np.ones(width, np.float32), np.zeros((width, width), np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((vocabulary, width), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(model: str) -> None:
    """In a process of its own: texts on stdin, ids on the last line of stdout."""
    import xllamacpp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.warmup = model, port, False
    params.hostnames = ["127.0.0.1"]
    params.n_ctx, params.cpuparams.n_threads = 64, 1
    server = xllamacpp.Server(params)
    ids = []
    for text in json.load(sys.stdin):
        body = {"content": text, "add_special": True, "parse_special": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        ids.append(json.load(urllib.request.urlopen(request))["tokens"])
    del server
    print("\n" + json.dumps(ids))


def main(corpus: Path) -> None:
    vocabularies = {
        "byte-level": byte_level(corpus),
        "sentencepiece": sentencepiece(corpus),
        "wordpiece": wordpiece(corpus),
    }
    answers = {}
    for case, (vocabulary, changes, specials) in cases(corpus).items():
        lines = texts(specials)
        if vocabulary == "wordpiece":
            # llama.cpp keeps only the first letter of a Korean syllable when it strips accents.
            lines = [text for text in lines if not re.search("[가-힣]", text)]
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.gguf"
            write_model(model, vocabularies[vocabulary] | changes)
            done = subprocess.run(
                [sys.executable, __file__, "--serve", str(model)],
                input=json.dumps(lines),
                capture_output=True,
                text=True,
                check=True,
            )
        ids = json.loads(done.stdout.splitlines()[-1])
        answers[case] = {"vocabulary": vocabulary, "changes": changes, "texts": lines, "ids": ids}
        print(case, sum(map(len, ids)))
    for name, content in (("vocabularies", vocabularies), ("llamacpp", answers)):
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (FIXTURES / f"{name}.json.xz").write_bytes(lzma.compress(text.encode()))


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "--serve" else main(Path(sys.argv[1]))
