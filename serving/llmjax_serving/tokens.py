"""POST /tokenize and /detokenize."""

from __future__ import annotations

from aiohttp import web

from .body import read_json
from .prompts import encode_chat
from .schema.sampling import check_model
from .schema.tokens import parse_detokenize, parse_tokenize
from .state import STATE


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.ready_engine()
    body = parse_tokenize(await read_json(request))
    check_model(body.model, state.model_name)
    tokenizer, prompt = engine.tokenizer, body.prompt
    if isinstance(prompt, str):
        tokens = await state.in_thread(tokenizer.encode, prompt, body.add_special_tokens)
    else:
        tokens = await state.in_thread(encode_chat, tokenizer, prompt)
    texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return web.json_response(
        {
            "count": len(tokens),
            "max_model_len": engine.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.ready_engine()
    body = parse_detokenize(await read_json(request), state.limits)
    check_model(body.model, state.model_name)
    # vLLM keeps special tokens here, so that the text tokenises back to the same ids.
    text = await state.in_thread(
        lambda: engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return web.json_response({"prompt": text})
