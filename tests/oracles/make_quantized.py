"""Make tests/oracles/data/quantized/*: tiny checkpoints that peers quantised, and their answers.

    python tests/oracles/make_quantized.py ../shared/oracles/quantized/base-bf16 [name ...]

Needs torch 2.13, transformers 5.17, llmcompressor 0.14 (compressed-tensors 0.19) and bitsandbytes
0.50; takes a minute on two cores. Variants of what ../shared/oracles/quantized has, of random
Llamas of one layer with tied embeddings; the tokenizer is that of the argument, kept once.

`ref.npz` has for each of two prompts: `ids{i}` [T], `logits{i}` [T V], `greedy{i}` and by how much
the logit of each of these leads the next one, `margins{i}`. All is computed in float32. Some things
are not as the peers do them by default:
- compressed-tensors rounds dequantised FP4 weights to bfloat16: here they are exact
  (`_with_exact_fp4`), and only inputs are rounded by the peer.
- bitsandbytes keeps a column of all tokens of a prompt in floats where any has an outlier in it:
  here tokens are computed one by one, as decodes are. Its factor for 1 / 127^2 has five digits:
  here it is exact (`_with_exact_factor`). 4-bit weights are multiplied as floats (`_as_floats`).
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear8bitLt
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

DATA = Path(__file__).parent / "data/quantized"
PROMPTS = ("The quick brown fox", '{"name": "get_weather",')
NUM_GREEDY = 8
KEPT = ("config.json", "model.safetensors", "ref.npz")
if not torch.cuda.is_available():  # 0.14 pins memory where there is no accelerator
    IntermediatesCache._pin_intermediate = classmethod(lambda cls, tensor: None)


def base(hidden: int = 64, mlp: int = 128, heads: int = 4, kv_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.do_sample = False
    return model


def args(**changes: object) -> QuantizationArgs:
    return QuantizationArgs(**{"num_bits": 8, "type": "int", "symmetric": True} | changes)


def linear(targets: list[str] | None = None, **parts: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=targets or ["Linear"], **parts)


MIXED = {
    "qkv": linear(
        [r"re:.*self_attn\.(q|k|v)_proj$"],
        weights=args(num_bits=4, symmetric=False, strategy="channel"),
    ),
    "o": linear(["model.layers.0.self_attn.o_proj"], weights=args(strategy="group", group_size=32)),
    "rest": linear(weights=args(num_bits=3, strategy="group", group_size=32)),
}
DYNAMIC = {"strategy": "token", "dynamic": True}
GROUPS = {
    "ct-mixed": lambda: {"config_groups": MIXED, "ignore": ["lm_head", "re:.*down_proj$"]},
    "ct-int8-static-asym": lambda: {
        "config_groups": {
            "all": linear(
                weights=args(strategy="channel", symmetric=False),
                input_activations=args(strategy="tensor", symmetric=False),
            )
        }
    },
    "ct-int8-token-asym": lambda: {
        "config_groups": {
            "all": linear(
                weights=args(strategy="tensor"),
                input_activations=args(symmetric=False, **DYNAMIC),
            )
        }
    },
    "ct-w4a8": lambda: {
        "config_groups": {
            "all": linear(
                weights=args(num_bits=4, strategy="group", group_size=32),
                input_activations=args(**DYNAMIC),
            )
        }
    },
    "ct-w8a16-kv8": lambda: {
        "config_groups": {"all": linear(weights=args(strategy="channel"))},
        "kv_cache_scheme": args(type="float", strategy="tensor"),
    },
    "ct-fp8-block": lambda: {"scheme": "FP8_BLOCK", "targets": "Linear"},
    "ct-nvfp4": lambda: {"scheme": "NVFP4", "targets": "Linear"},
    "ct-mxfp4": lambda: {"scheme": "MXFP4", "targets": "Linear"},
    "ct-mxfp8": lambda: {"scheme": "MXFP8", "targets": "Linear"},
}
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
BITSANDBYTES = {"bnb-nf4-nested": NF4, "bnb-int8": BitsAndBytesConfig(load_in_8bit=True)}
SIZES = {"ct-fp8-block": (128, 128), "bnb-nf4-nested": (96, 160, 3, 3)}


def make(name: str, tokenizer: AutoTokenizer) -> None:
    folder, source = DATA / name, DATA / f"{name}.float"
    shutil.rmtree(folder, ignore_errors=True)
    base(*SIZES.get(name, ())).save_pretrained(source)
    if name in GROUPS:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        recipe = QuantizationModifier(**{"ignore": ["lm_head"]} | GROUPS[name]())
        oneshot(
            model=model,
            dataset=Dataset.from_list(_calibration(tokenizer)),
            recipe=[recipe],
            max_seq_length=64,
            num_calibration_samples=16,
            tokenizer=tokenizer,
        )
        model.save_pretrained(folder, save_compressed=True)
        peer = _loaded(folder)
        if "fp4" in name:
            _with_exact_fp4(peer, folder)
        answer = _at_once
    else:
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            quantization_config=BITSANDBYTES[name],
            dtype=torch.float32,
            device_map="cpu",
        )
        loaded.save_pretrained(folder)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
        answer = _one_by_one
        if "nf4" in name:
            peer, answer = _as_floats(peer), _at_once
        else:
            _with_exact_factor(peer)
    shutil.rmtree(source)
    _store(folder, peer, tokenizer, answer)
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()


def _calibration(tokenizer: AutoTokenizer) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (16, 64), generator=generator)
    real = tokenizer("\n".join(PROMPTS * 20), add_special_tokens=False).input_ids
    ids[::2] = torch.tensor((real * 4)[:64])
    return [{"input_ids": row.tolist(), "attention_mask": [1] * 64} for row in ids]


Logits = Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]


def _at_once(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0].float()


def _one_by_one(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    cache, rows = None, []
    for token in ids:
        out = model(token[None, None], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, 0].float())
    return torch.stack(rows)


@torch.no_grad()
def _store(folder: Path, model: PreTrainedModel, tokenizer: AutoTokenizer, answer: Logits) -> None:
    out = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids[0]
        out[f"ids{i}"], out[f"logits{i}"] = ids.numpy(), answer(model, ids).numpy()
        margins = []
        for _ in range(NUM_GREEDY):
            (first, second), (best, _) = answer(model, ids)[-1].topk(2)
            margins.append(float(first - second))
            ids = torch.cat([ids, best[None]])
        out[f"greedy{i}"] = ids[-NUM_GREEDY:].numpy()
        out[f"margins{i}"] = np.float32(margins)
    np.savez_compressed(folder / "ref.npz", **out)


@torch.no_grad()
def _loaded(folder: Path) -> PreTrainedModel:
    if not any(kind in folder.name for kind in ("fp4", "mxfp8")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Those become bfloat16 whatever else is, at the first call.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))
    return torch.nn.Module.float(model)  # its own refuses


@torch.no_grad()
def _with_exact_fp4(model: PreTrainedModel, folder: Path) -> None:
    """Puts the exact values of the stored FP4 in the place of the peer's."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    stored = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        packed = stored.get(f"{name}.weight_packed")
        if packed is None:
            continue
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        scale = stored[f"{name}.weight_scale"]
        if scale.dtype == torch.uint8:
            scale = 2.0 ** (scale.float() - 127)
        else:
            scale = scale.float() / stored[f"{name}.weight_global_scale"]
        group = codes.shape[1] // scale.shape[1]
        exact = numbers[codes.int()] * scale.repeat_interleave(group, 1)
        assert (module.weight - exact).abs().max() < 0.01
        module.weight.copy_(exact)


