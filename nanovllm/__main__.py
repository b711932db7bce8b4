"""`python -m nanovllm "What is a block table?"`: the bundled model answers, and the text is printed as it grows."""

import argparse
import re
import sys

from nanovllm import LLM, TINY_QWEN3, SamplingParams


def ask(questions: list[str]) -> int:
    """Print the answers to the questions, one after the other. Returns the exit status."""
    llm = LLM(TINY_QWEN3)
    for question in questions or ["What is a block table?"]:
        num_shown = 0
        prompts = llm.render_chat([{"role": "user", "content": question}])
        for output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=320)):
            text = output.outputs[0].text
            print(text[num_shown:], end="", flush=True)
            num_shown = len(text)
        print()
    return 0


def main() -> int:
    """Answer the questions of the command line. Returns the exit status."""
    commands = "The commands (serve, chat, view, check, …) belong to nanovllm_extras: python -m nanovllm_extras --help"
    parser = argparse.ArgumentParser(prog="python -m nanovllm", description="Ask the bundled model.", epilog=commands)
    parser.add_argument("question", nargs="*", help='such as "What is a block table?", which is the default')
    questions = parser.parse_args().question
    for question in questions:
        if re.fullmatch(r"[\w-]*", question):
            parser.error(f"a question has more than one word, got {question!r}. {commands}")
    return ask(questions)


if __name__ == "__main__":
    sys.exit(main())
