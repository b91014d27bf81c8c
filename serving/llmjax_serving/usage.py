"""Counting what a request used."""

from __future__ import annotations

from typing import Any

from llmjax.output import RequestOutput


class Usage:
    """OpenAI's `usage`: each prompt counts once, however many choices it has.

    Attributes:
        reasoning_tokens: of the completion's; None where they are not told apart.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0
        self.reasoning_tokens: int | None = None

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Counts the news `output` of prompt number `prompt`."""
        _, cached = self._prompts.get(prompt, (0, 0))
        cached = max(cached, output.num_cached_tokens)
        self._prompts[prompt] = (len(output.prompt_token_ids), cached)
        self._completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    def body(self) -> dict[str, Any]:
        prompt_tokens = sum(length for length, _ in self._prompts.values())
        body: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body