@torch.no_grad()
def _as_floats(model: PreTrainedModel) -> LlamaForCausalLM:
    """The same with the peer's own dequantised weights, as its product on CPUs is in bfloat16."""
    plain = LlamaForCausalLM(LlamaConfig(**_without_quantisation(model))).float().eval()
    plain.load_state_dict(
        {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}, strict=False
    )
    modules = dict(model.named_modules())
    for name, module in plain.named_modules():
        weight = getattr(modules.get(name), "weight", None)
        if hasattr(weight, "quant_state"):
            state = copy.copy(weight.quant_state)
            # Its CPU kernel begins a block with each row, others, and what quantises, do not.
            state.shape = torch.Size([1, module.weight.numel()])
            values = dequantize_4bit(weight.data, state).float()
            module.weight.copy_(values.reshape(module.weight.shape))
    return plain


@torch.no_grad()
def _with_exact_factor(model: PreTrainedModel) -> None:
    """bitsandbytes takes 6.200124e-05 for 1 / 127^2: what is left of that goes into the scales."""
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            module.weight.SCB /= 127**2 * 6.200124e-05


def _without_quantisation(model: PreTrainedModel) -> dict[str, object]:
    return {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}


def main() -> None:
    source, names = Path(sys.argv[1]), sys.argv[2:] or [*GROUPS, *BITSANDBYTES]
    DATA.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    shutil.copy(source / "tokenizer.json", DATA)
    shutil.copy(source / "tokenizer_config.json", DATA)
    for name in names:
        make(name, tokenizer)
        config = json.loads((DATA / name / "config.json").read_text())
        print(name, config["quantization_config"].get("format"))


if __name__ == "__main__":
    main()
