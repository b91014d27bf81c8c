"""Which quantisation to serve a model in, on which devices, whether with speculation, and why.

`question.py` is what is asked, `model.py` and `devices.py` find the shape and the figures,
`schemes.py` says what weights may become, `estimate.py` what each of them takes and gives,
`speculation.py` whether drafting pays; `rules.py` is the table that it starts from, `quality.py`
what was measured, `served.py` what llmjax does today; `advisor.py` chooses, `reasons.py` and
`report.py` say it. How long a step takes is `llmjax.simulate.device`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advisor import Advice


def advise(model: str, gpu: str, **options: Any) -> Advice:
    """Which quantisation to serve a model in, by arithmetic; nothing is loaded or fetched.

    Args:
        model: a folder, a config.json, a .gguf file, a catalogue name or a hub id that is on this
            machine, or a name of `llmjax.simulate.shapes.SHAPES`.
        gpu: "h100", "h200", "a100", "l4", "t4", "b200", or "cpu".
        options: any other field of `llmjax.advise.question.Question`: `goal`, `accuracy`, `p99`,
            `input_len`, `output_len`, ...

    Raises:
        ConfigError: an option is unknown or out of range, or the model fits nowhere.
        ModelLoadError: the model cannot be found, or is none whose work is known.

    Example:
        >>> advice = llmjax.advise("llama-3-8b", "h100", p99=10.0)
        >>> advice.best.scheme, advice.best.batch
    """
    # Looking into models imports jax: only those who ask pay for it.
    from .advisor import advise_on
    from .question import Question

    return advise_on(Question.of(model=model, gpu=gpu, **options))
