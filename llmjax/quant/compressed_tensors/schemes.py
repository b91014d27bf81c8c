"""What compressed-tensors' config_groups say, and which of them is for a layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...checks import shown
from ...errors import CheckpointFormatError
from ..layers import require_setting

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")


@dataclass(frozen=True)
class Args:
    """How weights, or inputs, are quantised.

    Attributes:
        where: in the configuration, for messages.
        bits, kind: of a code; "int" or "float".
        strategy: what shares a scale.
        group: inputs that do, with "group" and "tensor_group".
        block: rows and inputs that do, with "block".
        dynamic: scales are those of the inputs that come; "local": but for a global one.
        ordered: groups are not of neighbours (actorder "group").
        of_powers: scales are powers of two (MX).
    """

    where: str
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    dynamic: bool | str
    ordered: bool
    of_powers: bool


@dataclass(frozen=True)
class Scheme:
    """One of config_groups."""

    where: str
    targets: tuple[str, ...]
    format: str
    weights: Args
    inputs: Args | None


def read_schemes(settings: Mapping[str, Any]) -> list[Scheme]:
    """The schemes of a quantization_config.

    Raises:
        UnsupportedModelError: one asks for something that is not implemented.
        CheckpointFormatError: one is not what it should be.
    """
    groups = _mapping("config_groups", settings.get("config_groups") or {})
    return [_scheme(f"config_groups.{name}", group, settings) for name, group in groups.items()]


def scheme_of(schemes: Iterable[Scheme], ignore: Iterable[str], layer: str) -> Scheme | None:
    """The scheme for a layer, by its name, an expression ("re:"), or its class, in this order."""
    classes = {"Embedding" if layer.endswith("embed_tokens") else "Linear"}
    if any(_matches(layer, target) or target in classes for target in ignore):
        return None
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    named = sorted(by_target, key=lambda target: ("re:" in target, target))
    found = [t for t in named if _matches(layer, t)] + [t for t in named if t in classes]
    return by_target[found[0]] if found else None


def _matches(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return target == layer


def _scheme(where: str, group: object, settings: Mapping[str, Any]) -> Scheme:
    group = _mapping(where, group)
    stored = group.get("format") or settings.get("format")
    require_setting(f"{where}.format", stored, FORMATS)
    require_setting(f"{where}.output_activations", group.get("output_activations"), (None,))
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise CheckpointFormatError(
            f"{where}.targets is {shown(targets)}, expected a list of names"
        )
    inputs = group.get("input_activations")
    return Scheme(
        where,
        tuple(targets),
        str(stored),
        _args(f"{where}.weights", group.get("weights")),
        None if inputs is None else _args(f"{where}.input_activations", inputs),
    )


def _args(where: str, given: object) -> Args:
    given = _mapping(where, given)
    kind, bits = given.get("type", "int"), given.get("num_bits", 8)
    require_setting(f"{where}.type", kind, ("int", "float"))
    require_setting(f"{where}.num_bits", bits, range(2, 9) if kind == "int" else (4, 8))
    group, block = given.get("group_size"), given.get("block_structure")
    strategy = given.get("strategy") or {None: "tensor", -1: "channel"}.get(group, "group")
    require_setting(f"{where}.strategy", strategy, _STRATEGIES)
    if strategy in ("group", "tensor_group") and not (type(group) is int and group > 0):
        raise CheckpointFormatError(f"{where}.group_size is {shown(group)}, expected a count")
    if strategy == "block" and not _is_block(block):
        raise CheckpointFormatError(
            f"{where}.block_structure is {shown(block)}, expected rows and inputs"
        )
    dynamic, actorder = given.get("dynamic", False), given.get("actorder")
    require_setting(f"{where}.dynamic", dynamic, (False, True, "local"))
    require_setting(
        f"{where}.actorder", actorder, (None, False, True, "weight", "static", "group", "dynamic")
    )
    return Args(
        where,
        bits,
        kind,
        bool(given.get("symmetric", True)),
        strategy,
        group or 0,
        tuple(block) if block else (0, 0),
        dynamic,
        ordered=actorder in (True, "group", "dynamic"),
        of_powers=given.get("scale_dtype") == "torch.uint8" and group == 32,
    )


def _is_block(block: object) -> bool:
    if not isinstance(block, list) or len(block) != 2:
        return False
    return all(type(n) is int and n > 0 for n in block)


def _mapping(where: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise CheckpointFormatError(
            f"quantization_config's {where} is {shown(given)}, expected an object"
        )
    return given
