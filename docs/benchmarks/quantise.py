"""What is left of a model after each way to quantise it: for quantisation.md.

`python docs/benchmarks/quantise.py --work FOLDER --peers-python PYTHON` writes the table into
docs/quantisation.md, section "Producing". Folders that are in `--work` already are not made again.

The source is SmolLM2-135M-Instruct: its file's values as floats, with channels in another order,
which leaves the model what it was and puts the values on no grid. Calibration is WikiText-2 from
character 100,000 on, judgement its first 8,192 tokens (`LLMJAX_SHARED`, by default ../shared).
transformers, in the peers' environment, reads what was written and computes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
from flax import nnx

from llmjax import quantize
from llmjax.bench.reorder import reordered
from llmjax.checkpoint import load_model, open_checkpoint, pull
from llmjax.checkpoint.safetensors_write import write_safetensors
from llmjax.quantize.calibration import calibration_windows
from llmjax.quantize.config import QuantizeConfig
from llmjax.quantize.hub import layer_targets, outer_targets
from llmjax.quantize.hub_config import hub_config
from llmjax.tokenizer import write_tokenizer

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("LLMJAX_SHARED", HERE.parents[1] / ".." / "shared"))
WINDOWS = HERE.parents[1] / "tests" / "oracles" / "data" / "smollm2-wikitext2-nll.json"
PAGE = HERE.parent / "quantisation.md"
GROUP = 64
"""SmolLM2's rows of 576 are no whole groups of 128."""

SAMPLES = 32
"""Calibration windows of 512 tokens."""

