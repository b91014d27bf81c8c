"""Run by a test on virtual devices: what replicas of a model do, as JSON.

run_data_parallel.py MODEL OPTIONS PROMPTS
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing, contextmanager

import jax

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine import Engine
from llmjax.errors import QueueFullError, RequestTimeoutError
from llmjax.request import RequestOptions

model, options, prompts = map(json.loads, sys.argv[1:])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def load(**sizes):
    return LLM(model, background=False, **(options | sizes))


def generate(llm, prompts, params=GREEDY, **more):
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    return {
        "tokens": [[choice.token_ids for choice in o.outputs] for o in outputs],
        "engines": [o.engine for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
    }


def devices_of(tree):
    return sorted({d.id for leaf in jax.tree.leaves(tree) for d in leaf.sharding.device_set})


def is_idle(engine):
    for replica in engine.replicas:
        replica.scheduler.check_balance()
    placement, stats = engine.placement, engine.stats()
    return not (
        stats.num_running or stats.num_waiting or stats.pages_used or placement._placed
    ) and placement.live == placement.queued == [0] * len(engine.replicas)


@contextmanager
def noted():
    """Launches and finishes of all engines, as (what, device) in their order."""
    events, launch, finish = [], Engine.launch, Engine.finish

    def note(what, call):
        def noting(self):
            told = call(self)
            if what == "read" or told[1]:
                events.append((what, self.model.place.device.id))
            return told

        return noting

    Engine.launch, Engine.finish = note("dispatched", launch), note("read", finish)
    yield events
    Engine.launch, Engine.finish = launch, finish


def both_run(events):
    """Most devices that had a step in flight at a time."""
    in_flight, most = {}, 0
    for what, device in events:
        in_flight[device] = in_flight.get(device, 0) + (1 if what == "dispatched" else -1)
        most = max(most, sum(n > 0 for n in in_flight.values()))
    return most


def offline():
    said = {}
    with load() as llm:
        said["one"] = generate(llm, prompts)
        sampled = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, n=3)
        said["one_sampled"] = generate(llm, prompts[:2], sampled)
    with load(data_parallel_size=2) as llm:
        engine = llm.engine
        with noted() as events:
            said["two"] = generate(llm, prompts)
        said["at_once"] = both_run(events)
        # The seeds of requests that bring none come in the order of the requests.
        said["two_sampled"] = generate(llm, prompts[:2], sampled)
        said["weights"] = [devices_of(e.model.state) for e in engine.replicas]
        said["pages"] = [devices_of(e.runner._state) for e in engine.replicas]
        stems = [[number + 3] * 32 for number in range(2)]
        said["stems"] = [generate(llm, [stems[i % 2] + [100 + i] * 8]) for i in range(8)]
        stream = llm.stream([9] * 20, LONG)
        next(stream)
        stream.close()
        late = generate(llm, [[8] * 20], LONG, options=RequestOptions(timeout=1e-6))
        said["late"] = late["tokens"][0]
        said["idle"] = is_idle(engine)
    with load(data_parallel_size=2, max_queue_len=5) as llm:
        try:
            llm.generate([[i + 3] * 10 for i in range(6)], GREEDY, use_tqdm=False)
        except QueueFullError as error:
            said["refused"] = str(error)
        said["idle"] &= is_idle(llm.engine)
        said["five"] = len(llm.generate([[i + 3] * 10 for i in range(5)], GREEDY, use_tqdm=False))
    with load(data_parallel_size=2, tensor_parallel_size=2) as llm:
        said["two_by_two"] = generate(llm, prompts)
        said["spread"] = [devices_of(e.runner._state) for e in llm.engine.replicas]
        said["idle"] &= is_idle(llm.engine)
    return said


async def online():
    engine = AsyncEngine(EngineConfig.of(model, background=False, **options, data_parallel_size=2))
    engine.start()
    said = {}

    async def ask(prompt, params=GREEDY, **more):
        tokens, number = [], None
        async with aclosing(engine.generate("x", prompt, params, **more)) as news:
            async for output in news:
                tokens += output.outputs[0].token_ids
                number = output.engine
        return tokens, number

    said["served"] = await asyncio.gather(*map(ask, prompts))
    cut = [asyncio.ensure_future(ask([i + 3] * 20, LONG)) for i in range(4)]
    while engine.stats().num_running < 4:
        await asyncio.sleep(0.001)
    said["snapshots"] = [len((await engine.snapshot(i))["running"]) for i in range(2)]
    said["running"] = [stats.num_running for stats in engine.stats_of_each()]
    cut[0].cancel()
    try:
        await ask([7] * 20, LONG, options=RequestOptions(timeout=1e-3))
    except RequestTimeoutError:
        said["late"] = True
    said["cut_off"] = await engine.drain(60)
    said["ends"] = [len(done[0]) for done in await asyncio.gather(*cut[1:])]
    said["idle"] = is_idle(engine.engine)
    totals = [engine.metrics.of(i).totals(i) for i in range(2)]
    said["steps"] = [told["iteration_tokens_total_count"] for told in totals]
    said["all_steps"] = engine.metrics.totals()["iteration_tokens_total_count"]
    engine.close()
    return said


print(json.dumps({"offline": offline(), "online": asyncio.run(online())}))
