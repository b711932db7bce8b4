"""`python -m nanovllm "What is a block table?"`: the bundled model answers, and the text is printed as it grows."""

import sys

import nanovllm


def ask(questions: list[str]) -> int:
    """Print the answers to the questions, one after the other. Returns the exit status."""
    llm = nanovllm.LLM(nanovllm.TINY_QWEN3)
    for question in questions or ["What is a block table?"]:
        num_shown = 0
        prompts = llm.render_chat([{"role": "user", "content": question}])
        for output in llm.stream(prompts, nanovllm.SamplingParams(temperature=0, max_tokens=320)):
            text = output.outputs[0].text
            print(text[num_shown:], end="", flush=True)
            num_shown = len(text)
        print()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. The package may export a `run_command` with more commands than `ask`."""
    return getattr(nanovllm, "run_command", ask)(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
