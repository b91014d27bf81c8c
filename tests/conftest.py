"""What many tests share: a tiny model with a tokenizer."""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Programs that were compiled once are on disk for every other process, and the next run. JAX reads
# these when it is imported.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# How long an example takes is the machine's affair.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Shapes and types of what runs on the device are checked where they are annotated.
install_import_hook(
    (
        # Not triton_kernels: Triton reads the source of its functions as it stands there.
        "llmjax_kernels.paged_attention.dispatch",
        "llmjax_kernels.paged_attention.jax_triton",
        "llmjax_kernels.paged_attention.mosaic_gpu",
        "llmjax_kernels.paged_attention.mosaic_decode",
        "llmjax_kernels.paged_attention.mosaic_prefill",
        "llmjax_kernels.paged_attention.reference",
        "llmjax_kernels.paged_attention.tiles",
        "llmjax_kernels.quant_matmul.dispatch",
        "llmjax_kernels.quant_matmul.jax_triton",
        "llmjax_kernels.quant_matmul.reference",
        "llmjax.nn",
        "llmjax.sampling",
        "llmjax.models.decoder",
        "llmjax.models.encoder",
        "llmjax.engine.pooling_step",
    ),
    "checked.check",
)

if sys.version_info < (3, 11, 8):
    # CPython's gh-106905: code that parses while garbage is collected in the midst of a parse, or
    # in a thread that gets its turn there, makes the latter fail with a SystemError. Hypothesis
    # and tracebacks parse at any time.
    _parsing = threading.RLock()

    @functools.wraps(ast.parse)
    def _parse_alone(*args, __parse=ast.parse, **kwargs):
        with _parsing:
            collects = gc.isenabled()
            gc.disable()
            try:
                return __parse(*args, **kwargs)
            finally:
                if collects:
                    gc.enable()

    ast.parse = _parse_alone

HERE = Path(__file__).parent
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer: ids 3 to 258 are the bytes."""
    return with_tokenizer("smollm2", tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3: of its 7 layers, 6 see 32 tokens and one sees all; 256 ids."""
    return with_tokenizer("gemma3", tmp_path_factory.mktemp("windowed") / "tiny-gemma")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a random model of a family in tests/models/fixtures with that tokenizer."""
    return lambda family: with_tokenizer(family, tmp_path / family)


def with_tokenizer(fixture: str, folder: Path) -> Path:
    shutil.copytree(HERE / "models" / "fixtures" / fixture, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
