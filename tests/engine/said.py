"""What tests of whole engines look at."""

from __future__ import annotations


def tokens(outputs):
    """Of all choices of all outputs."""
    return [choice.token_ids for output in outputs for choice in output.outputs]


def assert_idle(llm):
    """Nothing runs, waits or holds a page, and all accounts agree."""
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    llm.engine.scheduler.check_balance()
