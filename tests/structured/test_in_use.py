"""How much requests under way may be bound to together."""

import gc

import pytest

from llmjax import SamplingParams, StructuredOutputs
from llmjax.errors import InvalidRequestError, QueueFullError
from llmjax.structured import GrammarCompiler, compiler
from llmjax.tokenizer import tokenizer_from_folder


@pytest.fixture
def grammars(tiny_model):
    grammars = GrammarCompiler(tokenizer_from_folder(tiny_model), 320)
    yield grammars
    grammars.close()


def bound(regex: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(regex=regex))


def test_too_much_at_once_is_refused_until_some_of_it_has_ended(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "_CHARS_IN_USE", 25)

    def ask(regex: str):
        return grammars.compile(bound(regex), is_bounded=True).result()

    first, second = ask("a" * 10), ask("b" * 10)
    again = ask("a" * 10)  # the same is there once
    with pytest.raises(QueueFullError, match=r"regex: .* bound to 30 .* up to 25"):
        ask("c" * 10)
    grammars.compile(bound("c" * 10)).result()  # who asks for no bound
    gc.collect()
    for _ in range(3):  # what cannot be compiled does not count
        with pytest.raises(InvalidRequestError):
            ask("(" + "d" * 3)
    del first
    with pytest.raises(QueueFullError):
        ask("c" * 10)
    del again
    gc.collect()
    ask("c" * 10)
    gc.collect()
    assert set(grammars._in_use) == {bound("b" * 10).structured_outputs} and second is not None
