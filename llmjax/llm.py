"""The offline API: a model in the caller's process, for notebooks and scripts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx

from .answers import AnswerPlan, ChatFormat, ToolUse, plan_answer, read_tools
from .arguments import (
    PROMPT,
    Messages,
    Options,
    Prompt,
    as_batch,
    as_token_ids,
    each_options,
    for_each,
    is_list,
    refused,
)
from .beam_search import BeamSearch, BeamSearchParams
from .callers import Callers, Encoded
from .checks import shown
from .config import EngineConfig
from .engine.engine import Engine
from .engine.pooling import PoolingEngine, make_pooling_engine
from .engine.replicas import Replicas, make_engine
from .errors import ConfigError, InvalidRequestError
from .models import Decoder, ForwardOutput
from .output import RequestOutput
from .pooled import cannot_generate, cannot_pool
from .pooling_api import PoolingAPI
from .request import RequestOptions, SamplingParams
from .tokenizer import Tokenizer


class LLM(PoolingAPI):
    """A loaded model that generates, chats, streams, and shows its inside; or one that embeds
    texts, or scores and ranks them.

    As a context manager it is closed at the end.

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
        config = EngineConfig.of(model, **{"max_queue_len": None, **options})
        self._plain_state: nnx.State | None = None
        self._pooler = make_pooling_engine(config)
        self._callers = Callers(make_engine(config) if self._pooler is None else None)
        if self._pooler is not None:
            self._pooler.start()
            # Its thread would keep it, and the weights, for ever.
            weakref.finalize(self, self._pooler.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the model, and stops the compilation of further step programs.

        Whatever is asked of it afterwards raises ShutdownError, but closing it again.
        """
        pooler, self._pooler, self._plain_state = self._pooler, None, None
        if pooler is not None:
            pooler.close()
        self._callers.close()

    @property
    def engine(self) -> Engine | Replicas:
        """What runs the requests.

        Raises:
            ShutdownError: it is closed.
            InvalidRequestError: the model does not generate text.
        """
        if self._pooler is not None:
            raise cannot_generate(self._pooler.config.model.name, self._pooler.task)
        return self._callers.engine

    @property
    def pooler(self) -> PoolingEngine:
        if self._pooler is None:
            raise cannot_pool(self.engine.config.model.name)
        return self._pooler

    @property
    def tokenizer(self) -> Tokenizer:
        return (self._pooler or self.engine).model.tokenizer

    @property
    def model(self) -> Decoder:
        """The Flax NNX module; its parameters are the very arrays that serve.

        But where these are packed for kernels, or quantised: then they are copies in floats,
        made when they are first asked for and kept until `close`.

        Raises:
            ConfigError: it is cut into stages.
        """
        loaded = self.engine.model
        if loaded.stages:
            raise ConfigError(
                f"pipeline_parallel_size is {len(loaded.stages)}, allowed for LLM.model and "
                "LLM.forward: 1, as no device has the whole model"
            )
        if self._plain_state is None:
            self._plain_state = loaded.differentiable_state()
        return nnx.merge(loaded.graphdef, self._plain_state)

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
        priority: int | Sequence[int] | None = None,
        options: Options = None,
    ) -> list[RequestOutput]:
        """Completes prompts, many at once.

        Args:
            prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a
                list of any of these.
            params: for all, or one for each prompt; None takes `default_params`.
            use_tqdm: show a progress bar where there is more than one prompt.
            priority: for all, or one for each prompt; instead of what `options` say.
            options: how requests are treated beside others; for all, or one for each prompt.

        Returns:
            One output for each prompt, in order. That of a request which was late (`timeout`)
            holds what there was of it, and the `error`.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; nothing runs.
        """
        encoded = [self._encode(p) for p in as_batch(prompts)]
        return self._run(encoded, params, use_tqdm, priority, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        options: Options = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template.

        Args:
            messages: one conversation ({"role", "content"} each), or a list of them.
            priority, options: as in `generate`.
            tools, tool_choice, parallel_tool_calls: functions that the model may call, or must,
                as in OpenAI's API.
            template: passed on to the chat template, such as `enable_thinking`; or
                `split_special_tokens=False`, where special tokens that are written in messages
                are to be more than text.

        Returns:
            Outputs as of `generate`; the `message` of each choice has content, reasoning and calls
            apart, and its `as_dict()` goes on the conversation.

        Raises:
            ChatTemplateError: the template refused the messages.
            InvalidRequestError: a tool or its parameters make no sense; nothing runs.
        """
        many = is_list(messages) and len(messages) > 0 and is_list(messages[0])
        batch: Any = messages if many else [messages]
        use = ToolUse.of(read_tools(tools), tool_choice, parallel_tool_calls)
        each = self._params(params, len(batch))
        planned = [self._plan(m, p, use, template) for m, p in zip(batch, each, strict=True)]
        encoded: list[Encoded] = [(None, ids) for ids, _, _ in planned]
        bound = [params for _, params, _ in planned]
        outputs = self._run(encoded, bound, use_tqdm, priority, options)
        for output, (_, _, plan) in zip(outputs, planned, strict=True):
            plan.reader()(output)
        return outputs

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        options: RequestOptions | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **template: Any,
    ) -> Iterator[RequestOutput]:
        """Yields what is new of one prompt's or conversation's output as it is generated.

        Leaving the iteration early ends the request.

        Args:
            priority: instead of what `options` say.
            options: how the request is treated beside others.
            tools, tool_choice, parallel_tool_calls: for a conversation, as in `chat`; calls come
                in pieces, which `ChatMessage.add` puts together.
            template: for a conversation, passed on to the chat template.

        Raises:
            InvalidRequestError: the prompt or its parameters cannot be served, or `template`
                is given with a prompt that takes none.
            RequestTimeoutError, QueueTimeoutError: it was late to end, or to begin.
        """
        is_chat = is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)  # type: ignore[index]
        one, treated = self._params(params, 1)[0], each_options(priority, options, 1)[0]
        asked = {"tools": tools, "tool_choice": tool_choice}
        use = ToolUse.of(read_tools(tools), tool_choice, parallel_tool_calls)
        if is_chat:
            ids, one, plan = self._plan(prompt, one, use, template)  # type: ignore[arg-type]
            return self._callers.stream((None, ids), one, treated, plan.reader())
        given = [*template] + [n for n, v in asked.items() if v is not None]
        if given:
            raise InvalidRequestError(
                f"{', '.join(given)}: allowed with messages only, not with a prompt", param=given[0]
            )
        return self._callers.stream(self._encode(prompt), one, treated)  # type: ignore[arg-type]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[RequestOutput]:
        """The `beam_width` likeliest completions of each prompt, best first.

        Raises:
            InvalidRequestError: a prompt cannot be served, or twice `beam_width` is more than
                `max_logprobs`.
        """
        most = self.engine.config.max_logprobs // 2
        if params.beam_width > most:
            raise refused("beam_width", params.beam_width, f"up to {most}, half of max_logprobs")
        encoded = [self._encode(p) for p in as_batch(prompts)]
        eos, longest = self.tokenizer.eos_token_ids, self.engine.max_model_len
        searches = [BeamSearch(ids, params, eos, longest) for _, ids in encoded]
        while contexts := [ids for search in searches for ids in search.prompts]:
            step: list[Encoded] = [(None, ids) for ids in contexts]
            outputs = iter(self._run(step, params.step, False, None, None))
            for search in searches:
                if part := list(islice(outputs, len(search.prompts))):
                    search.take(part)
        decode = self.tokenizer.decode
        return [
            search.output(self._callers.new_id(), prompt, decode)
            for (prompt, _), search in zip(encoded, searches, strict=True)
        ]

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
            InvalidRequestError: no tokens, or an id outside the vocabulary; or embeddings of
                another shape.
        """
        config = self.engine.model.config
        if attentions and self.engine.config.parallel.tensor_parallel_size > 1:
            raise refused("attentions", attentions, "False with tensor_parallel_size above 1")
        if inputs_embeds is None:
            allowed = f"one or more token ids from 0 to {config.vocab_size - 1}"
            ids = as_token_ids(token_ids, "token_ids", allowed)
            if not ids or min(ids) < 0 or max(ids) >= config.vocab_size:
                raise refused("token_ids", token_ids, allowed)
            return self.model(jnp.asarray(ids, jnp.int32), attentions=attentions)
        if token_ids is not None:
            raise refused("token_ids", token_ids, "None where inputs_embeds is given")
        shape: Any = getattr(inputs_embeds, "shape", ())
        if len(shape) != 2 or not shape[0] or shape[1] != config.hidden_size:
            allowed = f"an array of shape [T, {config.hidden_size}]"
            raise refused("inputs_embeds", inputs_embeds, allowed)
        return self.model(inputs_embeds=inputs_embeds, attentions=attentions)

    def _run(
        self,
        encoded: list[Encoded],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        options: Options,
    ) -> list[RequestOutput]:
        each = self._params(params, len(encoded))
        treated = each_options(priority, options, len(encoded))
        return self._callers.run(list(zip(encoded, each, treated, strict=True)), show=use_tqdm)

    def _params(self, params: Any, count: int) -> Sequence[SamplingParams]:
        """One for each of `count` prompts."""
        if params is None:
            return [self.default_params] * count
        return for_each("params", params, SamplingParams, count)

    def _encode(self, prompt: Prompt) -> Encoded:
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise InvalidRequestError(
                    f"a prompt mapping has the keys {shown(list(prompt))}, allowed: either prompt "
                    "or prompt_token_ids",
                    param="prompt",
                )
            prompt = next(iter(prompt.values()))
        if isinstance(prompt, str):
            return prompt, self.engine.model.tokenizer.encode(prompt)
        return None, as_token_ids(prompt, "prompt", PROMPT)

    def _plan(
        self, messages: Messages, params: SamplingParams, use: ToolUse | None, template: dict
    ) -> tuple[list[int], SamplingParams, AnswerPlan]:
        """A conversation's prompt, and how its answers are bound and read."""
        tokenizer, config = self.tokenizer, self.engine.config.model
        if use is not None:
            template = {**template, "tools": [tool.as_dict() for tool in use.offered]}
        ids = tokenizer.encode_chat(messages, **template)
        begun = None
        if template.get("continue_final_message"):
            content = messages[-1].get("content")
            begun = content if isinstance(content, str) else ""
        names = config.tool_call_parser, config.reasoning_parser
        form = ChatFormat.of(*names, template.get("chat_template") or tokenizer.tool_template)
        return ids, *plan_answer(form, use, params, tokenizer, ids, begun)
