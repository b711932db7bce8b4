"""Define the options of `nanovllm chat`, without the packages of the extra `chat`."""

import argparse
import os

from nanovllm_extras.options.argument_types import filled, http_url
from nanovllm_extras.vllm.engine_args import EngineArgs


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options, including those of the engine."""
    parser = argparse.ArgumentParser(
        prog="nanovllm chat",
        usage="nanovllm chat [MODEL] [options]",
        description="Chat with a model in the terminal. In a pipe, the whole input is one question: "
        "echo 'What is a block table?' | nanovllm chat",
        conflict_handler="resolve",  # the chat's option replaces one of the engine with the same name
    )
    parser.add_argument("chat_model", nargs="?", metavar="MODEL", type=filled,
                        help="folder or hub id (default: the bundled model); with --url, its name")  # fmt: skip
    group = parser.add_argument_group("chat")
    EngineArgs.add_cli_args(parser)
    url = "use a running server, such as http://127.0.0.1:8000, instead of loading a model"
    group.add_argument("--url", type=http_url, help=url)
    group.add_argument("--api-key", type=filled, default=os.environ.get("OPENAI_API_KEY") or None, metavar="KEY",
                       help="key of the server (default: the environment variable OPENAI_API_KEY)")  # fmt: skip
    group.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    group.add_argument("--temperature", type=float, metavar="NUMBER",
                       help="0 selects the likeliest token (default: the model's)")  # fmt: skip
    group.add_argument("--top-p", type=float, metavar="NUMBER",
                       help="sample from the likeliest tokens with this total probability")  # fmt: skip
    group.add_argument("--max-tokens", type=int, metavar="N", help="maximum length of an answer (default: the context)")
    group.add_argument("--conversation", type=filled, metavar="NAME",
                       help="continue the conversation that is saved as NAME, and save it at the end")  # fmt: skip
    return parser
