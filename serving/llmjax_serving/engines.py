"""What routes ask of an engine, be it in this process or in another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from llmjax.config import EngineConfig
from llmjax.metrics import Metrics
from llmjax.output import RequestOutput
from llmjax.request import RequestOptions, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from llmjax.engine.pooling_inputs import InputMaker, PoolingInput
    from llmjax.engine.streams import OnCut
    from llmjax.tokenizer import Tokenizer


class AnyClient(Protocol):
    """See `AsyncEngine` and `PoolingEngine`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def generation_defaults(self) -> Mapping[str, float]: ...
    @property
    def metrics(self) -> Metrics: ...
    def check_health(self) -> None: ...


class TextClient(AnyClient, Protocol):
    """Of a model that generates."""

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        on_cut: OnCut | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...


class VectorClient(AnyClient, Protocol):
    """Of one that embeds or scores."""

    @property
    def task(self) -> str: ...
    @property
    def inputs(self) -> InputMaker: ...
    async def run(self, inputs: Sequence[PoolingInput]) -> list[np.ndarray]: ...
