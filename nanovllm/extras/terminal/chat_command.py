"""`nanovllm chat`: options in; a session in a terminal, one answer in a pipe."""

import argparse
import os
import sys

from nanovllm import TINY_QWEN3
from nanovllm.extras.terminal.answerers import Answerer, AnswerError, LocalAnswerer, ServerAnswerer
from nanovllm.extras.terminal.chat_history import Conversation
from nanovllm.extras.terminal.screen import Screen
from nanovllm.extras.terminal.session import COMMANDS, Session
from nanovllm.extras.vllm.engine_args import EngineArgs

SAMPLING = ("temperature", "top_p", "max_tokens")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if there was no answer, 2 for a bad option, 130 after Ctrl-C in a pipe."""
    parser = make_parser()
    args = parser.parse_args(argv)
    is_pipe = not (sys.stdin.isatty() and sys.stdout.isatty())
    try:
        answerer = make_answerer(args, is_pipe)
        if is_pipe:
            return answer_pipe(answerer, args.system)
        screen = Screen(COMMANDS)
        screen.note(f"{answerer.name}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        Session(answerer, screen, args.system).run()
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # lest Python complains when it flushes
    except (AnswerError, ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"nanovllm chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm chat",
        usage="nanovllm chat [MODEL] [options]",
        description="Talk to a model in the terminal. In a pipe, all of the input is one question: "
        "echo 'What is a block table?' | nanovllm chat",
        conflict_handler="resolve",  # the chat's option replaces one of the engine with the same name
    )
    parser.add_argument("chat_model", nargs="?", metavar="MODEL",
                        help="folder or hub id (default: the bundled one); with --url, a name there")  # fmt: skip
    group = parser.add_argument_group("chat")
    EngineArgs.add_cli_args(parser)
    group.add_argument("--url", help="talk to a running server, such as http://127.0.0.1:8000, and load no model")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY",
                       help="of the server (default: the environment's OPENAI_API_KEY)")  # fmt: skip
    group.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    group.add_argument("--temperature", type=float, metavar="NUMBER",
                       help="0 always takes the likeliest token (default: the model's)")  # fmt: skip
    group.add_argument("--top-p", type=float, metavar="NUMBER",
                       help="draw from the likeliest tokens that add up to this probability")  # fmt: skip
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: as long as the model can)")
    return parser


def make_answerer(args: argparse.Namespace, is_pipe: bool) -> Answerer:
    """Raises ValueError or TypeError for an option that is not allowed, AnswerError if the server does not answer."""
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    model = args.chat_model or args.model
    args.model = model or str(TINY_QWEN3)
    engine_args = EngineArgs.from_cli_args(args)
    if args.url:
        if engine_args != EngineArgs(args.model):
            raise ValueError("options of the engine have no place beside --url: the server has an engine of its own")
        return ServerAnswerer(args.url, model, args.api_key, sampling)
    if not is_pipe:
        print("loading …", end="\r", flush=True)
    return LocalAnswerer(engine_args, sampling)


def answer_pipe(answerer: Answerer, system: str) -> int:
    """The whole input is the question. Only the answer goes to the output, as it grows."""
    question = sys.stdin.read().strip()
    if not question:
        raise ValueError("the input holds no question")
    num_printed = 0
    text = ""
    for text, _ in answerer.answer(Conversation(system).ask(question)):
        print(text[num_printed:], end="", flush=True)
        num_printed = len(text)
    if not text.endswith("\n"):
        print(flush=True)
    return 0
