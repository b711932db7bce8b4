"""Handle `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields, if the operator allows them.

A client that may call them makes the server read a folder of its machine. So they need the option
`--allow-runtime-lora-updating`, or vLLM's variable VLLM_ALLOW_RUNTIME_LORA_UPDATING.
"""

import asyncio

from fastapi import APIRouter, Response

from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.protocol import Name, StrictModel
from nanovllm_extras.serve.state import ReadyServer

router = APIRouter(route_class=JSONRoute)


class LoadAdapter(StrictModel):
    """A request to load an adapter."""

    lora_name: Name
    lora_path: Name


class UnloadAdapter(StrictModel):
    """A request to forget an adapter."""

    lora_name: Name


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapter, server: ReadyServer) -> Response:
    """Load an adapter. From now on, requests may have its name as their model."""
    name, llm = body.lora_name, server.check_ready()
    if name in server.options.model_names or name in server.adapters:
        raise APIError(400, f"lora_name {name!r} is the name of a model that this server has", "lora_name")
    adapter = LoRARequest(name, server.adapters.take_number(), body.lora_path)
    try:
        with refuse("lora_path"):
            await asyncio.wrap_future(llm.thread.call(llm.engine.add_lora, adapter))
    except asyncio.CancelledError:  # it may be loaded all the same
        llm.thread.call(llm.engine.remove_lora, adapter.lora_int_id)
        raise
    server.adapters[name] = adapter
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapter, server: ReadyServer) -> Response:
    """Forget an adapter. Requests that were accepted keep it, and its memory is free when the last of them ends."""
    name, llm = body.lora_name, server.check_ready()
    adapter = server.adapters.get(name)
    if adapter is None:
        raise APIError(404, f"unknown LoRA adapter {name!r}", "lora_name", "model_not_found")
    retired = llm.thread.call(llm.engine.retire_lora, adapter.lora_int_id)
    server.adapters.unload(name)  # before anything else runs: it removes the adapter only after it is retired
    await asyncio.wrap_future(retired)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")
