"""The offline API: a model in the caller's process, for notebooks and scripts."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from flax import nnx
from tqdm.auto import tqdm

from .config import EngineConfig
from .engine.engine import Engine
from .engine.outputs import OutputProcessor
from .errors import InvalidRequestError
from .models import Decoder, ForwardOutput
from .request import Request, RequestOutput, SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model that generates, chats, streams, and shows its inside.

    Args:
        model: a catalogue name, a folder, a .gguf file or a hub id.
        options: any field of the configuration in `llmjax.config`, such as `dtype`,
            `max_model_len`, `max_num_seqs`, `seed`, `gpu_memory_utilization`.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: an option is unknown, out of range or does not fit the machine.

    Example:
        >>> llm = LLM("smollm2-135m-instruct")
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0))
    """

    def __init__(self, model: str, **options: Any):
        # Offline all prompts are at hand at once: a full queue would only be in the way.
        self.engine = Engine(EngineConfig.of(model, **{"max_queue_len": None, **options}))
        self._processor = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._news: set[str] = set()
        self._left: deque[str] = deque()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.model.tokenizer

    @property
    def model(self) -> Decoder:
        """The Flax NNX module; its parameters are the very arrays that serve."""
        return nnx.merge(self.engine.model.graphdef, self.engine.model.state)

    @property
    def default_params(self) -> SamplingParams:
        """What a call without params takes: the values that the model's authors recommend."""
        return SamplingParams(**self.engine.model.generation_defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, many at once.

        Args:
            prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a
                list of any of these.
            params: for all, or one for each prompt; None takes `default_params`.
            use_tqdm: show a progress bar where there is more than one prompt.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; nothing runs.
        """
        batch: Any = [prompts] if _is_one_prompt(prompts) else prompts
        return self._run([self._encode(p) for p in batch], params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template.

        Args:
            messages: one conversation ({"role", "content"} each), or a list of them.
            template: passed on to the chat template, such as `tools`.

        Raises:
            ChatTemplateError: the template refused the messages.
        """
        one = not messages or isinstance(messages[0], Mapping)
        batch: Any = [messages] if one else messages
        return self._run([self._encode_chat(m, template) for m in batch], params, use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[RequestOutput]:
        """Yields what is new of one prompt's or conversation's output as it is generated.

        Leaving the iteration early ends the request.

        Args:
            template: for a conversation, passed on to the chat template.

        Raises:
            InvalidRequestError: `template` is given with a prompt that takes none.
        """
        if not isinstance(prompt, str) and prompt and isinstance(prompt, Sequence):
            is_chat = isinstance(prompt[0], Mapping)
        else:
            is_chat = False
        if template and not is_chat:
            raise InvalidRequestError(
                f"{', '.join(template)}: allowed with messages only, not with a prompt",
                param=next(iter(template)),
            )
        encoded = self._encode_chat(prompt, template) if is_chat else self._encode(prompt)  # type: ignore[arg-type]
        request = self._add(encoded, params or self.default_params)
        try:
            finished = False
            while not finished:
                (output,) = self._advance({request.id}, delta=True)
                finished = output.finished
                if output.outputs:
                    yield output
        finally:
            self._forget([request.id])

    def forward(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        inputs_embeds: Any = None,
        attentions: bool = False,
    ) -> ForwardOutput:
        """The whole forward pass of one sequence: logits [T, V] and all hidden states.

        Differentiable: take gradients of `llm.model(tokens)` by `nnx.grad`, or of
        `llm.forward(inputs_embeds=x)` by `jax.grad`.

        Raises:
            InvalidRequestError: no tokens, or an id outside the vocabulary.
        """
        tokens = None
        if token_ids is not None:
            ids = [int(i) for i in token_ids]
            vocab = self.engine.model.config.vocab_size
            if not ids or min(ids) < 0 or max(ids) >= vocab:
                raise InvalidRequestError(
                    f"token_ids must be one or more ids from 0 to {vocab - 1}", param="token_ids"
                )
            tokens = jnp.asarray(ids, jnp.int32)
        return self.model(tokens, inputs_embeds=inputs_embeds, attentions=attentions)

    def close(self) -> None:
        """Stops what goes on behind: the compilation of further step programs."""
        self.engine.close()

    def _run(
        self,
        encoded: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(encoded)
        if len(params) != len(encoded):
            raise InvalidRequestError(
                f"{len(encoded)} prompts came with {len(params)} params", param="params"
            )
        ids: list[str] = []
        try:
            for prompt, p in zip(encoded, params, strict=True):
                ids.append(self._add(prompt, p).id)
            return self._collect(ids, use_tqdm and len(ids) > 1)
        finally:
            self._forget(ids)

    def _collect(self, ids: list[str], show: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        waiting, tokens = set(ids), 0
        with tqdm(total=len(ids), desc="Prompts", disable=not show, dynamic_ncols=True) as bar:
            while waiting:
                for output in self._advance(waiting, delta=False):
                    outputs[output.request_id] = output
                    waiting.remove(output.request_id)
                    tokens += sum(len(c.token_ids) for c in output.outputs)
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{tokens / elapsed:.0f} tok/s", refresh=False)
                    bar.update()
        return [outputs[i] for i in ids]

    def _advance(self, request_ids: set[str], *, delta: bool) -> list[RequestOutput]:
        """Steps the engine until there is news of any of these requests, and takes it.

        Others may be under way: streams left half read, calls from other threads. Their
        news waits for them, and the lock is never held while a caller has the word.

        Returns:
            What is new of each, where `delta`; else the whole of each that has ended.
        """
        with self._lock:
            self._end_left()
            while not (news := self._news & request_ids):
                with _interrupts_later():
                    touched, stopped = self._processor.process(self.engine.step())
                    for request_id, index in stopped:
                        self.engine.abort(request_id, index)
                    self._news.update(touched)
            self._news -= news
            ready = [i for i in news if delta or self._processor.is_finished(i)]
            return [self._processor.output(i, delta=delta) for i in ready]

    def _add(self, encoded: tuple[str | None, list[int]], params: SamplingParams) -> Request:
        prompt, ids = encoded
        request = Request(str(next(self._ids)), ids, params, self.tokenizer.eos_token_ids)
        with self._lock:
            self.engine.add(request)
            self._processor.add(request, prompt)
        return request

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Ends what has not ended: now, or where the engine is in use when it next is not.

        The garbage collector may close a forgotten stream in the middle of another call,
        whose thread would wait for itself.
        """
        self._left.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._end_left()
            finally:
                self._lock.release()

    def _end_left(self) -> None:
        """Also takes in a step that was dispatched ahead of the end."""
        while self._left:
            request_id = self._left.popleft()
            self.engine.abort(request_id)
            self._processor.remove(request_id)
            self._news.discard(request_id)
        stats = self.engine.stats
        while self.engine.has_work and not (stats().num_running or stats().num_waiting):
            with _interrupts_later():
                self.engine.step()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise InvalidRequestError(
                    f"a prompt mapping has the keys {sorted(prompt)}, allowed: either prompt or "
                    "prompt_token_ids",
                    param="prompt",
                )
            prompt = next(iter(prompt.values()))
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, [int(i) for i in prompt]

    def _encode_chat(self, messages: Messages, template: dict) -> tuple[str | None, list[int]]:
        return None, self.tokenizer.encode_chat(messages, **template)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Holds Ctrl-C back: in the middle of a step it would leave the engine out of order."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return len(prompts) > 0 and all(isinstance(i, int) for i in prompts)
