"""What one scheme takes and gives on a device: memory, and seconds by a roofline.

The load is a steady one: requests are all alike, and as one leaves the next begins, so that always
as many run (the batch). An answer takes its own prompt, which gives the first token, and then
steps that decode the whole batch; beside the decodes these compute the prompts of the others that
begin meanwhile, one for each of them (chunked prefill):

    answer = prompt + (output_len - 1) x step
    step   = max(bytes, operations) of `batch` decodes and (batch - 1) / (output_len - 1) prompts

All answers take as long, so this is the 99th percentile too. Where lengths or arrivals vary answers
do as well: `llmjax simulate` plays that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from ..cache.layout import KVLayout
from ..config import CacheConfig, SchedulerConfig
from ..engine.context import DEVICE_SHARE, HOST_SHARE, most_chunk
from ..simulate.device import Figures, Machine, Weights, Work
from .model import Model
from .question import MOST_GPUS, Question

MARGIN = 1.05
"""Times as good as another: what is closer is alike, as a roofline is not that exact."""
MOST_REQUESTS = SchedulerConfig().max_num_batched_tokens
"""That a step has room for: each decodes a token in it."""


@dataclass(frozen=True)
class Memory:
    """Where the memory of all devices goes, in bytes.

    Attributes:
        total: that may be filled.
        weights: of them.
        temporaries: what the largest step takes, when as many requests run as fit.
        kv_token: keys and values of one token in all layers, on all devices.
        request: pages of a whole prompt and answer; layers with a window hold that.
        fits: requests that there is room for at once.
    """

    total: float
    weights: int
    temporaries: int
    kv_token: int
    request: int
    fits: int


@dataclass(frozen=True)
class Step:
    """Seconds of one step.

    Attributes:
        read_bytes: weights, keys and values.
        read_s, compute_s: by bandwidth, and by operations; the longer one decides.
        seconds: with all-reduces and the fixed cost.
    """

    read_bytes: float
    read_s: float
    compute_s: float
    seconds: float

    @classmethod
    def of(cls, machine: Machine, work: Work) -> Step:
        return cls(
            machine.read_bytes(work),
            machine.read_seconds(work),
            machine.compute_seconds(work),
            machine.seconds(work),
        )

    @property
    def bound(self) -> str:
        """What decides: "bytes" or "operations"."""
        return "bytes" if self.read_s >= self.compute_s else "operations"


@dataclass(frozen=True)
class Estimate:
    """A scheme on so many devices.

    Attributes:
        batch: requests that run together: of those that fit the most that keep p99; 1 where even
            a lone one does not.
        prompt: the step that computes one prompt by itself.
        decode: a step that decodes the batch, halfway through its answers, and nothing else.
        mixed: one that computes prompts of others besides.
        answer_s: seconds of a whole answer in the batch.
        alone_s: of one that has the devices for itself.
        keeps_p99: whether `answer_s` is within p99.
        tokens_per_second: output, of all devices.
    """

    machine: Machine
    memory: Memory
    batch: int
    prompt: Step
    decode: Step
    mixed: Step
    answer_s: float
    alone_s: float
    keeps_p99: bool
    tokens_per_second: float

    @property
    def gpus(self) -> int:
        return self.machine.tensor_parallel

    @property
    def per_gpu(self) -> float:
        """Tokens a second of one device."""
        return self.tokens_per_second / self.gpus

    def score(self, goal: str) -> float:
        """What a goal ranks by, more is better."""
        return self.per_gpu if goal == "throughput" else 1 / self.alone_s


def sizes(question: Question, model: Model) -> list[int]:
    """Numbers of devices that may share a model, fewest first."""
    if question.gpus is not None:
        return [question.gpus]
    most = 1 if question.gpu == "cpu" else MOST_GPUS
    return [size for size in range(1, most + 1) if model.shape.num_heads % size == 0]


def make_machine(
    question: Question,
    model: Model,
    figures: Figures,
    weights: Weights,
    kv_dtype: str,
    gpus: int,
) -> Machine:
    return Machine(
        model.shape,
        figures,
        weights,
        kv_dtype,
        gpus,
        question.step_overhead_ms / 1e3,
        question.memory_efficiency,
        question.compute_efficiency,
    )


def prompts_begun(question: Question, requests: int, tokens: float = 1.0) -> float:
    """Prompts that a step computes beside the decodes of a batch, so that it stays full.

    Args:
        tokens: that a step gives each sequence.
    """
    steps = (question.output_len - 1) / tokens
    return (requests - 1) / steps if steps else 0.0


def scheduler_for(question: Question, requests: int) -> SchedulerConfig:
    """An engine's, in which so many may run, and find room in a step for the prompts of all."""
    usual = SchedulerConfig()
    tokens = requests + ceil(prompts_begun(question, requests) * question.input_len)
    whole = -(-tokens // usual.prefill_chunk_size) * usual.prefill_chunk_size
    chunk = min(whole, usual.max_num_batched_tokens)
    return SchedulerConfig(max_num_seqs=requests, prefill_chunk_size=chunk)


def find_memory(question: Question, machine: Machine) -> Memory:
    """How many requests fit, as the engine's memory manager counts them."""
    shape, length = machine.shape, question.length
    layout = KVLayout.of(shape.windows, block_size=CacheConfig().block_size, max_model_len=length)
    # Only those whose prompts are being computed hold a chunk beside their window.
    pages = layout.most_pages(length, most_chunk(SchedulerConfig(), length))
    request = pages * machine.page_bytes(layout)
    usual = DEVICE_SHARE if machine.figures.compute_capability else HOST_SHARE
    share = question.gpu_memory_utilization or usual
    total = machine.tensor_parallel * machine.figures.memory * share

    def temporaries(requests: int) -> int:
        return machine.temporaries(scheduler_for(question, requests), length)

    def fit(requests: int) -> bool:
        beside = machine.weight_bytes + temporaries(requests)
        return beside + requests * request <= total

    fits = most_that(fit, MOST_REQUESTS)
    return Memory(
        total=total,
        weights=machine.weight_bytes,
        temporaries=temporaries(max(1, fits)),
        kv_token=shape.num_layers * machine.kv_bytes,
        request=request,
        fits=fits,
    )


def most_that(holds: Callable[[int], bool], most: int) -> int:
    """The greatest number up to `most` that `holds` takes, which takes none above one that it
    refuses; 0 if it takes none."""
    least, refused = 0, most + 1
    while refused - least > 1:
        middle = (least + refused) // 2
        least, refused = (middle, refused) if holds(middle) else (least, middle)
    return least


def prompt_work(machine: Machine, length: int) -> Work:
    """One prompt, by itself."""
    return Work.of([(0, length)], machine.windows, rows=length, sampled=1)


def decode_work(
    machine: Machine, question: Question, batch: int, *, positions: int = 1, prompts: float = 0.0
) -> Work:
    """A step of a batch, halfway through its answers.

    Args:
        positions: of each sequence that are computed.
        prompts: of other requests that the step computes besides, and parts of them.
    """
    rows, context = batch * positions, question.input_len + question.output_len // 2
    one = Work.of([(context, positions)], machine.windows, rows=rows, sampled=rows)
    other = prompt_work(machine, question.input_len)
    return Work(
        rows=rows + prompts * other.rows,
        sampled=rows + prompts * other.sampled,
        seen=batch * one.seen + prompts * other.seen,
        pairs=batch * one.pairs + prompts * other.pairs,
    )


def answer_seconds(
    machine: Machine,
    question: Question,
    batch: int,
    *,
    tokens: float = 1.0,
    positions: int = 1,
    beside: float = 0.0,
) -> float:
    """A whole answer in a batch.

    Args:
        tokens: that a step gives each sequence, of the `positions` that it computes.
        beside: seconds of each step besides.
    """
    own = machine.seconds(prompt_work(machine, question.input_len))
    steps = (question.output_len - 1) / tokens
    if not steps:
        return batch * own
    begun = prompts_begun(question, batch, tokens)
    work = decode_work(machine, question, batch, positions=positions, prompts=begun)
    return own + steps * (machine.seconds(work) + beside)


def estimate(question: Question, machine: Machine, memory: Memory) -> Estimate:
    """What so many devices give that have room for at least one request."""

    def keeps(batch: int) -> bool:
        return question.p99 is None or answer_seconds(machine, question, batch) <= question.p99

    batch = max(1, most_that(keeps, memory.fits))
    prompts = prompts_begun(question, batch)
    answer_s = answer_seconds(machine, question, batch)
    return Estimate(
        machine=machine,
        memory=memory,
        batch=batch,
        prompt=Step.of(machine, prompt_work(machine, question.input_len)),
        decode=Step.of(machine, decode_work(machine, question, batch)),
        mixed=Step.of(machine, decode_work(machine, question, batch, prompts=prompts)),
        answer_s=answer_s,
        alone_s=answer_seconds(machine, question, 1),
        keeps_p99=keeps(batch),
        tokens_per_second=batch * question.output_len / answer_s,
    )


def best_size(goal: str, tried: Sequence[Estimate]) -> Estimate:
    """Of estimates of one scheme on more and more devices, as `Candidate.estimate` says."""
    keeping = [each for each in tried if each.keeps_p99]
    if not keeping:
        return min(tried, key=lambda each: each.alone_s)
    if goal == "latency":
        return keeping[0]
    most = max(each.per_gpu for each in keeping)
    return next(each for each in keeping if MARGIN * each.per_gpu >= most)
