"""What does a consumer ask for, and can the engine serve it? Checked in the consumer's event loop, before anything is
queued; what takes long is done in a thread, so that the loop need not wait for it.
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.intake import Params, Prompt

LONG_TEXT = 4096  # characters; longer texts are encoded in a thread


class NewRequest(NamedTuple):
    """The arguments of `LLMEngine.add_request`; without `stream`, the only output is the last one."""

    request_id: str
    prompt: Prompt
    sampling_params: Params | None = None
    priority: int = 0
    stream: bool = True


async def check_request(engine: LLMEngine, request: NewRequest) -> NewRequest:
    """The request with its prompt encoded and its parameters copied, or an error if it cannot be served.

    What is called here reads nothing of the engine that its steps change.
    """
    params, take_params = request.sampling_params, engine.intake.take_params
    if params is not None:
        compiles = getattr(params, "structured_outputs", None) is not None  # a grammar, which can take its time
        params = await asyncio.to_thread(take_params, params) if compiles else take_params(params)
    prompt, encode = request.prompt, engine.intake.encode
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    takes_time = isinstance(text, str) and len(text) > LONG_TEXT
    text, token_ids = await asyncio.to_thread(encode, prompt) if takes_time else encode(prompt)
    return request._replace(sampling_params=params, prompt={"prompt": text, "prompt_token_ids": token_ids})
