"""Takes what /v1/responses answers with out of OpenAI's description of its API.

python tests/oracles/openai_responses.py ../shared/data/openai-openapi.json

Of each choice between kinds (of items, events, tools) those stay that this server has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "data" / "openai_responses.json"
WANTED = ("Response", "ResponseItemList", "ResponseStreamEvent")
KEPT = {
    "OutputItem": ("OutputMessage", "FunctionToolCall", "ReasoningItem"),
    "OutputMessageContent": ("OutputTextContent", "RefusalContent"),
    "ItemResource": (
        *("InputMessageResource", "OutputMessage", "ReasoningItem"),
        *("FunctionToolCallResource", "FunctionToolCallOutputResource"),
    ),
    "InputItem": ("EasyInputMessage",),
    "InputContent": ("InputTextContent",),
    "Annotation": ("UrlCitationBody",),
    "ToolCallCaller": ("DirectToolCallCaller",),
    "ToolCallCallerParam": ("DirectToolCallCallerParam",),
    "FunctionAndCustomToolCallOutput": ("InputTextContent",),
    "Tool": ("FunctionTool",),
    "ToolChoiceParam": ("ToolChoiceOptions", "ToolChoiceAllowed", "ToolChoiceFunction"),
    "ResponseStreamEvent": (
        *("ResponseCreatedEvent", "ResponseInProgressEvent", "ResponseCompletedEvent"),
        *("ResponseIncompleteEvent", "ResponseFailedEvent"),
        *("ResponseOutputItemAddedEvent", "ResponseOutputItemDoneEvent"),
        *("ResponseContentPartAddedEvent", "ResponseContentPartDoneEvent"),
        *("ResponseTextDeltaEvent", "ResponseTextDoneEvent"),
        *("ResponseReasoningTextDeltaEvent", "ResponseReasoningTextDoneEvent"),
        *(
            "ResponseFunctionCallArgumentsDeltaEvent",
            "ResponseFunctionCallArgumentsDoneEvent",
        ),
    ),
}
UNUSED = {"prompt", "conversation", "moderation", "prompt_cache_options", "context_management"}
"""Properties of answers that are never there."""
WORDS = {"description", "title", "example", "deprecated", "discriminator", "default"}
REF = "#/components/schemas/"


def trimmed(schema: Any, within: str = "") -> Any:
    """Without prose, and without what is not of this server."""
    if isinstance(schema, list):
        return [trimmed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": schema["$ref"].replace(REF, "#/$defs/")}
    kept = {}
    for key, value in schema.items():
        if key in ("oneOf", "anyOf") and within in KEPT:
            kept["anyOf"] = [{"$ref": f"#/$defs/{name}"} for name in KEPT[within]]
        elif key == "properties":
            kept[key] = {k: trimmed(v) for k, v in value.items() if k not in UNUSED}
        elif key not in WORDS and not key.startswith("x-"):
            kept[key] = trimmed(value)
    return kept


def names(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = {schema["$ref"].removeprefix("#/$defs/")} if "$ref" in schema else set()
        return own.union(*map(names, schema.values()))
    return set().union(*map(names, schema)) if isinstance(schema, list) else set()


def main(path: str) -> None:
    schemas = json.loads(Path(path).read_text())["components"]["schemas"]
    found: dict[str, Any] = {}
    todo = set(WANTED)
    while todo:
        name = todo.pop()
        found[name] = trimmed(schemas[name], name)
        todo |= names(found[name]) - set(found)
    text = json.dumps({"$defs": dict(sorted(found.items()))}, separators=(",", ":"))
    OUTPUT.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
