"""Encode the inputs of `/v1/embeddings` and `/pooling`, and truncate them as the request says."""

from typing import Any

from fastapi import Request

from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.text_cuts import cut_to_fit, token_limit
from nanovllm_extras.serve.bounds import BoundedTokenizer
from nanovllm_extras.serve.errors import refuse
from nanovllm_extras.serve.messages.pooling_protocol import MAX_INPUTS, InputFields
from nanovllm_extras.serve.prompts import are_many, check_lengths, encode_prompts, encode_text
from nanovllm_extras.serve.state import Server
from nanovllm_extras.serve.workers import Check


async def encode_inputs(server: Server, request: Request, body: InputFields) -> list[Prompt]:
    """Return the prompts of a request. Raises APIError 400 if one is too long."""
    is_long = are_many(body.input) or None
    prompts = await server.workers.run(request, lambda check: encode_all(server, body, check), is_long=is_long)
    check_lengths(prompts, "input", server.bounds)
    return prompts


def encode_all(server: Server, body: InputFields, check: Check) -> list[Prompt]:
    """Return the prompts, truncated as the request says: texts and token ids are cut at their end."""
    bounds, adds = server.bounds, body.add_special_tokens is not False
    most = token_limit(body.truncate_prompt_tokens, bounds.max_model_len, bounds.capacity)
    bounds = bounds if most is None else bounds.of_truncated()
    tokenizer = bounds.tokenizer(server.check_ready().engine.tokenizer, check)
    prompts = encode_prompts(tokenizer, bounds, "input", body.input, adds, MAX_INPUTS)
    if most is None:
        return prompts
    with refuse("input"):
        return [truncated(tokenizer, prompt, adds, most) for prompt in prompts]


def truncated(tokenizer: BoundedTokenizer | None, prompt: Any, adds: bool, most: int) -> Prompt:
    """Return an encoded prompt with at most `most` tokens."""
    if not isinstance(prompt, dict):
        ids: list[int] = prompt[:most]
        return ids
    if len(prompt["prompt_token_ids"]) <= most:
        whole: Prompt = prompt
        return whole
    assert tokenizer is not None
    text = cut_to_fit(tokenizer, prompt["prompt"], lambda cut: len(tokenizer.encode(cut, adds)), most)
    return encode_text(tokenizer, text, adds)
