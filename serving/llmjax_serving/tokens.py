"""POST /tokenize, /detokenize and /v1/chat/completions/render; GET /tokenizer_info."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiohttp import web

from .body import read_json
from .prompts import encode_chat, template_arguments, truncated
from .schema.chat import ChatRequest, parse_chat
from .schema.sampling import check_model
from .schema.tokens import TokenizeRequest, parse_detokenize, parse_tokenize
from .state import STATE

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


def tokenized(tokenizer: Tokenizer, request: TokenizeRequest, max_model_len: int) -> str:
    """The answer as JSON; of a long prompt it takes a while."""
    if isinstance(request.prompt, str):
        tokens = tokenizer.encode(request.prompt, request.add_special_tokens)
    else:
        tokens = encode_chat(tokenizer, request.prompt)
    texts = list(map(tokenizer.token_text, tokens)) if request.return_token_strs else None
    return json.dumps(
        {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.ready()
    body = parse_tokenize(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    args = (engine.tokenizer, body, engine.max_model_len)
    text = await state.in_thread(tokenized, *args, slow=body.may_be_slow)
    return web.json_response(text=text)


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.ready()
    body = parse_detokenize(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    # vLLM keeps special tokens here, so that the text tokenises back to the same ids.
    text = await state.in_thread(
        lambda: engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return web.json_response({"prompt": text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """What a client needs beside /tokenize to make prompts itself; names as vLLM's."""
    engine = request.app[STATE].ready()
    tokenizer = engine.tokenizer
    eos, bos = sorted(tokenizer.eos_token_ids), tokenizer.bos_token_id
    return web.json_response(
        {
            "bos_token": None if bos is None else tokenizer.token_text(bos),
            "eos_token": tokenizer.token_text(eos[0]) if eos else None,
            "chat_template": tokenizer.chat_template,
            "model_max_length": engine.max_model_len,
            "vocab_size": tokenizer.vocab_size,
        }
    )


def rendered(tokenizer: Tokenizer, request: ChatRequest, max_model_len: int) -> str:
    """What the model is to go on with, as JSON."""
    prompt = request.prompt
    whole = encode_chat(tokenizer, prompt)
    ids = truncated(whole, request.truncate, request.params, max_model_len)
    if len(ids) < len(whole):
        text = tokenizer.decode(ids, skip_special_tokens=False)
    else:
        arguments = template_arguments(tokenizer, prompt)
        arguments.pop("add_special_tokens", None)
        text = tokenizer.render_chat(prompt.messages, **arguments)
    return json.dumps({"prompt": text, "prompt_token_ids": ids, "count": len(ids)})


async def render(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.ready_engine()
    body = parse_chat(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    args = (engine.tokenizer, body, engine.max_model_len)
    text = await state.in_thread(rendered, *args, slow=body.may_be_slow)
    return web.json_response(text=text)
