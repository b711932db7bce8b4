"""Define the options of `nanovllm front`, without the packages of the extra `front`."""

import argparse

from nanovllm_extras.options.argument_types import filled, http_url, port
from nanovllm_extras.serve.serve_settings import seconds
from nanovllm_extras.serve.server_options import PREFILL_TIMEOUT_S


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
        default=PREFILL_TIMEOUT_S,
        metavar="SECONDS",
        help="time after which a decode engine computes the prompt (default: 60)",
    )
    return parser
