"""Tiny random models that embed or score, and what sentence-transformers says of them.

    pip install torch==2.13.0 transformers==5.24 sentence-transformers==6.2
    python tests/oracles/make_pooling.py [path of all-MiniLM-L6-v2]

Writes tests/pooling/fixtures/; with the path also tests/oracles/data/all-minilm-l6-v2.npz.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

FIXTURES = Path(__file__).parents[1] / "pooling" / "fixtures"
DATA = Path(__file__).parent / "data"
TEXTS, QUERY, LONG = json.loads((FIXTURES / "texts.json").read_text(encoding="utf-8")).values()
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
VOCAB = 300
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
}
SCORER = {"num_labels": 1, "id2label": {"0": "LABEL_0"}}
MODELS = {
    "bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "max_position_embeddings": 128,
        "is_matryoshka": True,
    },
    "bert-scorer": {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "max_position_embeddings": 128,
        **SCORER,
    },
    "roberta": {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "max_position_embeddings": 130,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
    },
    "roberta-scorer": {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "model_type": "xlm-roberta",
        "max_position_embeddings": 130,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        **SCORER,
    },
    "qwen3": {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "max_position_embeddings": 256,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}
POOLING = {"bert": "mean", "roberta": "cls", "qwen3": "lasttoken"}
LIMITS = {"bert": 100, "roberta": 128, "qwen3": 200}
PROMPTS = {"query": "Instruct: find what answers\nQuery: ", "document": ""}


def random_parameter(name: str, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=rng)
    if "norm" in name.lower() and name.endswith("weight"):
        return 0.5 + torch.rand(shape, generator=rng)
    if name.endswith(".bias"):
        return 0.3 * normal
    if "embed" in name:
        return 0.5 * normal
    return 1.6 * normal / shape[-1] ** 0.5


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB, special_tokens=BERT_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:8], trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


def byte_pieces(specials: list[str], post: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = post
    return tokenizer


def write_tokenizer(folder: Path, kind: str) -> None:
    if kind == "bert":
        tokenizer = word_pieces()
        named = dict(zip(("pad", "unk", "cls", "sep", "mask"), BERT_TOKENS, strict=True))
    elif kind == "xlm-roberta":
        post = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
        tokenizer = byte_pieces(ROBERTA_TOKENS, post)
        named = dict(zip(("cls", "pad", "sep", "unk", "mask"), ROBERTA_TOKENS, strict=True))
    else:
        end = processors.TemplateProcessing(
            single="$A <|endoftext|>",
            pair="$A $B <|endoftext|>",
            special_tokens=[("<|endoftext|>", 0)],
        )
        post = processors.Sequence([processors.ByteLevel(), end])
        tokenizer = byte_pieces(["<|endoftext|>"], post)
        named = {"pad": "<|endoftext|>", "eos": "<|endoftext|>"}
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {f"{name}_token": token for name, token in named.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if kind == "qwen3":
        config["padding_side"] = "left"
    if kind == "bert":
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(folder / "tokenizer_config.json", config)


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def write_model(name: str) -> Path:
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    write_json(folder / "config.json", SHAPE | MODELS[name])
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSequenceClassification if "scorer" in name else AutoModel
    model = kind.from_config(config)
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensors = {n: random_parameter(n, tuple(v.shape), rng) for n, v in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config.model_type)
    if name in POOLING:
        write_sentence_transformers(folder, name)
    return folder


def write_sentence_transformers(folder: Path, name: str) -> None:
    """As versions 2 to 4 did, which is how most models on the hub are."""
    parts = ["Transformer", "Pooling", "Normalize"][: 2 if name == "roberta" else 3]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{part}" if i else "",
            "type": f"sentence_transformers.models.{part}",
        }
        for i, part in enumerate(parts)
    ]
    write_json(folder / "modules.json", modules)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    pooling = {f"pooling_mode_{v}": m == POOLING[name] for m, v in modes.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **pooling})
    limits = {"max_seq_length": LIMITS[name], "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limits)
    if name == "qwen3":
        whole = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        write_json(folder / "config_sentence_transformers.json", whole)


def embed(model: SentenceTransformer, texts: list[str], **options: object) -> np.ndarray:
    """Each alone: padding changes nothing but rounding."""
    return np.concatenate([model.encode([t], **options) for t in texts]).astype(np.float32)


def answers_of_embedder(folder: Path, name: str) -> dict[str, np.ndarray]:
    model = SentenceTransformer(str(folder), device="cpu")
    out = {"texts": embed(model, TEXTS), "long": embed(model, [LONG])[0]}
    ids = [model.tokenizer(text)["input_ids"] for text in [*TEXTS, LONG]]
    out["lengths"] = np.array([len(i) for i in ids])
    if name == "qwen3":
        out["query"] = model.encode([QUERY], prompt_name="query")[0]
    if name == "bert":
        out["short"] = model.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    return out


def answers_of_scorer(folder: Path) -> dict[str, np.ndarray]:
    model = CrossEncoder(str(folder), device="cpu", max_length=None)
    tokenizer = model.tokenizer
    most = 60
    short = [(QUERY, LONG), (LONG, QUERY), (LONG, LONG), (LONG + " fox", LONG)]
    kept = [
        tokenizer(a, b, truncation="longest_first", max_length=most, return_token_type_ids=True)
        for a, b in short
    ]
    whole = [tokenizer(QUERY, text) for text in TEXTS]
    return {
        "scores": np.concatenate([model.predict([(QUERY, text)]) for text in TEXTS]),
        "lengths": np.array([len(e["input_ids"]) for e in whole]),
        "truncated_ids": np.array([e["input_ids"] for e in kept]),
        "truncated_types": np.array([e["token_type_ids"] for e in kept]),
    }


def main() -> None:
    torch.set_grad_enabled(False)
    for name in MODELS:
        folder = write_model(name)
        answers = (
            answers_of_scorer(folder) if "scorer" in name else answers_of_embedder(folder, name)
        )
        np.savez_compressed(folder / "ref.npz", **answers)
        print(name, {key: value.shape for key, value in answers.items()})

    if sys.argv[1:]:
        answers = answers_of_embedder(Path(sys.argv[1]), "all-minilm-l6-v2")
        np.savez_compressed(DATA / "all-minilm-l6-v2.npz", **answers)


if __name__ == "__main__":
    main()
