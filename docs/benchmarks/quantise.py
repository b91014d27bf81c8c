"""What is left of a model after each way to quantise it, by llmjax and by peers.

    python docs/benchmarks/quantise.py --work FOLDER --gptqmodel-python P \\
        --llmcompressor-python P --llamacpp-python P --transformers-python P --vllm-python P

quantises, judges and writes quantise.json, from which quantise_report.py makes the plots and the
tables of docs/quantisation.md. What is there is not made or judged again: it can be run in parts
(`--models`, `--sides`, `--only`), and with more `--windows` later. A peer without a Python is left
out. The sources are the catalogue's models: their files' values as floats, with channels in another
order, which leaves a model what it was and puts the values on no grid. Text is WikiText-2
(`LLMJAX_SHARED`, by default ../shared): its first 100,000 characters judge, the rest calibrates.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import quantise_report
from flax import nnx
from jaxtyping import Int
from quantise_cases import LLAMACPP, MODELS, OURS, SIDES, Case, Model, cases
from quantise_judge import FIGURES, Judge, choices, sizes
from tqdm.auto import tqdm

from llmjax import LLM, quantize
from llmjax.bench import latency
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
ORACLES = HERE.parents[1] / "tests" / "oracles" / "data"
RESULTS = HERE / "quantise.json"
JUDGED_CHARACTERS = 100_000
WINDOW = 512
PROMPT, ANSWER = 64, 32
"""Tokens of a window that readers are given, and that they go on with."""


class Bench:
    """One model: its source, its texts, and what has been found of it.

    Args:
        work: a folder of its own.
        found: its part of quantise.json, which is filled.
    """

    def __init__(self, work: Path, model: Model, found: dict[str, Any], samples: int):
        self.work, self.model, self.found = work, model, found
        self.cases = {case.name: case for case in cases(model.group)}
        self._text = {"calibration": str(work / "calibration.txt"), "num_samples": samples}
        self.floats = work / "floats"
        if not self.floats.exists():
            write_floats(pull(model.name), self.floats)
        if not (work / "windows.npy").exists():
            self._write_texts()
        self.windows: Int[np.ndarray, "W T"] = np.load(work / "judged.npy")

    def _write_texts(self) -> None:
        """Calibration text, its windows as token ids for the peers, and the windows that judge."""
        text = (SHARED / "data/wikitext-2/test.txt").read_text(encoding="utf-8")
        (self.work / "calibration.txt").write_text(text[JUDGED_CHARACTERS:], encoding="utf-8")
        tokenizer = open_checkpoint(self.floats).read_text_side().tokenizer
        ids = np.array(tokenizer.encode(text[:JUDGED_CHARACTERS], False))
        if self.model.fixture:
            known = json.loads((ORACLES / self.model.fixture).read_text())["ids"]
            assert ids[: len(known)].tolist() == known, "the first windows are not the fixture's"
        np.save(self.work / "judged.npy", ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW))
        config = QuantizeConfig.of("gptq", self._text | {"sequence_length": WINDOW})
        np.save(self.work / "windows.npy", calibration_windows(config, tokenizer))

    def path(self, side: str, name: str) -> Path:
        is_file = self.cases[name].method.startswith("gguf:")
        return self.work / f"{side}-{name}{'.gguf' if is_file else ''}"

    def make(self, side: str, case: Case, python: str) -> Path:
        """Writes a quantised model unless it is there."""
        path = self.path(side, case.name)
        if path.exists():
            return path
        if side == OURS:
            config = QuantizeConfig.of(case.method, case.settings | self._text_of(case))
            given = {k: v for k, v in vars(config).items() if v is not None and k != "method"}
            return quantize(self.floats, path, case.method, **given)
        half_done = path.with_name(f"{path.name}.half")
        shutil.rmtree(half_done, ignore_errors=True)
        source: list[Path] = [self.floats, half_done, self.work / "windows.npy"]
        if side == LLAMACPP:
            source = [self._float_file(), half_done]
        script = HERE / "sides" / f"quantise_{side.replace('.', '')}.py"
        command = [python, script, *source, json.dumps(case.peers[side])]
        with (self.work / f"{path.name}.log").open("w") as log:
            subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=log)
        half_done.rename(path)
        return path

    def _text_of(self, case: Case) -> dict[str, Any]:
        is_static = case.settings.get("activations") == "static"
        always = case.method in ("gptq", "awq", "smoothquant")
        return self._text if always or is_static or case.calibrated else {}

    def _float_file(self) -> Path:
        path = self.work / "floats.gguf"
        return path if path.exists() else quantize(self.floats, path, "gguf:BF16")

    def judge(self, judge: Judge, side: str, case: Case, path: Path, windows: int) -> None:
        """Notes a model's size and the figures of windows that it has none of yet."""
        row = self.found["rows"].setdefault(f"{side} {case.name}", {})
        row |= sizes(path)
        ours = self.found["rows"].get(f"{OURS} {case.name}")
        if side == LLAMACPP and ours and same_tensors(path, self.path(OURS, case.name)):
            row |= {name: ours[name] for name in FIGURES} | {"same_bytes_as_ours": True}
            return
        for name, values in judge.figures(path, windows_of(row)).items():
            row[name] = [*row.get(name, []), *values]

    def read_by(self, reader: str, python: str, side: str, name: str, count: int) -> None:
        """Notes what a peer that reads a model makes of windows, and how it goes on with their
        beginnings: in which share of places it chooses what llmjax does behind the same tokens."""
        path, log = self.path(side, name), self.work / f"{side}-{name}.{reader}.log"
        script = HERE / "sides" / f"quantised_{reader}.py"
        command = [python, script, path, self.work / "judged.npy", count, PROMPT, ANSWER]
        with log.open("w") as errors:
            printed = subprocess.check_output(list(map(str, command)), stderr=errors)
        answer = json.loads(printed)
        ids = np.array(answer.pop("ids"))
        ours = choices(path, ids)[:, PROMPT - 1 : -1]
        answer["same_choices"] = float(np.mean(ours == ids[:, PROMPT:]))
        row = self.found["rows"][f"{side} {name}"]
        row.setdefault("readers", {})[reader] = answer


