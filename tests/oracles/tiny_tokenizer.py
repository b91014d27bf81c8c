"""A byte-level BPE tokenizer of 320 tokens with a chat template, for one tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320
TEXT = """The engine reads the model, then it answers the question that the reader asked.
What is the capital of France? The capital of France is Paris.
She sells sea shells on the sea shore; the shells that she sells are sea shells, I am sure.
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": text, "special": True} for i, text in enumerate(SPECIAL)
        },
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "tokenizer_class": "GPT2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
