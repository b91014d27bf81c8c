"""Beam search: the likeliest continuations by their whole, not token by token.

As vLLM's: each step asks for the likeliest next tokens of every live beam, one-token requests
whose contexts the prefix cache has, and keeps the best `beam_width` of all. A beam that says
an end-of-sequence token is done. Scores are log-probabilities of the model's own distribution,
divided by length ** length_penalty at the end (Wu et al. 2016, without its constants).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .checks import shown, type_errors
from .errors import InvalidRequestError
from .output import CompletionOutput, RequestOutput
from .request import SamplingParams

MAX_BEAMS = 64


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Fields as vLLM's.

    Attributes:
        beam_width: beams that are kept, and completions that come back.
        max_tokens: most to generate.
        ignore_eos: go on behind end-of-sequence tokens.
        length_penalty: above 1 favours longer completions, below 1 shorter ones.

    Raises:
        InvalidRequestError: a value is of the wrong type or out of range; names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, message in type_errors(self):
            raise InvalidRequestError(message, param=name)
        ranges = {
            "beam_width": (1, MAX_BEAMS),
            "max_tokens": (1, 2**31 - 1),
            "length_penalty": (-10, 10),
        }
        for name, (least, most) in ranges.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise InvalidRequestError(
                    f"{name} is {shown(value)}, allowed: {least} to {most}", param=name
                )

    @property
    def step(self) -> SamplingParams:
        """What a beam's next tokens are asked for with."""
        return SamplingParams(
            temperature=0, max_tokens=1, logprobs=2 * self.beam_width, detokenize=False
        )


@dataclass(frozen=True)
class Beam:
    """A continuation so far, and the log-probability of all of it."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    is_done: bool = False


class BeamSearch:
    """The search behind one prompt.

    Args:
        eos_token_ids: end a beam, and are part of its tokens.
        max_len: tokens of prompt and continuation that the engine allows.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_len: int,
    ):
        self._prompt = list(prompt_token_ids)
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._most = min(params.max_tokens, max_len - len(self._prompt))
        self._live = [Beam()]
        self._done: list[Beam] = []
        self._num_cached: int | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """The contexts whose next tokens are wanted; none once the search has ended."""
        return [[*self._prompt, *beam.token_ids] for beam in self._live]

    def advance(self, tops: Iterable[Mapping[int, float]]) -> None:
        """Goes on by one token.

        Args:
            tops: for each of `prompts` the likeliest next tokens and their log-probabilities.
        """
        found: list[Beam] = []
        for beam, top in zip(self._live, tops, strict=True):
            for token, logprob in top.items():
                longer = Beam((*beam.token_ids, token), beam.logprob + logprob, token in self._eos)
                (self._done if longer.is_done else found).append(longer)
        found.sort(key=lambda beam: -beam.logprob)
        self._live = found[: self._params.beam_width]
        if self._live and len(self._live[0].token_ids) >= self._most:
            self._done += self._live
            self._live = []

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Goes on by what requests for `prompts` with the parameters of a step have given."""
        if self._num_cached is None:
            self._num_cached = outputs[0].num_cached_tokens
        rows = ((output.outputs[0].logprobs or [{}])[0] for output in outputs)
        self.advance({token: entry.logprob for token, entry in row.items()} for row in rows)

    def output(
        self, request_id: str, prompt: str | None, decode: Callable[[Sequence[int]], str]
    ) -> RequestOutput:
        """What the search has found; the end of a sequence is not part of the text."""
        choices = [
            CompletionOutput(
                index=i,
                text=decode(beam.token_ids[:-1] if beam.is_done else beam.token_ids),
                token_ids=list(beam.token_ids),
                finish_reason="stop" if beam.is_done else "length",
                cumulative_logprob=beam.logprob,
            )
            for i, beam in enumerate(self.best())
        ]
        return RequestOutput(
            request_id,
            prompt,
            self._prompt,
            choices,
            finished=True,
            num_cached_tokens=self._num_cached or 0,
        )

    def best(self) -> list[Beam]:
        """The best completions once the search has ended, best first."""
        return sorted(self._done, key=lambda beam: -self.score(beam))[: self._params.beam_width]

    def score(self, beam: Beam) -> float:
        # Counted with the prompt and without the end, as vLLM does.
        length = len(self._prompt) + len(beam.token_ids) - beam.is_done
        return beam.logprob / max(length, 1) ** self._params.length_penalty
