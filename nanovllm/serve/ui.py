"""`nanovllm serve --ui`: the page of recordings, as the server runs, with a chat box.

The page holds no data, so it needs no key. Its stream of events does, where the server has keys: the page reads it with
`fetch`, which can send the key, and submits chats as any client does.
"""

from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from nanovllm.serve.live_lines import LiveLines
from nanovllm.serve.state import ReadyServer
from nanovllm.trace.page import make_page

HEARTBEAT = b": still here\n\n"


def make_router(live: LiveLines) -> APIRouter:
    """The routes of the page over `live`, to which the engine's recorder writes."""
    router = APIRouter(include_in_schema=False)
    page = make_page([], is_live=True)

    @router.get("/ui")
    async def show_page() -> Response:
        return HTMLResponse(page)

    @router.get("/ui/events")
    async def follow(server: ReadyServer) -> Response:
        """The lines of the recording as server-sent events, from the newest header on."""
        return StreamingResponse(stream(live), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    return router


async def stream(live: LiveLines) -> AsyncIterator[bytes]:
    async for lines in live.follow():
        yield b"".join(f"data: {line}\n\n".encode() for line in lines) or HEARTBEAT
