"""How byte-level vocabularies cut text before merging, by the names that GGUF files use.

The names are llama.cpp's (`tokenizer.ggml.pre`); each stands for one or more published
tokenizers, whose own regular expressions are given here. They are applied in turn, each to
the pieces that the one before left; what matches and what lies between are pieces alike.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from ..errors import UnsupportedModelError


class PreTokenizer(NamedTuple):
    """One named way of cutting text.

    Attributes:
        patterns: regular expressions in Oniguruma's dialect.
        ignore_merges: a piece that is a token stays whole, whatever its merges say.
        add_bos: whether texts begin with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_SYMBOL = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"


def _cased(upper: str, lower: str, tail: str) -> str:
    """Words that may begin with capitals (GPT-4o's and Mistral's)."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{upper}*{lower}+{tail}|{head}{upper}+{lower}*{tail}"


_WORDS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_cased(*_WORDS, f'{_CONTRACTION}?')}|\p{{N}}{{1,3}}|{_PATHS}"
_TEKKEN = rf"{_cased(*_WORDS, '')}|\p{{N}}|{_PATHS}"
_DEEPSEEK3 = (
    rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Letters with case, as DeepSeek LLM lists them (Unicode 11).
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS_BETWEEN_STOPS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HALVING_SPACES = (
    r"\s*[\r\n]+|"
    + "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))
    + r"|\s{1,2}(?!\S)|\s{1}"
)

_BY_NAMES: dict[str, PreTokenizer] = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"),
        ignore_merges=True,
    ),
    "jais-2": PreTokenizer(
        (rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_HALVING_SPACES}",)
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer(
        (_QWEN2,)
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "ufakzeka": PreTokenizer((rf"{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_SPACES}",)),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat"
    " a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4": PreTokenizer(
        (GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer(
        (r"\p{N}", GPT2)
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(
        (r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3)
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_WORDS_BETWEEN_STOPS,)),
    "viking": PreTokenizer((_WORDS_BETWEEN_STOPS, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS = {name: cut for names, cut in _BY_NAMES.items() for name in names.split()}


def find(name: str) -> PreTokenizer:
    """The pre-tokenizer of a `tokenizer.ggml.pre`.

    Raises:
        UnsupportedModelError: no such name is known; lists those that are.
    """
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


_WRITTEN_FIRST = ("llama-bpe", "qwen2", "smollm", "gpt-2")
"""Of names that cut alike the one to write."""


def name_of(patterns: tuple[str, ...], ignore_merges: bool) -> str | None:
    """A `tokenizer.ggml.pre` that cuts text by these regular expressions; None where there is none.

    Args:
        patterns: in Oniguruma's dialect, applied in turn.
    """
    names = [
        name
        for name, cut in PRE_TOKENIZERS.items()
        if cut.patterns == patterns and cut.ignore_merges == ignore_merges
    ]
    return next((name for name in _WRITTEN_FIRST if name in names), names[0] if names else None)


def build(cut: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in cut.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])
