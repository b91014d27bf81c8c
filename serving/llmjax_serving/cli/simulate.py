"""Simulate serving a load on a GPU that is not there: memory use, latency, how many are needed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax import __version__
from llmjax.config import CacheConfig, CompileConfig, SchedulerConfig
from llmjax.errors import ConfigError
from llmjax.simulate import BASELINES, ROUTINGS
from llmjax.simulate.device import DEVICES, KV_DTYPES, WEIGHTS, Machine
from llmjax.simulate.shapes import SHAPES, find_shape
from llmjax.simulate.traces import (
    MOST_SECONDS,
    MOST_YEARS,
    Arrival,
    poisson,
    rate_of,
    read_trace,
    scaled,
)

from .flags import add_flags
from .results import require_writable, write_json

if TYPE_CHECKING:
    from llmjax.simulate.replica import Setup

CACHE_FLAGS = {
    "block_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "swap_space",
    "kv_offloading_size",
}
COMPILE_FLAGS = {"token_buckets", "seq_buckets"}
INPUT_LEN, OUTPUT_LEN, NUM_REQUESTS = 512, 128, 1000
"""Of a load at random, where the flags do not say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_machine(parser)
    _add_load(parser)
    _add_output(parser)
    add_flags(parser, CacheConfig, only=CACHE_FLAGS)
    add_flags(parser, SchedulerConfig)
    add_flags(parser, CompileConfig, only=COMPILE_FLAGS)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Device and model")
    group.add_argument(
        "--device", choices=DEVICES, default="h100", help="figures of its data sheet [%(default)s]"
    )
    group.add_argument(
        "--model",
        default="llama-3-8b",
        metavar="NAME",
        help=f"{', '.join(SHAPES)}, or a config.json or a folder with one [%(default)s]",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices that share each layer [1]",
    )
    group.add_argument("--max-model-len", type=int, metavar="N", help="by default the model's own")
    group.add_argument("--weight-dtype", choices=WEIGHTS, default="bfloat16", help="[%(default)s]")
    group.add_argument(
        "--kv-cache-dtype", choices=KV_DTYPES, default="bfloat16", help="[%(default)s]"
    )
    for name, default, help_text in (
        ("--memory-efficiency", 0.8, "share of the bandwidth that a step reaches"),
        ("--compute-efficiency", 0.6, "share of the peak that a step reaches"),
        ("--step-overhead-ms", 1.0, "of each step, beside bytes and operations"),
    ):
        group.add_argument(
            name, type=float, default=default, metavar="X", help=f"{help_text} [{default}]"
        )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Load")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="an Azure LLM inference trace (CSV) or a Mooncake trace (JSON lines); without one, "
        "requests arrive at random (Poisson)",
    )
    group.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"the trace's first; by default all [at random: {NUM_REQUESTS}]",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="X",
        help="requests a second on average; a trace's times are stretched to it",
    )
    group.add_argument(
        "--rate-scale", type=float, metavar="X", help="so many times the trace's own rate"
    )
    for name, default in (("input", INPUT_LEN), ("output", OUTPUT_LEN)):
        group.add_argument(
            f"--{name}-len",
            type=int,
            metavar="N",
            help=f"mean of a random {'prompt' if name == 'input' else 'output'}, in tokens "
            f"[{default}]",
        )
    group.add_argument(
        "--length-spread",
        type=float,
        metavar="X",
        help="random lengths are uniform within this share of their means [0.5]",
    )
    group.add_argument(
        "--known-lengths",
        action="store_true",
        help="requests ask for as many tokens as they get, which the forecast then counts on; "
        "otherwise they may go on to the end of the context, and end by themselves",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the random load [0]")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="engines [1]")
    group.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="least-loaded",
        help="which engine a request goes to: in turn, or with fewest requests [%(default)s]",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Questions and answers")
    group.add_argument(
        "--baselines",
        nargs="*",
        choices=BASELINES,
        metavar="NAME",
        help="serve the same by static batching (static) and with contiguous memory for "
        "max_model_len (max) or a power of two (pow2) of each request; without names, all",
    )
    group.add_argument(
        "--capacity",
        action="store_true",
        help="find the fewest replicas that keep --p99-ttft-ms",
    )
    group.add_argument("--p99-ttft-ms", type=float, metavar="X", help="for --capacity")
    group.add_argument(
        "--slo-ttft-ms", type=float, metavar="X", help="a good request's most to the first token"
    )
    group.add_argument(
        "--slo-itl-ms",
        type=float,
        metavar="X",
        help="a good request's most between tokens, on its average",
    )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results here")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw them here (.png, .svg)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    from llmjax.simulate.baselines import run_baseline
    from llmjax.simulate.report import Slo, report, table
    from llmjax.simulate.run import capacity, p99_ttft, simulate

    ttft, itl = (ms and ms / 1e3 for ms in (args.slo_ttft_ms, args.slo_itl_ms))
    setup, arrivals, slo = make_setup(args), make_load(args), Slo(ttft, itl)
    tried = {}
    if args.capacity:
        limit = args.p99_ttft_ms / 1e3
        tried = capacity(setup, arrivals, p99_ttft_s=limit, routing=args.routing)
        needed = min(n for n, outcome in tried.items() if p99_ttft(outcome) <= limit)
        outcomes = [tried[needed]]
    else:
        kind = {"replicas": args.replicas, "routing": args.routing}
        outcomes = [simulate(setup, arrivals, **kind)]
    outcomes += [run_baseline(name, setup, arrivals) for name in _baselines(args)]
    reports = [report(outcome, slo) for outcome in outcomes]
    print(_heading(args, setup, arrivals))
    print(table(reports))
    said: dict[str, Any] = {"results": reports}
    if args.capacity:
        p99_ms = {n: 1e3 * p99_ttft(outcome) for n, outcome in tried.items()}
        print(_answer(args, p99_ms, needed, arrivals))
        said["capacity"] = {"replicas": needed, "p99_ttft_ms": p99_ms}
    write_json("--output-json", args.output_json, {**_about(args, setup, arrivals), **said})
    if args.plot is not None:
        from llmjax.simulate import plots

        plots.plot(outcomes, args.plot)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses, before any work is done, flags that contradict each other or fail at the end."""
    random = ("input_len", "output_len", "length_spread", "seed")
    if args.trace is not None:
        for name in random:
            if getattr(args, name) is not None:
                raise ConfigError(f"{name} is of a load at random, and --trace gives another")
        if args.rate_scale is not None and args.request_rate is not None:
            raise ConfigError("rate_scale and request_rate both set the rate of the trace")
    elif args.rate_scale is not None:
        raise ConfigError("rate_scale needs a --trace: request_rate is the rate of a random load")
    elif args.request_rate is None:
        raise ConfigError("a load is needed: --trace FILE, or --request-rate X for one at random")
    positive = ("request_rate", "rate_scale", "input_len", "output_len", "num_requests")
    for name in (*positive, "p99_ttft_ms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}, allowed: above 0")
    if args.length_spread is not None and not 0 <= args.length_spread <= 1:
        raise ConfigError(f"length_spread is {args.length_spread}, allowed: 0 to 1")
    if args.seed is not None and args.seed < 0:
        raise ConfigError(f"seed is {args.seed}, allowed: 0 up")
    if args.capacity != (args.p99_ttft_ms is not None):
        raise ConfigError("capacity and p99_ttft_ms are given together or not at all")
    if args.capacity and args.replicas != 1:
        raise ConfigError("capacity finds the number of replicas: leave --replicas out")
    if args.baselines is not None and (args.capacity or args.replicas != 1):
        raise ConfigError("baselines are of one replica: leave --capacity and --replicas out")
    if args.plot is not None:
        from llmjax.simulate import plots

        plots.require(args.plot)
    for flag, file in (("--output-json", args.output_json), ("--plot", args.plot)):
        require_writable(flag, file)


def make_setup(args: argparse.Namespace) -> Setup:
    from llmjax.simulate.replica import Setup

    given = vars(args)

    def of(cls: Any, names: Iterable[str]) -> Any:
        return cls(**{name: given[name] for name in names if name in given})

    machine = Machine(
        find_shape(args.model),
        DEVICES[args.device],
        weights=WEIGHTS[args.weight_dtype],
        kv_dtype=args.kv_cache_dtype,
        tensor_parallel=args.tensor_parallel_size,
        overhead=args.step_overhead_ms / 1e3,
        memory_efficiency=args.memory_efficiency,
        compute_efficiency=args.compute_efficiency,
    )
    return Setup(
        machine,
        of(CacheConfig, CACHE_FLAGS),
        of(SchedulerConfig, (field.name for field in fields(SchedulerConfig))),
        of(CompileConfig, COMPILE_FLAGS),
        args.max_model_len,
        args.known_lengths,
    )


def make_load(args: argparse.Namespace) -> list[Arrival]:
    if args.trace is None:
        arrivals = poisson(
            args.num_requests or NUM_REQUESTS,
            args.request_rate,
            args.input_len or INPUT_LEN,
            args.output_len or OUTPUT_LEN,
            spread=0.5 if args.length_spread is None else args.length_spread,
            seed=args.seed or 0,
        )
    else:
        arrivals = _stretched(args, _first_of_trace(args))
    name = "rate_scale" if args.request_rate is None else "request_rate"
    if not arrivals[-1].time <= MOST_SECONDS:
        raise ConfigError(
            f"{name} is {getattr(args, name)}, allowed: enough for the last request to come within "
            f"{MOST_YEARS} years of the first"
        )
    return arrivals


def _first_of_trace(args: argparse.Namespace) -> list[Arrival]:
    arrivals = read_trace(args.trace)
    count = args.num_requests or len(arrivals)
    if count > len(arrivals):
        raise ConfigError(f"num_requests is {count}, the trace has {len(arrivals)}")
    return arrivals[:count]


def _stretched(args: argparse.Namespace, arrivals: list[Arrival]) -> list[Arrival]:
    """A trace at the rate that was asked for."""
    own = rate_of(arrivals)
    for name in ("request_rate", "rate_scale"):
        if own is None and (value := getattr(args, name)) is not None:
            raise ConfigError(
                f"{name} is {value}, allowed of a trace whose requests all arrive at once: none, "
                "as they have no rate to scale"
            )
    if own is not None and args.request_rate is not None:
        return scaled(arrivals, args.request_rate / own)
    return scaled(arrivals, args.rate_scale or 1.0)


def _baselines(args: argparse.Namespace) -> Sequence[str]:
    return () if args.baselines is None else args.baselines or tuple(BASELINES)


def _name(args: argparse.Namespace) -> str:
    many = args.tensor_parallel_size
    return f"{many} x {args.device}" if many > 1 else args.device


def _heading(args: argparse.Namespace, setup: Setup, arrivals: Sequence[Arrival]) -> str:
    layout, pages, length = setup.size_memory()
    source = args.trace.name if args.trace is not None else "at random"
    inputs, outputs = _means(arrivals)
    rate = rate_of(arrivals)
    pace = "all at once" if rate is None else f"{rate:.2f} a second"
    return (
        f"{args.model} on {_name(args)}: {pages:,} pages of {layout.block_size} tokens, context "
        f"{length:,}\n{len(arrivals):,} requests ({source}), {pace}, on "
        f"average {inputs:,.0f} tokens in and {outputs:,.0f} out\n"
    )


def _means(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    count = len(arrivals)
    return sum(a.input_len for a in arrivals) / count, sum(a.output_len for a in arrivals) / count


def _answer(
    args: argparse.Namespace, p99_ms: dict[int, float], needed: int, arrivals: Sequence[Arrival]
) -> str:
    limit = args.p99_ttft_ms
    lines = ["", f"{'replicas':<28}{'p99 first token, ms':>20}"]
    lines += [f"{replicas:<28}{ms:>20,.0f}" for replicas, ms in p99_ms.items()]
    devices = needed * args.tensor_parallel_size
    rate = rate_of(arrivals)
    load = "with all requests at once" if rate is None else f"at {rate:.2f} requests a second"
    return "\n".join(
        [
            *lines,
            f"{devices} {args.device} ({needed} replica{'s' * (needed > 1)}) keep p99 of the first "
            f"token within {limit:g} ms {load}.",
        ]
    )


def _about(args: argparse.Namespace, setup: Setup, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    _, pages, length = setup.size_memory()
    machine = asdict(setup.machine)
    return {
        "llmjax": __version__,
        "device": args.device,
        "model": args.model,
        "machine": machine,
        "pages": pages,
        "max_model_len": length,
        "cache": asdict(setup.cache),
        "scheduler": asdict(setup.scheduler),
        "known_lengths": setup.known_lengths,
        "compile": {name: getattr(setup.compile, name) for name in sorted(COMPILE_FLAGS)},
        "load": {
            "trace": args.trace and args.trace.name,
            "requests": len(arrivals),
            "requests_per_second": rate_of(arrivals),
        },
    }
