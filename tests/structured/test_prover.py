"""What would crash the compiler, or keep it for ever, is refused, and nothing else is hurt."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from llmjax.errors import InvalidRequestError
from llmjax.structured.compiler import check_json
from llmjax.structured.prover import Prover


def chain(count: int) -> str:
    """Rules of which each is the next one."""
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(count)) + f'a{count}: "x"'


@pytest.fixture
def prover():
    prover = Prover(300, {0: "<s>", 1: "<end>"}, [1], seconds=1.0)
    yield prover
    prover.close()


LARGE = "start: " + " ".join(f'"a{i}"' for i in range(20_000))


@pytest.mark.parametrize("bad", [chain(20_000), "start: /" + "a?" * 50_000 + "/", LARGE])
def test_what_kills_the_compiler_is_refused_alone(prover, bad):
    prover.check("start: /a/", "grammar")
    with pytest.raises(InvalidRequestError, match="nested too deeply, or compiling it") as caught:
        prover.check(bad, "grammar")
    assert caught.value.param == "grammar"
    for source in (chain(100), 'start: "a" <end> <[0]>', "start: /[ab]+/"):
        prover.check(source, "grammar")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("start: nowhere", "grammar: .*nowhere"),
        ("start: <[300]>", "grammar: .*300"),
        ("start: <nobody>", "grammar: .*nobody"),
        ("start: \ud800", "grammar: .*serializable"),
        ("", "grammar: "),
    ],
)
def test_what_is_wrong_is_told(prover, source, message):
    with pytest.raises(InvalidRequestError, match=f"(?s){message}"):
        prover.check(source, "grammar")


def test_gbnf_becomes_lark(prover):
    assert 'start: "go"' in prover.lark('root ::= "go"', "grammar")
    with pytest.raises(InvalidRequestError, match=r"grammar: it is no GBNF or EBNF: .*'root'"):
        prover.lark('other ::= "go"', "grammar")
    # Each pass over the rules settles one of them.
    many = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(20_000))
    with pytest.raises(InvalidRequestError, match="nested too deeply, or compiling it"):
        prover.lark(many + 'r20000 ::= "x"', "grammar")


def test_a_process_that_somebody_ends_is_started_again(prover):
    prover.check("start: /a/", "grammar")
    os.kill(prover._process.pid, signal.SIGKILL)
    prover._process.wait()
    prover.check("start: /b/", "grammar")


def test_a_process_that_does_not_run_is_no_fault_of_the_grammar(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises(RuntimeError, match="does not run"):
        Prover().check("start: /a/", "grammar")


def test_no_process_is_left():
    ended, dropped = Prover(), Prover()
    processes = []
    for prover in (ended, dropped):
        prover.check("start: /a/", "grammar")
        processes.append(prover._process)
    ended.close()
    del dropped, prover
    gc.collect()
    assert all(process.poll() is not None for process in processes)


def test_schemas_of_functions_are_proved_too():
    parts = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
    schema = {"type": "object", "$ref": "#/$defs/d0", "$defs": {**parts, "d1000": {}}}
    with pytest.raises(InvalidRequestError, match="nested too deeply, or compiling it") as caught:
        check_json(schema, "tools[0].function.parameters")
    assert caught.value.param == "tools[0].function.parameters"
    check_json({"type": "object"}, "tools[0].function.parameters")
