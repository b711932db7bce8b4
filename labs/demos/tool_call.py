"""Follow one tool call as text: a prompt that offers a tool, an answer that calls it, a prompt with its result.

    python -m labs.demos.tool_call
    python -m labs.demos.tool_call --city Bergen --piece 3

Needs the extra `serve` (`pip install -e ".[serve]"`). The answer is written here, because the bundled model has not
learned to call tools; the format is that of Qwen3, and the server's own parser reads it.
"""

import argparse
import json

from nanovllm_extras.answer_parts.events import CallArguments

TOOL = {"name": "temperature", "description": "Degrees Celsius in a city", "parameters": {"city": "string"}}


def temperature(city: str) -> int:
    """Return an invented temperature. The client runs its tools, not the engine."""
    return len(city)


def message(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="One tool call, as the text that the model reads and writes.")
    parser.add_argument("--city", default="Oslo")
    parser.add_argument("--piece", type=int, default=12, help="characters of the answer that arrive at once")
    args = parser.parse_args()
    if args.piece < 1:
        parser.error(f"--piece must be >= 1, got {args.piece}")
    try:
        from nanovllm_extras.serve.parsers.hermes import Hermes
    except ModuleNotFoundError as error:
        parser.error(f'the parser needs {error.name}. Install it: pip install -e ".[serve]"')

    prompt = message("system", f"Tools:\n{json.dumps(TOOL)}\nCall one by <tool_call>{{name, arguments}}</tool_call>.")
    prompt += message("user", f"How warm is it in {args.city}?") + "<|im_start|>assistant\n"
    print("1. The server renders the list of tools into the prompt:\n")
    print(prompt)

    answer = f"<tool_call>\n{json.dumps({'name': 'temperature', 'arguments': {'city': args.city}})}\n</tool_call>"
    print(f"\n2. The model writes text, and the parser reads it {args.piece} characters at a time:\n")
    hermes, arguments = Hermes(), ""
    for start in range(0, len(answer), args.piece):
        piece = answer[start : start + args.piece]
        events = hermes.feed(piece)
        arguments += "".join(event.text for event in events if isinstance(event, CallArguments))
        print(f"   {piece!r:<18}{', '.join(map(str, events)) or '(no event yet)'}")

    result = temperature(**json.loads(arguments))
    print(f"\n3. The client runs temperature({args.city!r}) = {result}, and asks again:\n")
    print(prompt + message("assistant", answer).removeprefix("<|im_start|>assistant\n"), end="")
    print(message("user", f"<tool_response>\n{result}\n</tool_response>") + "<|im_start|>assistant\n")


if __name__ == "__main__":
    main()
