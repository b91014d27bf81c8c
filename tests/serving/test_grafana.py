"""The Grafana dashboard asks for nothing that /metrics does not tell."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from .double import EngineDouble, client_of, run_async

BOARD = json.loads((Path(__file__).parents[2] / "docs/grafana/llmjax.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = r"(?:llmjax:|process_)[a-z0-9_]+"


@run_async
async def test_every_metric_exists_and_is_asked_for_as_what_it_is():
    async with client_of(EngineDouble()) as client:
        await client.post("/v1/completions", json={"prompt": "abc"})
        text = await (await client.get("/metrics")).text()
    names = set(re.findall(rf"^({NAME})[{{ ]", text, re.M))
    kinds = dict(re.findall(rf"^# TYPE ({NAME}) (\w+)$", text, re.M))
    variables = [v["query"]["query"] for v in BOARD["templating"]["list"] if v["type"] == "query"]
    asked = {name for query in [*QUERIES, *variables] for name in re.findall(NAME, query)}
    assert len(asked) > 25
    assert asked <= names, asked - names
    for query in QUERIES:
        for name in re.findall(rf"(?:rate|increase)\(({NAME})", query):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            kind = kinds.get(name) or kinds.get(family)
            assert kind in ("counter", "histogram"), f"{name} is a {kind}, which has no rate"


@run_async
async def test_whatever_the_server_tells_of_itself_is_drawn():
    async with client_of(EngineDouble()) as client:
        await client.post("/v1/completions", json={"prompt": "abc"})
        text = await (await client.get("/metrics")).text()
    families = {re.sub("_total$", "", n) for n in re.findall(r"^# TYPE (llmjax:\w+)", text, re.M)}
    drawn = " ".join(QUERIES)
    missing = {name for name in families if name not in drawn and not name.endswith("_created")}
    # Pages are drawn in bytes.
    assert missing == {
        "llmjax:pages_saved",
        "llmjax:pages_loaded",
        "llmjax:cache_config_info",
    }


def test_panels_have_a_place_of_their_own():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for a, b in combinations((panel["gridPos"] for panel in BOARD["panels"]), 2):
        across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
        down = a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]
        assert not (across and down)


@pytest.mark.parametrize("query", QUERIES)
def test_queries_are_of_the_chosen_model_and_well_formed(query):
    assert query.count("(") == query.count(")")
    for name in re.findall(r"llmjax:[a-z0-9_]+", query):
        assert f'{name}{{model_name=~"$model"}}' in query


def test_panels_say_what_they_show():
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["datasource"]["uid"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
