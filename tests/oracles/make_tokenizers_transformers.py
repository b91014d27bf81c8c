"""Make tests/tokenizer/fixtures/{smollm2,transformers,chat}.json.xz: transformers' answers.

Needs transformers 5 (no torch) and a folder with the GGUF files named below:

    python tests/oracles/make_tokenizers_transformers.py FOLDER
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

from chat_cases import CASES, SPECIAL
from tokenizer_texts import texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.reader import read_gguf_metadata

FIXTURES = Path(__file__).parents[2] / "tests/tokenizer/fixtures"
MODELS = {
    "SmolLM2-135M-Instruct*.gguf": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "gemma-3-270m*.gguf": ["<end_of_turn>", "<table>", "    ", "\n\n\n", "\t\t"],
    "qwen2.5-coder-0.5b*.gguf": ["<|im_start|>", "<|im_end|>", "<tool_call>"],
}


def answers(file: Path, specials: list[str]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if "SmolLM2" in file.name:
        # transformers' GGUF reader does not know the pre-tokenizer "smollm"; this is the one
        # in SmolLM2's own tokenizer.json.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    lines = texts(specials)
    ids = [tokenizer.encode(line) for line in lines]
    return {
        "texts": lines,
        "ids": ids,
        "decoded": [tokenizer.decode(i, clean_up_tokenization_spaces=False) for i in ids],
        "visible": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
    }


def chat(templates: dict[str, str]) -> list[dict[str, Any]]:
    backend = Tokenizer(
        models.WordLevel({"<unk>": 0, **{t: i for i, t in enumerate(SPECIAL.values(), 1)}}, "<unk>")
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    out = []
    for name, messages, arguments in CASES:
        case = {"template": name, "messages": messages, "arguments": arguments}
        try:
            case["text"] = tokenizer.apply_chat_template(
                messages, chat_template=templates[name], tokenize=False, **arguments
            )
        except Exception as error:
            case["error"] = str(error)
        out.append(case)
    return out


def write(name: str, content: object) -> None:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (FIXTURES / f"{name}.json.xz").write_bytes(
        lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    )


def main(folder: Path) -> None:
    files = {pattern: next(folder.glob(f"**/{pattern}")) for pattern in MODELS}
    write("transformers", {p: answers(file, MODELS[p]) for p, file in files.items()})
    templates = {f.stem: f.read_text() for f in (FIXTURES / "templates").glob("*.jinja")}
    for name, pattern in (("smollm2", "SmolLM2*"), ("qwen25", "qwen2.5*")):
        file = next(file for key, file in files.items() if key.startswith(pattern[:5]))
        arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
        metadata, _ = read_gguf_metadata(str(file), arrays)
        templates[name] = metadata["tokenizer.chat_template"]
        if name == "smollm2":
            write(name, {k: v for k, v in metadata.items() if k.startswith("tokenizer.")})
    write("chat", {"templates": templates, "cases": chat(templates)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
