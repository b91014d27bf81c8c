"""Which checkpoint tensor becomes which parameter, checked before anything is allocated."""

from __future__ import annotations

import functools
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import WeightMismatchError
from ..models import DecoderConfig, EncoderConfig
from ..models.rope_config import ROPE_TENSORS
from ..models.weights import Source, Transform, WeightTable
from .base import Checkpoint

log = logging.getLogger(__name__)

_KNOWN_EXTRAS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn_rot_embd\b"
    r"|(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mtp|nextn)\."
    r"|^(v|a|mm)\."
    r"|(^|\.)(k|v|kv)_(scale|zero_point)$|\.[kv]_proj\.output_scale$"
)
"""Buffers that configuration replaces, towers beside the decoder, and scales of quantised keys and
values: pages in 8 bits have one for each token and head."""


class Use(NamedTuple):
    """A parameter that a checkpoint tensor fills, and what to do to the tensor first."""

    path: str
    transform: Transform | None


Plan = dict[str, list[Use]]
"""Uses by checkpoint tensor name."""


def plan_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig | EncoderConfig,
    table: WeightTable | None,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
) -> Plan:
    """Assigns tensors to parameters.

    Args:
        parameters: the decoder's, by path.

    Raises:
        WeightMismatchError: tensors are missing, unknown or of the wrong shape; names all.
        UnsupportedModelError: a needed tensor's type cannot be read.
    """
    sources = {path: _source(table, path) for path in parameters}
    plan: Plan = defaultdict(list)
    for path, source in sources.items():
        plan[source.name].append(Use(path, source.transform))
    missing = [name for name in plan if name not in checkpoint.tensors]
    checkpoint.require_readable(plan.keys() - set(missing))
    extra = _unexpected(checkpoint, config, plan, sources["embed.weight"].name)
    misshapen = _misshapen(checkpoint, config, plan, parameters)
    if missing or extra or misshapen:
        raise WeightMismatchError(missing, extra, misshapen)
    return plan


def _source(table: WeightTable | None, path: str) -> Source:
    if table is None:
        return Source(path)
    layer = re.match(r"layers\.(\d+)\.", path)
    if layer is None:
        return table[path]
    source = table[f"layers.{{i}}.{path[layer.end() :]}"]
    return Source(source.name.replace("{i}", layer[1]), source.transform)


def _unexpected(
    checkpoint: Checkpoint, config: DecoderConfig | EncoderConfig, plan: Plan, embed_name: str
) -> list[str]:
    """Tensors without a use that are no known extras; logs those that are."""
    used = plan.keys() | set(ROPE_TENSORS)
    unused = [name for name in checkpoint.tensors if name not in used]
    skipped = [n for n in unused if _KNOWN_EXTRAS.search(n) or _is_zero_bias(checkpoint, n)]
    if isinstance(config, DecoderConfig) and config.tie_embeddings:
        heads = [n for n in unused if re.search(r"(^|\.)lm_head\.weight$", n)]
        for name in heads:
            _warn_if_untied(checkpoint, name, embed_name)
        skipped += heads
    if skipped:
        more = ", ..." if len(skipped) > 5 else ""
        log.info("skipping %d tensors: %s%s", len(skipped), ", ".join(skipped[:5]), more)
    return [name for name in unused if name not in skipped]


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """AutoGPTQ gives every layer a bias, also where the model has none."""
    one_dimensional = len(checkpoint.tensors[name].shape) == 1
    return name.endswith(".bias") and one_dimensional and not checkpoint.read(name).any()


def _warn_if_untied(checkpoint: Checkpoint, head: str, embed: str) -> None:
    if embed not in checkpoint.tensors or _equal(checkpoint, head, embed):
        return
    log.warning(
        "%s differs from %s, but the model's configuration ties them: %s is ignored",
        *(head, embed, head),
    )


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.tensors[one] != checkpoint.tensors[other]:
        return False
    rows = checkpoint.tensors[one].shape[0]
    step = checkpoint.block_rows(one)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = checkpoint.read_rows(one, start, stop)
        if not np.array_equal(block, checkpoint.read_rows(other, start, stop)):
            return False
    return True


def _misshapen(
    checkpoint: Checkpoint,
    config: DecoderConfig | EncoderConfig,
    plan: Plan,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
) -> list[str]:
    found = []
    for name, uses in plan.items():
        if name not in checkpoint.tensors:
            continue
        shape = checkpoint.tensors[name].shape
        wanted = {use.path: tuple(parameters[use.path].shape) for use in uses}
        fits = all(_shape_after(u.transform, shape, config) == wanted[u.path] for u in uses)
        if not fits or prod(shape) != sum(map(prod, wanted.values())):
            targets = " and ".join(f"{path} {list(want)}" for path, want in wanted.items())
            found.append(f"{name} {list(shape)}, expected to fill {targets}")
    return found


@functools.lru_cache(maxsize=256)
def _shape_after(
    transform: Transform | None, shape: tuple[int, ...], config: DecoderConfig | EncoderConfig
) -> tuple[int, ...] | None:
    """The shape that a transform gives, without data; None if it cannot take `shape`."""
    if transform is None:
        return shape
    try:
        result = jax.eval_shape(
            lambda w: transform(w, config), jax.ShapeDtypeStruct(shape, jnp.float32)
        )
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    return tuple(result.shape)
