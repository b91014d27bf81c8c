"""Phi-3, Phi-3.5, Phi-4 and Phi-4 mini: fused projections, longrope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .gguf_config import gguf_key, read_gguf_decoder
from .gguf_names import gguf_table
from .hf_config import SLIDING, read_decoder, required
from .hf_names import hf_table
from .weights import Source, WeightTable, rows_of_gate_up, rows_of_qkv

ARCHITECTURES = ("Phi3ForCausalLM",)
GGUF_ARCHITECTURES = ("phi3",)


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    scaling = c.get("rope_scaling") or {}
    if "yarn" in (scaling.get("type"), scaling.get("rope_type")):  # early name of longrope
        c = {**c, "rope_scaling": {**scaling, "rope_type": "longrope"}}
    types = (SLIDING,) * required(c, "num_hidden_layers")
    return read_decoder(c, types=types, window=c.get("sliding_window"))


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    types = (SLIDING,) * gguf_key(m, "block_count")
    window = gguf_key(m, "attention.sliding_window", None)
    return read_gguf_decoder(m, tensors, types=types, window=window)


def _fused(table: WeightTable, qkv: str, gate_up: str) -> WeightTable:
    parts = {f"layers.{{i}}.attn.{p}.weight": Source(qkv, rows_of_qkv(p)) for p in "qkv"}
    parts |= {
        f"layers.{{i}}.mlp.{p}.weight": Source(gate_up, rows_of_gate_up(p)) for p in ("gate", "up")
    }
    return {**table, **parts}


_HF_LAYER = "model.layers.{i}"
WEIGHTS = _fused(
    hf_table(), f"{_HF_LAYER}.self_attn.qkv_proj.weight", f"{_HF_LAYER}.mlp.gate_up_proj.weight"
)
GGUF_WEIGHTS = _fused(gguf_table(), "blk.{i}.attn_qkv.weight", "blk.{i}.ffn_up.weight")
