"""Handle `/slots`: save the blocks of a prompt by name, and restore, list and delete them (`--enable-kv-slots`).

The actions have the names of llama.cpp's server. Its slots have numbers, and their K and V go to a file; here a slot is
a name, the K and V are in the engine's K/V store, and a prompt finds them by its tokens. `kv_store/kv_slots.py` does
the work in a thread, because it reads files.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Request

from nanovllm.prompts import Prompt
from nanovllm_extras.kv_store.conversations import UnknownNameError
from nanovllm_extras.kv_store.kv_slots import Slot, Slots
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.protocol import SlotRequest
from nanovllm_extras.serve.prompts import chat_prompt, encode_prompts
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.workers import Check

router = APIRouter(route_class=JSONRoute)

T = TypeVar("T")
P = ParamSpec("P")


@router.get("/slots")
async def list_slots(server: ReadyServer) -> dict[str, object]:
    """Return the names of all slots."""
    names = await run(slots_of(server).names)
    return {"object": "list", "data": [{"id": name, "object": "slot"} for name in names]}


@router.post("/slots/{name}")
async def change_slot(
    name: str, action: Literal["save", "restore"], body: SlotRequest, request: Request, server: ReadyServer
) -> dict[str, object]:
    """Save the blocks of a prompt, or load those of a saved one, and return how many tokens they hold."""
    server.check_model(body.model)
    if server.adapter_of(body.model) is not None:
        raise APIError(400, "a slot has K and V of the model without adapters", "model")
    slots = slots_of(server)
    if (body.prompt is not None) + (body.messages is not None) != (action == "save"):
        raise APIError(400, "save needs either prompt or messages, and restore needs neither", "prompt")
    if action == "restore":
        return describe(await run(slots.restore, name, body.cache_salt))
    prompt = await server.workers.run(request, lambda check: encode(server, body, check))
    with refuse("prompt"):
        _, token_ids = server.check_ready().engine.input_processor.encode(prompt)
    return describe(await run(slots.save, name, token_ids, body.cache_salt))


@router.delete("/slots/{name}")
async def delete_slot(name: str, server: ReadyServer) -> dict[str, object]:
    """Remove a slot. Its blocks stay in the store until they are evicted."""
    await run(slots_of(server).delete, name)
    return {"id": name, "object": "slot.deleted", "deleted": True}


def slots_of(server: Server) -> Slots:
    """Return the slots of the server's engine. Raises APIError 501 if it has no store in a folder."""
    try:
        return Slots(server.check_ready().engine.parts.kv_store)
    except ValueError as error:
        raise APIError(501, str(error), code="no_kv_store") from error


async def run(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of `Slots` in a thread. Raises APIError 404 for an unknown name, 400 for a bad one."""
    with refuse("name"):
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except UnknownNameError as error:
            raise APIError(404, str(error), "name", "slot_not_found") from error


def encode(server: Server, body: SlotRequest, check: Check) -> Prompt:
    """Return the prompt of a request. Raises APIError 400."""
    bounds, tokenizer = server.bounds, server.check_ready().engine.tokenizer
    bounded = bounds.tokenizer(tokenizer, check)
    if body.messages is None:
        (prompt,) = encode_prompts(bounded, bounds, "prompt", body.prompt, body.add_special_tokens is not False)
        return prompt
    if body.add_generation_prompt is None:  # the next turn of a conversation has other tokens there
        body.add_generation_prompt = False
    return chat_prompt(bounded, bounds, body)


def describe(slot: Slot) -> dict[str, object]:
    """Return the JSON of a slot."""
    tokens = {"num_tokens": slot.num_tokens, "num_stored_tokens": slot.num_stored_tokens}
    return {"id": slot.name, "object": "slot", **tokens}
