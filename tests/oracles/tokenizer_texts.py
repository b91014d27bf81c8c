"""Texts that tell tokenizers apart."""

from __future__ import annotations

import random

WRITTEN = [
    *("", " ", "  ", "\t", "\n", "\n\n\n", "\t\n", "\r\n", "\u00a0", "\u3000x"),
    "Hello world",
    " Hello, World!",
    "   leading and trailing   ",
    "ied 4 ½ months",
    "Führer, Ünïcödé, e\u0301 a\u0300\u0301b",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 1,234,567.89 ٣٤ Ⅷ ²",
    "I've been 'told he's there, 'RE you sure? 'M not, 'D you? We'Ve a'lL don’t",
    "🚀 (normal) 😶\u200d🌫️ 👍🏽 👨\u200d👩\u200d👧\u200d👦 ✅ 🦙🦙",
    "нещо на Български, Ελληνικά, עברית, العربيّة",
    "កាន់តែពិសេសអាចខលចេញ क्षत्रिय ภาษาไทย",
    "我想在apple工作1314151天～。日本語のカタカナ、한국어 문장입니다！",
    "Hello, y'all! How are you 😁 ?!!!!!!....-----======____````",
    "def f(x):\n\treturn x**2  # sq\n\n\nclass A:\n    pass\n",
    "for (int i=0;i<10;i++) { a[i] = b[i]/2; } // ok\r\n\r\n",
    'x = {"key": [1, 2.5e-10, null], "p\\\\q": "\\u00e9"}\n',
    "https://example.com/a/b?c=d&e=f#g camelCase HTTPServer snake_case SHOUTING",
    "newlines\n \n  \n \t\t\n\n\n\n     x\u2028y",
]
ATOMS = (  # noqa: SIM905
    "a b B é É n t s 's 'S 'LL ’s ʼ 1 2 12345 ½ . , !? ... - _ / // ( ) { } [ ] \\ \" $ ^ ~ ` | "
    "< > = + 中 文 ひ カ 한 글 ก 🙂 👍🏽 ﬁ ǅ ª ʰ ß Ω А я Җ א ع 。 ， 、 ！ “ ” … "
    "„ © ™ ∑ € Word WORD I'm"
).split()
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u200d", "\ufe0f"]


def texts(specials: list[str], count: int = 60, seed: int = 7) -> list[str]:
    """The written texts, some random ones, and some with special tokens in them."""
    rng = random.Random(seed)
    mixed = ["".join(rng.choices(ATOMS + SPACES, k=rng.randint(2, 14))) for _ in range(count)]
    words = [*specials, " ", "a", "Hello", "\n", "  ", " world", "é"]
    marked = ["".join(rng.choices(words, k=rng.randint(1, 8))) for _ in range(count // 2)]
    return WRITTEN + mixed + (marked if specials else [])
