"""Handle the routes of stored responses: read, delete and cancel them, and list their input.

A response is found only with the key that has created it. https://platform.openai.com/docs/api-reference/responses
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from nanovllm_extras.serve.body import JSONRoute
from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.response_store import RunningResponse, StoredResponse
from nanovllm_extras.serve.state import ReadyServer, Server
from nanovllm_extras.serve.streaming import JSON, encode, read_log

router = APIRouter(route_class=JSONRoute)

NOT_RUNNING = "Cannot cancel a response that has ended."
NO_STREAM = "stream must be false: only a response that was created with background and stream has its events"
NO_START = "starting_after must be absent unless stream is true"


@router.get("/v1/responses/{response_id}")
@router.head("/v1/responses/{response_id}", include_in_schema=False)
async def get_response(
    response_id: str,
    request: Request,
    server: ReadyServer,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Return a stored response, or the current state of one that is being generated.

    With `stream`, return the events of a response in the background, later ones included.
    starting_after: the number of the event before the first one.
    """
    response = find(server, request, response_id)
    if stream:
        if response.log is None:
            raise APIError(400, NO_STREAM, "stream")
        return read_log(response.log, 0 if starting_after is None else starting_after + 1)
    if starting_after is not None:
        raise APIError(400, NO_START, "starting_after")
    return Response(response.answer, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, server: ReadyServer) -> Response:
    """Delete a stored response. The generation of one that is being generated is ended first."""
    owner = server.owner_of(request)
    running = server.responses.running(owner, response_id)
    if running is not None:
        await running.cancel()
    if not server.responses.delete(owner, response_id) and running is None:
        raise not_found(response_id)
    return JSON({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request, server: ReadyServer) -> Response:
    """End the generation of a response, and return the response."""
    response = find(server, request, response_id)
    if not isinstance(response, StoredResponse):
        await response.cancel()
        response = find(server, request, response_id)
    elif not response.is_background:  # in the background it may have ended just now
        raise APIError(400, NOT_RUNNING, "response_id")
    return Response(response.answer, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
@router.head("/v1/responses/{response_id}/input_items", include_in_schema=False)
async def list_input_items(
    response_id: str,
    request: Request,
    server: ReadyServer,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Return the items from which a response was generated, those of earlier responses included, in pages.

    after: the id of the item before the first one of the page.
    """
    turn = find(server, request, response_id).turn
    items = [*turn.items_before(), *turn.input]
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((i for i, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise APIError(404, f"Item with id '{after[:100]}' not found.", "after")
        items = items[place + 1 :]
    page = items[:limit]
    names = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    fields = encode({"object": "list", **names, "has_more": len(items) > len(page)})
    data = b",".join([item.json for item in page])
    return Response(fields[:-1] + b',"data":[' + data + b"]}", media_type="application/json")


def find(server: Server, request: Request, response_id: str) -> RunningResponse | StoredResponse:
    """Return a response. Raises APIError 404 if there is none that the request's key may read."""
    owner = server.owner_of(request)
    response = server.responses.running(owner, response_id) or server.responses.get(owner, response_id)
    if response is None:
        raise not_found(response_id)
    return response


def not_found(response_id: str) -> APIError:
    """Return the error for a response that is not stored."""
    return APIError(404, f"Response with id '{response_id[:100]}' not found.", "response_id")