FOURS = {"group_size": GROUP}
OURS: dict[str, tuple[str, dict]] = {
    "int4": ("int4", FOURS),
    "gptq": ("gptq", FOURS),
    "gptq-act": ("gptq", FOURS | {"desc_act": True}),
    "gptq-asym": ("gptq", FOURS | {"symmetric": False}),
    "int4-asym": ("int4", FOURS | {"symmetric": False}),
    "awq": ("awq", FOURS),
    "gptq-3": ("gptq", FOURS | {"bits": 3}),
    "gptq-8": ("gptq", FOURS | {"bits": 8}),
    "int8": ("int8", {}),
    "int8-w8a8": ("int8", {"activations": "dynamic"}),
    "smoothquant": ("smoothquant", {}),
    "int8-static": ("int8", {"activations": "static"}),
    "smoothquant-static": ("smoothquant", {"activations": "static"}),
    "fp8": ("fp8", {}),
    "fp8-static": ("fp8", {"granularity": "tensor", "activations": "static"}),
    "nvfp4": ("nvfp4", {}),
    "mxfp4": ("mxfp4", {}),
}
GPTQMODEL = {"gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}}
GPTQMODEL["gptq-act"] = GPTQMODEL["gptq"] | {"desc_act": True}
GPTQMODEL["awq"] = {"bits": 4, "group_size": GROUP, "quant_method": "awq", "format": "gemm"}
LLMCOMPRESSOR = ("gptq", "awq", "smoothquant", "int8", "fp8", "nvfp4", "mxfp4")


def write_floats(folder: Path) -> None:
    """The source as the hub would have it, in bfloat16."""
    source = pull("smollm2-135m-instruct")
    model = load_model(source, dtype="float32")
    leaves = nnx.to_flat_state(model.state)
    arrays = {".".join(map(str, keys)): np.asarray(leaf[...]) for keys, leaf in leaves}
    arrays = reordered(arrays, model.config)
    parts = [{p: v for p, v in arrays.items() if not p.startswith("layers.")}]
    for i in range(model.config.num_layers):
        start = f"layers.{i}."
        parts.append({p.removeprefix(start): v for p, v in arrays.items() if p.startswith(start)})
    tensors = {}
    for number, part in enumerate(parts):
        shapes = {path: value.shape for path, value in part.items()}
        if number:
            named = layer_targets(model.config, number - 1, shapes)
        else:
            named = outer_targets(model.config, shapes)
        tensors |= {t.name: t.join(part).astype(ml_dtypes.bfloat16) for t in named}
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    settings = hub_config(model.config) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(model.tokenizer, folder)


def write_calibration(work: Path) -> None:
    """The text, and its windows as token ids for the peers."""
    text = (SHARED / "data/wikitext-2/test.txt").read_text(encoding="utf-8")
    (work / "calibration.txt").write_text(text[100_000:], encoding="utf-8")
    tokenizer = open_checkpoint(work / "floats").read_text_side().tokenizer
    windows = calibration_windows(config_of("gptq", work, {}), tokenizer)
    np.save(work / "windows.npy", windows)


def config_of(method: str, work: Path, settings: dict) -> QuantizeConfig:
    if method in ("gptq", "awq", "smoothquant") or settings.get("activations") == "static":
        calibration = {"calibration": str(work / "calibration.txt"), "num_samples": SAMPLES}
        settings = settings | calibration
    return QuantizeConfig.of(method, settings)


def make(work: Path, rows: list[str], peers: str | None, compressor: str | None) -> list[str]:
    """Writes each folder that is not there yet; gives the names of all."""
    floats, windows = work / "floats", work / "windows.npy"
    if not floats.exists():
        write_floats(floats)
    if not windows.exists():
        write_calibration(work)
    made = []
    for name in rows:
        method, settings = OURS[name]
        made.append(f"llmjax-{name}")
        if not (work / made[-1]).exists():
            config = config_of(method, work, settings)
            given = {k: v for k, v in vars(config).items() if v is not None and k != "method"}
            quantize(floats, work / made[-1], method, **given)
    for python, side, methods in (
        (peers, "gptqmodel", GPTQMODEL),
        (compressor, "llmcompressor", dict.fromkeys(LLMCOMPRESSOR)),
    ):
        for name, settings in methods.items() if python else ():
            if name not in rows:
                continue
            made.append(f"{side}-{name}")
            if not (work / made[-1]).exists():
                what = [json.dumps(settings)] if settings else [name, str(GROUP)]
                script = HERE / "sides" / f"quantise_{side}.py"
                command = [python, script, floats, work / made[-1], windows, *what]
                subprocess.run(list(map(str, command)), check=True)
    return made


def judge(work: Path, names: list[str], python: str) -> list[dict]:
    """What transformers says of each folder."""
    script = HERE / "sides" / "quantised_perplexity.py"
    folders = [str(work / name) for name in names]
    command = [python, str(script), str(work / "floats"), str(WINDOWS), *folders]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        files = (work / row["folder"]).glob("*.safetensors")
        row["bytes"] = sum(file.stat().st_size for file in files)
    return rows


def table(rows: list[dict]) -> str:
    """By method, ours and the peers' beside each other."""
    by_name = {row["folder"]: row for row in rows}
    lines = [
        "| method | perplexity | KL divergence | MB | gptqmodel | llmcompressor |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        _line("floats (bfloat16)", by_name["floats"], [None, None]),
    ]
    for name in OURS:
        if f"llmjax-{name}" in by_name:
            peers = [by_name.get(f"{side}-{name}") for side in ("gptqmodel", "llmcompressor")]
            lines.append(_line(f"`{name}`", by_name[f"llmjax-{name}"], peers))
    return "\n".join(lines)


def _line(name: str, row: dict, peers: list[dict | None]) -> str:
    others = [f"{peer['perplexity']:.2f}" if peer else "" for peer in peers]
    size = f"{row['bytes'] / 1e6:.0f}"
    cells = [name, f"{row['perplexity']:.2f}", f"{row['kl']:.4f}", size, *others]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where folders are made")
    parser.add_argument("--peers-python", required=True, help="with transformers and gptqmodel")
    parser.add_argument("--llmcompressor-python", help="with llmcompressor, which is also asked")
    parser.add_argument("--gptqmodel", action="store_true", help="also ask gptqmodel")
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS))
    args = parser.parse_args()
    peers = args.peers_python if args.gptqmodel else None
    names = make(args.work, args.only, peers, args.llmcompressor_python)
    rows = judge(args.work, names, args.peers_python)
    (args.work / "rows.json").write_text(json.dumps(rows, indent=1))
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- producing -->", "<!-- /producing -->"
    filled = f"{begin}\n{table(rows)}\n{end}"
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: filled, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