def windows_of(row: dict[str, Any]) -> int:
    return len(row.get("nll", []))


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two GGUF files have the same tensors, byte for byte."""
    a, b = open_checkpoint(one), open_checkpoint(other)
    return a.tensors == b.tensors and all(
        np.array_equal(*(c.quantised_rows(n, 0, info.shape[0]) for c in (a, b)))
        for n, info in a.tensors.items()
    )


def write_floats(source: Path, folder: Path) -> None:
    """The source as the hub would have it, in bfloat16."""
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


def save(results: dict[str, Any]) -> None:
    scratch = RESULTS.with_suffix(".part")
    scratch.write_text(json.dumps(results, indent=1) + "\n")
    scratch.rename(RESULTS)


def measure(bench: Bench, args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Makes and judges what is asked for; a peer that fails is noted, and the rest goes on."""
    found, pythons = bench.found, pythons_of(args)
    wanted = [
        (side, case)
        for case in bench.cases.values()
        for side in case.sides
        if side in args.sides and (side == OURS or pythons[side])
        if not args.only or case.name in args.only
    ]
    rows = found.setdefault("rows", {})
    left = [(s, c) for s, c in wanted if windows_of(rows.get(f"{s} {c.name}", {})) < args.windows]
    judge = Judge(bench.floats, bench.windows[: args.windows]) if left else None
    if judge and windows_of(rows.setdefault("floats", {})) < args.windows:
        rows["floats"] = sizes(bench.floats) | judge.figures(bench.floats, 0)
    bar = tqdm(left, desc=bench.model.title)
    for side, case in bar:
        bar.set_postfix_str(f"{side} {case.name}")
        assert judge is not None
        try:
            path = bench.make(side, case, pythons.get(side) or "")
            bench.judge(judge, side, case, path, args.windows)
        except subprocess.CalledProcessError as error:
            rows[f"{side} {case.name}"] = {"failed": f"ended with {error.returncode}"}
        save(results)
    for name in args.speed:
        row = rows[f"{OURS} {name}"]
        if "speed" not in row:
            row["speed"] = speed(bench.path(OURS, name))
            save(results)
    for reader, python in (("transformers", args.transformers_python), ("vllm", args.vllm_python)):
        for name in args.read if python else ():
            if reader not in rows[f"{OURS} {name}"].get("readers", {}):
                bench.read_by(reader, python, OURS, name, args.read_windows)
                save(results)


def speed(path: Path) -> dict[str, float]:
    """Tokens a second: of one stream that decodes, and of a prompt of 512."""
    with LLM(str(path), max_model_len=1024, max_num_seqs=1, background=False) as llm:
        found = latency.measure(llm, (1,), steps=32, input_len=WINDOW, num_iters=5)
    parts = {"decode": found.decode[1], "prefill": found.prefill}
    return {name: round(times.tokens_per_second, 1) for name, times in parts.items()}


def pythons_of(args: argparse.Namespace) -> dict[str, str | None]:
    return {side: getattr(args, f"{side.replace('.', '')}_python", None) for side in SIDES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="where models are made")
    for side in ("gptqmodel", "llmcompressor", "llamacpp", "transformers", "vllm"):
        parser.add_argument(f"--{side}-python", help=f"of an environment with {side}")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    names = [case.name for case in cases(1)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=" ".join(names))
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens that judge")
    parser.add_argument("--samples", type=int, default=8, help="of 512 tokens that calibrate")
    parser.add_argument("--speed", nargs="+", choices=names, default=[], metavar="CASE")
    parser.add_argument("--read", nargs="+", choices=names, default=[], metavar="CASE")
    parser.add_argument("--read-windows", type=int, default=4)
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
    for key in args.models:
        model = MODELS[key]
        work = args.work / key
        work.mkdir(parents=True, exist_ok=True)
        found = results["models"].setdefault(key, {"samples": args.samples, "rows": {}})
        measure(Bench(work, model, found, found["samples"]), args, results)
        save(results)
    quantise_report.write(results)


if __name__ == "__main__":
    main()
