"""Run the command `nanovllm chat`: a session if it runs in a terminal, one answer if it runs in a pipe."""

import argparse
import os
import sys

from nanovllm import TINY_QWEN3
from nanovllm_extras.kv_store.disk_tier import check_name
from nanovllm_extras.options.option_checks import first_given
from nanovllm_extras.options.store_options import check_folder
from nanovllm_extras.terminal.answerers import Answerer, AnswerError, LocalAnswerer, ServerAnswerer
from nanovllm_extras.terminal.chat_arguments import make_parser
from nanovllm_extras.terminal.chat_history import Conversation
from nanovllm_extras.terminal.screen import Screen
from nanovllm_extras.terminal.session import COMMANDS, Session
from nanovllm_extras.vllm.engine_args import EngineArgs

SAMPLING = ("temperature", "top_p", "max_tokens")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, 1 if there was no answer, 2 for a bad option, or 130 after Ctrl-C in a pipe."""
    parser = make_parser()
    args = parser.parse_args(argv)
    is_pipe = not (sys.stdin.isatty() and sys.stdout.isatty())
    try:
        answerer = make_answerer(args, is_pipe)
        if is_pipe:
            return answer_pipe(answerer, args.system, args.conversation)
        screen = Screen(COMMANDS)
        screen.note(f"{answerer.name}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D exits.")
        session = Session(answerer, screen, args.system)
        if args.conversation is not None and (line := resume(answerer, session.conversation, args.conversation)):
            screen.note(line)
        session.run()
        if args.conversation is not None and session.conversation.turns:
            session.handle(f"/save {args.conversation}")
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # prevents an error when Python flushes
    except (AnswerError, ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"nanovllm chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_answerer(args: argparse.Namespace, is_pipe: bool) -> Answerer:
    """Return the source of answers.

    Raises ValueError or TypeError for an option that is not allowed, AnswerError if the server does not answer.
    """
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    model = first_given(args.chat_model, args.model)
    args.model = first_given(model, str(TINY_QWEN3))
    engine_args = EngineArgs.from_cli_args(args)
    if args.conversation is not None:
        check_conversation(args, engine_args)
    if args.url:
        if engine_args != EngineArgs(args.model):
            raise ValueError("options of the engine cannot be used with --url: the server has its own engine")
        return ServerAnswerer(args.url, model, args.api_key, sampling)
    if not is_pipe:
        print("loading …", end="\r", flush=True)
    return LocalAnswerer(engine_args, sampling)


def check_conversation(args: argparse.Namespace, engine_args: EngineArgs) -> None:
    """Raise ValueError if the conversation `args.conversation` could not be saved."""
    if args.url:
        raise ValueError("--conversation cannot be used with --url: an engine in this process saves conversations")
    check_folder(engine_args)
    check_name("--conversation", args.conversation)


def resume(answerer: Answerer, conversation: Conversation, name: str) -> str:
    """Continue the conversation that is saved as `name`, and return a line about it; "" if there is none yet."""
    saved = answerer.saved
    if name not in saved.names():
        return ""
    messages, line = saved.load(name)
    conversation.restore(messages)
    return line


def answer_pipe(answerer: Answerer, system: str, name: str | None) -> int:
    """Read one question from the input, and print only the answer while it grows. Return the exit status."""
    question = sys.stdin.read().strip()
    if not question:
        raise ValueError("the input is empty; it must be a question")
    conversation = Conversation(system)
    if name is not None:
        resume(answerer, conversation, name)
    num_printed, text = 0, ""
    for text, _ in answerer.answer(conversation.ask(question)):
        print(text[num_printed:], end="", flush=True)
        num_printed = len(text)
    if not text.endswith("\n"):
        print(flush=True)
    if name is not None and text:
        conversation.keep(question, text, None)
        answerer.saved.save(name, conversation.messages)
    return 0
