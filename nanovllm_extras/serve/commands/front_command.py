"""Run the command `nanovllm front`: one address for a prefill engine and its decode engines."""

import logging
import sys
from types import FrameType

import uvicorn

from nanovllm_extras.machine.machine_limits import allow_open_files
from nanovllm_extras.machine.printing import say
from nanovllm_extras.serve.commands.front_options import make_parser
from nanovllm_extras.serve.commands.serve_command import url_of
from nanovllm_extras.serve.front import FrontOptions, make_front
from nanovllm_extras.serve.routes.server import listen, with_copies
from nanovllm_extras.serve.serve_settings import log_to_stderr
from nanovllm_extras.serve.server_options import ServerOptions


class FrontServer(uvicorn.Server):
    """uvicorn's server. After a signal it finishes the requests in progress, and the process ends with status 0."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first starts to drain, the second ends the server immediately."""
        self.force_exit = self.should_exit
        self.should_exit = True


def main(arguments: list[str]) -> int:
    """Run the front and return the exit status: 0 after a signal, 1 if it cannot listen, 2 for a bad command line."""
    args = make_parser().parse_args(arguments)
    log_to_stderr("info")
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    prefill, *decode = [url.rstrip("/").removesuffix("/v1") for url in (args.prefill, *args.decode)]
    app = make_front(FrontOptions(prefill, tuple(decode), args.prefill_timeout))
    allow_open_files()
    try:
        listening = listen(args.host, args.port)
    except OSError as error:
        say(f"nanovllm front: {error}", sys.stderr)
        return 1
    say(f"serving at {url_of(listening, 'http')}/v1")
    say(f"prefill    {prefill}")
    say(f"decode     {', '.join(decode)}")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="h11",
        timeout_keep_alive=ServerOptions.timeout_keep_alive_s,  # type: ignore[arg-type]  # uvicorn takes floats, too
        timeout_graceful_shutdown=int(ServerOptions.drain_timeout_s),
    )
    FrontServer(config).run(with_copies(listening))
    return 0
