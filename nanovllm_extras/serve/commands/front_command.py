"""Run the command `nanovllm front`: one address for a prefill engine and its decode engines."""

import argparse
import logging
import sys
from types import FrameType

import uvicorn

from nanovllm_extras.machine.machine_limits import allow_open_files
from nanovllm_extras.machine.printing import say
from nanovllm_extras.options.argument_types import filled, http_url, port
from nanovllm_extras.serve.commands.serve_command import url_of
from nanovllm_extras.serve.front import FrontOptions, make_front
from nanovllm_extras.serve.routes.server import listen, with_copies
from nanovllm_extras.serve.serve_settings import log_to_stderr, seconds
from nanovllm_extras.serve.state import ServerOptions


class FrontServer(uvicorn.Server):
    """uvicorn's server. After a signal it finishes the requests in progress, and the process ends with status 0."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first starts to drain, the second ends the server immediately."""
        self.force_exit = self.should_exit
        self.should_exit = True


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="nanovllm front",
        description="Send requests to a prefill engine, which computes the prompt, then to a decode engine.",
        epilog="All engines are servers of the same model, with the same shared tier in --kv-transfer-config.",
    )
    parser.add_argument("--prefill", type=http_url, required=True, metavar="URL", help="the prefill engine")
    parser.add_argument(
        "--decode", type=http_url, required=True, metavar="URL", nargs="+", action="extend", help="the decode engines"
    )
    parser.add_argument("--host", type=filled, default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8000, help="port; 0 for any free port (default: 8000)")
    parser.add_argument(
        "--prefill-timeout",
        type=seconds,
        default=FrontOptions.prefill_timeout_s,
        metavar="SECONDS",
        help="time after which a decode engine computes the prompt (default: 60)",
    )
    return parser


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
