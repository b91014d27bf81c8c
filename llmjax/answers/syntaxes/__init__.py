"""How models write calls, one file a way."""

from .base import Call, Calls, Frame, Syntax
from .deepseek import DeepSeek, DeepSeekV3
from .functiongemma import FunctionGemma
from .gpt_oss import GptOss
from .hermes import Hermes
from .llama import Llama3Json
from .mistral import Mistral, MistralArgs
from .plain_json import PlainJson
from .pythonic import Pythonic

__all__ = ["PLAIN_JSON", "SYNTAXES", "Call", "Calls", "Frame", "Syntax", "detect_syntax"]

PLAIN_JSON = PlainJson()

SYNTAXES: dict[str, Syntax] = {
    "deepseek_v3": DeepSeekV3(),
    "deepseek_v31": DeepSeek(),
    "functiongemma": FunctionGemma(),
    "gpt_oss": GptOss(),
    "hermes": Hermes(),
    "json": PLAIN_JSON,
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "mistral_args": MistralArgs(),
    "pythonic": Pythonic(),
}
"""By the names of `--tool-call-parser`."""

_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|message|>"), ()),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",), ()),
    ("functiongemma", ("<start_function_call>",), ()),
    # Qwen3-Coder and GLM have the same tag around another syntax.
    ("hermes", ("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    ("pythonic", ("func_name1(params_name1=",), ()),
    ("llama3_json", ("<|start_header_id|>", "parameters"), ()),
)
"""(name, what a chat template of it has, what it has not), the most particular first."""


def detect_syntax(template: str) -> Syntax | None:
    """The syntax that a chat template shows or asks for, if it is one of these."""
    for name, present, absent in _SIGNS:
        if all(s in template for s in present) and not any(s in template for s in absent):
            return SYNTAXES[name]
    return None
