"""What to quantise a model to: the methods, what each takes, and what it takes unless told. No jax.

A method honours the settings of its entry in `METHODS`; any other that is given is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..checks import shown
from ..config import check_types
from ..errors import ConfigError

_CALIBRATED: dict[str, Any] = {"calibration": None, "num_samples": 128, "sequence_length": 512}
_WRITTEN: dict[str, Any] = {"dtype": "auto", "ignore": ("lm_head",)}
_GROUPED: dict[str, Any] = {"bits": 4, "group_size": 128, "symmetric": True}

_STEERED: dict[str, Any] = _CALIBRATED | _WRITTEN
_ORDER: dict[str, Any] = {"desc_act": False, "static_groups": False, "act_group_aware": None}
_GPTQ: dict[str, Any] = {"damp": 0.05, "format": "gptq"}
_AWQ: dict[str, Any] = {"symmetric": False, "clip": True, "format": "awq"}
_INT8: dict[str, Any] = {"group_size": -1, "symmetric": True, "activations": "none"}

METHODS: dict[str, dict[str, Any]] = {
    "gptq": _GROUPED | _ORDER | _GPTQ | _STEERED,
    "awq": _GROUPED | _AWQ | _STEERED,
    "smoothquant": {"alpha": None, "activations": "dynamic"} | _STEERED,
    "int8": _INT8 | _STEERED,
    "int4": {"group_size": 128, "symmetric": True} | _WRITTEN,
    "fp8": {"granularity": "channel", "activations": "dynamic"} | _STEERED,
    "nvfp4": _WRITTEN,
    "mxfp4": _WRITTEN,
    "gguf": {"imatrix": None} | _CALIBRATED,
}
"""By name: the settings that a method honours, and what they are unless given."""

_BITS: dict[str, tuple[int, ...]] = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_FORMATS = {"gptq": ("gptq", "compressed-tensors"), "awq": ("awq", "compressed-tensors")}
_PACKED_BITS = (4, 8)
"""Of weights in compressed-tensors' pack-quantized."""
_ACTIVATIONS = ("none", "dynamic", "static")
_GRANULARITIES = ("tensor", "channel", "block")
_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class QuantizeConfig:
    """How to quantise.

    What is None becomes what the method takes unless told.

    Attributes:
        method: gptq, awq, smoothquant, int8, int4, fp8, nvfp4, mxfp4, or gguf:TYPE, where the type
            is one that llama.cpp knows, such as Q4_K_M.
        bits: of a weight's code: 2, 3, 4 or 8 for gptq, 4 for awq.
        group_size: inputs that share a scale; -1 is all of a row.
        symmetric: scales without zero points (gptq, int8, int4: yes unless told, awq: no).
        desc_act: gptq quantises inputs in the order of their energy, the greatest first, and
            groups are of neighbours in that order (act-order).
        static_groups: with `desc_act`, groups stay those of neighbours as stored.
        act_group_aware: gptq goes by energy within groups and from group to group, which leaves
            them as stored; yes unless told, but with `desc_act`.
        damp: gptq adds this share of the mean of H's diagonal to it.
        clip: awq also searches how far to clip weights.
        alpha: smoothquant's exponent, 0 to 1; by default searched for each place.
        activations: how the other factor is rounded: "none", "dynamic" (a scale a token) or
            "static" (one scale, from calibration).
        granularity: weights that share an fp8 scale: "tensor", "channel" or "block" (128 x 128,
            activations in groups of 128).
        format: of the folder: what the method is called, or "compressed-tensors".
        calibration: a file of text (.txt), or of lines with "text" or "messages" (.jsonl).
        imatrix: a file of llama-imatrix, which says how much each input counts in a GGUF file;
            with `calibration` in its place that is measured.
        num_samples: windows of calibration text, evenly spaced.
        sequence_length: tokens of a window.
        dtype: of what stays in floats, and of scales where the format leaves it open; "auto" is
            the source's own, bfloat16 where that is quantised.
        ignore: linear layers that stay in floats: names, ends of names, or "re:" patterns.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    desc_act: bool | None = None
    static_groups: bool | None = None
    act_group_aware: bool | None = None
    damp: float | None = None
    clip: bool | None = None
    alpha: float | None = None
    activations: str | None = None
    granularity: str | None = None
    format: str | None = None
    calibration: str | None = None
    imatrix: str | None = None
    num_samples: int | None = None
    sequence_length: int | None = None
    dtype: str | None = None
    ignore: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        defaults = self._settings()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "method" or (value is None and field.name not in defaults):
                continue
            if field.name not in defaults:
                raise ConfigError(
                    f"{field.name} is {shown(value)}, which method {self.method} has no use for; "
                    f"allowed: {', '.join(defaults)}"
                )
            if value is None:
                object.__setattr__(self, field.name, defaults[field.name])
        self._check()

    @classmethod
    def of(cls, method: str, settings: Mapping[str, Any]) -> QuantizeConfig:
        """Raises ConfigError, as the class does, also for names that are no settings."""
        known = {field.name for field in fields(cls)}
        for name in settings.keys() - known:
            raise ConfigError(f"no setting is called {name!r}, allowed: {', '.join(sorted(known))}")
        return cls(method, **settings)

    @property
    def family(self) -> str:
        """The method without what stands behind a colon: its key in `METHODS`."""
        return self.method.partition(":")[0]

    @property
    def gguf_type(self) -> str:
        """What stands behind the colon of "gguf:Q4_K_M"."""
        return self.method.partition(":")[2]

    @property
    def needs_calibration(self) -> bool:
        """Whether the method looks at what goes through the model."""
        return self.family in ("gptq", "awq", "smoothquant") or self.activations == "static"

    def _settings(self) -> Mapping[str, Any]:
        if self.family not in METHODS:
            raise ConfigError(f"method is {shown(self.method)}, allowed: {', '.join(METHODS)}")
        if self.family == "gguf":
            self._check_gguf_type()
        elif ":" in self.method:
            raise ConfigError(f"method is {shown(self.method)}, allowed with a colon: gguf:TYPE")
        return METHODS[self.family]

    def _check_gguf_type(self) -> None:
        from .gguf_mix import ALIASES, MIXES  # numpy comes with them, which `--help` can do without

        if self.gguf_type.upper() not in {*MIXES, *ALIASES}:
            known = ", ".join(f"gguf:{name}" for name in MIXES)
            raise ConfigError(f"method is {shown(self.method)}, allowed: {known}")

    def _check(self) -> None:
        self._require_one("bits", _BITS.get(self.family, ()))
        self._require_one("format", _FORMATS.get(self.family, ()))
        self._require_one("activations", _ACTIVATIONS)
        self._require_one("granularity", _GRANULARITIES)
        self._require_one("dtype", _DTYPES)
        self._require("group_size", lambda n: n == -1 or n >= 8, "8 or more, or -1 for a row")
        self._require("damp", lambda x: 0 < x < 1, "above 0 and below 1")
        self._require("alpha", lambda x: 0 <= x <= 1, "0 to 1")
        self._require("num_samples", lambda n: n >= 1, "1 or more")
        self._require("sequence_length", lambda n: n >= 8, "8 or more")
        self._check_together()

    def _check_together(self) -> None:
        if self.desc_act and self.act_group_aware:
            raise ConfigError("act_group_aware is True, allowed without desc_act alone")
        if self.family == "gptq" and self.act_group_aware is None:
            object.__setattr__(self, "act_group_aware", not self.desc_act)
        if self.static_groups and not self.desc_act:
            raise ConfigError("static_groups is True, allowed with desc_act alone")
        if self.activations in ("dynamic", "static") and self.family == "int8":
            self._only("group_size", -1, "with activations")
            self._only("symmetric", True, "with activations")
        if self.granularity == "block" and self.activations == "static":
            raise ConfigError("activations is 'static', allowed with granularity 'block': dynamic")
        if self.format == "compressed-tensors":
            self._require_one("bits", _PACKED_BITS)
            if self.desc_act:
                self._only("static_groups", True, "with desc_act in compressed-tensors")
        if self.needs_calibration and self.calibration is None:
            raise ConfigError(
                f"calibration is None, allowed for method {self.method}: a .txt or .jsonl file"
            )
        if self.family == "gguf":
            self._check_importance()
        elif not self.needs_calibration and self.calibration is not None:
            raise ConfigError(
                f"calibration is {shown(self.calibration)}, which method {self.method} has no use "
                "for unless activations are static"
            )

    def _check_importance(self) -> None:
        from .gguf_mix import NEEDS_IMPORTANCE

        if self.imatrix is not None and self.calibration is not None:
            raise ConfigError(
                f"imatrix is {shown(self.imatrix)} and calibration {shown(self.calibration)}, "
                "allowed: one of them"
            )
        given = self.imatrix is not None or self.calibration is not None
        if self.gguf_type.upper() in NEEDS_IMPORTANCE and not given:
            raise ConfigError(
                f"method is {shown(self.method)}, allowed with an imatrix or calibration alone"
            )

    def _require_one(self, name: str, allowed: Collection[object]) -> None:
        self._require(name, lambda value: value in allowed, ", ".join(map(str, allowed)))

    def _only(self, name: str, value: object, when: str) -> None:
        self._require(name, lambda found: found == value, f"{value} {when}")

    def _require(self, name: str, holds: Any, allowed: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{name} is {shown(value)}, allowed: {allowed}")
