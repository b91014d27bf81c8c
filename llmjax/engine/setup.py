"""Before an engine runs: what is loaded, how memory is shared out, and what is refused."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from llmjax_kernels.kv_format import KVFormat

from ..cache.layout import KVLayout
from ..checkpoint import LoadedModel, load_model, resolve_model
from ..checks import shown
from ..config import EngineConfig
from ..errors import ChatTemplateError, ConfigError, InvalidRequestError
from ..models import DecoderConfig
from ..parallel.group import Group
from ..parallel.mesh import make_places
from ..request import Request
from ..tokenizer import compile_template
from .buckets import Buckets
from .compile import on_cpu
from .condense import check_eviction
from .context import fit_context, make_layout
from .memory import count_pages, host_space, page_bytes

log = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
"""Larger steps gain no speed on a CPU and make everyone wait."""


def load(config: EngineConfig) -> LoadedModel:
    """Loads the model that the configuration names; see `Engine`."""
    asked = config.model
    host_space(config.cache)  # what is too much is refused before weights are loaded
    template = _template_text(asked.chat_template)
    model = load_model(
        resolve_model(asked.model),
        dtype=asked.dtype,
        quantization=asked.quantization,
        stages=make_places(config.parallel)[0],
        check=partial(_check_model, config),
        page_size=config.cache.block_size,
    )
    if template is not None:
        model.tokenizer.chat_template = template
    return model


def _check_model(config: EngineConfig, model: DecoderConfig, native: bool) -> None:
    """Refuses what the model does not allow, before its weights are loaded."""
    if (pooling := config.model.pooling) is not None:
        raise ConfigError(f"pooling is {pooling!r}, allowed where text is generated: none")
    if config.threads is not None and not native:
        raise ConfigError("threads: only the native CPU kernels take it, and XLA serves here")
    stages = config.parallel.pipeline_parallel_size
    if stages > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, allowed for this model: up to "
            f"{model.num_layers}, its layers"
        )
    asked, own = config.model.max_model_len, model.max_position
    cache, pages = config.cache, config.cache.num_gpu_blocks_override
    layout = make_layout(cache, model.windows, asked or own)
    most = own if layout.eviction is None else check_eviction(layout.eviction, model)
    if asked is not None and asked > most:
        raise ConfigError(f"max_model_len is {asked}, the model allows up to {most}")
    # Pages of a sequence are checked later where max_model_len may still be lowered.
    make_buckets(config, layout.whole(asked or 1))
    if pages is not None:
        fit_context(asked, own, pages, layout, config.scheduler)


def make_buckets(config: EngineConfig, max_model_len: int) -> Buckets:
    """The buckets of steps with sequences of up to so many tokens."""
    return Buckets(
        config.scheduler,
        config.compile,
        max_model_len=max_model_len,
        block_size=config.cache.block_size,
        step_tokens=_CPU_STEP_TOKENS if on_cpu() else None,
    )


def size_memory(
    config: EngineConfig, model: LoadedModel, kv_format: KVFormat, group: Group | None = None
) -> tuple[KVLayout, int, int]:
    """Chooses how layers share pages, max_model_len and the number of pages.

    Args:
        group: processes that must come to the same.
    """
    asked, own = config.model.max_model_len, model.config.max_position
    layout = make_layout(config.cache, model.config.windows, asked or own)
    buckets = make_buckets(config, layout.whole(asked or own))
    pages = count_pages(config, model, layout, kv_format, buckets, group)
    if config.cache.num_gpu_blocks_override is None:
        pages //= config.prefill.num_pools
    size = page_bytes(model.config, layout, kv_format)
    log.info("KV pool: %d pages, %.2f GiB", pages, pages * size / 2**30)
    log.info("prefix reuse: %s", layout.describe_reuse())
    length = fit_context(asked, own, pages, layout, config.scheduler)
    if length < (asked or own):
        log.warning("max_model_len is lowered from %d to %d, what the KV pool holds", own, length)
    return layout, length, pages


def check_request(request: Request, config: EngineConfig, vocab: int) -> None:
    """Raises InvalidRequestError for token ids or options that can never be served.

    Args:
        vocab: token ids are below it.
    """
    params, priority = request.params, request.options.priority
    policy = config.scheduler.scheduling_policy
    if priority and policy != "priority":
        raise InvalidRequestError(
            f"priority is {priority}, allowed: 0, as the scheduling policy is {policy!r} and "
            "not 'priority'",
            param="priority",
        )
    named = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for param, values in named.items():
        bad = next((i for i in values if not 0 <= i < vocab), None)
        if bad is not None:
            raise InvalidRequestError(
                f"token id {bad} in {param} is not in the vocabulary, allowed: 0 to {vocab - 1}",
                param=param,
            )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > config.max_logprobs:
            raise InvalidRequestError(
                f"{name} is {value}, allowed: up to {config.max_logprobs} (max_logprobs)",
                param=name,
            )


def _template_text(template: str | None) -> str | None:
    """A chat template given as text, or as the path of a file that holds it."""
    if template is None:
        return None
    if "{" in template or "\n" in template:
        text = template
    else:
        try:
            text = Path(template).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"chat_template is {shown(template)}, allowed: Jinja text, or a file that can be "
                f"read ({error})"
            ) from error
    try:
        compile_template(text)
    except ChatTemplateError as error:
        raise ConfigError(f"chat_template: {error}") from error
    return text
