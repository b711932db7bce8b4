"""Follow a question to its answer: text, token ids, hidden states, logits, the next token, and again.

Shows each form of a question on its way through the network of `labs/model.py`, and counts the tokens that
`labs/recompute.py` computes. Then nanovllm answers the same question.

    python -m labs.demos.one_token
    python -m labs.demos.one_token "What is a cat?"
    python -m labs.demos.one_token --trace run.jsonl      # record nanovllm's run
"""

import argparse
from typing import Any

import torch

from labs.model import TINY_QWEN3, Model
from labs.recompute import Engine
from nanovllm_extras import LLM, SamplingParams

MAX_TOKENS = 20
NUM_ROWS = 5  # steps that the table shows


def main() -> None:
    parser = argparse.ArgumentParser(description="Follow a question to its answer, token by token.")
    parser.add_argument("question", nargs="?", default="Who are you?")
    parser.add_argument("--trace", help="record nanovllm's run to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are too small for more
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "block_size": 4}
    with LLM(TINY_QWEN3, trace=args.trace, num_kv_blocks=64, **options) as llm:
        message = {"role": "user", "content": args.question}
        prompt: Any = llm.render_chat([message])[0]
        answer = generate(prompt["prompt"], prompt["prompt_token_ids"])
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)[0]
        print(f"nanovllm answers the same: {output.outputs[0].text == answer}")


def generate(text: str, prompt_ids: list[int]) -> str:
    engine = Engine(TINY_QWEN3)
    model = engine.model
    print(f"message    in the chat template: {text!r}")
    print("token ids ", *prompt_ids)
    print("as text   ", " ".join(repr(piece) for piece in pieces(model, prompt_ids)), "\n")
    print("step  token ids  hidden states  logits  most likely next tokens")
    token_ids, counts = list(prompt_ids), list[int]()
    while len(counts) < MAX_TOKENS and token_ids[-1] not in model.end_token_ids:
        input_ids = torch.tensor(token_ids)
        hidden = model(input_ids, torch.arange(len(token_ids)), engine.attend)  # [num_tokens, hidden_size]
        logits = hidden[-1] @ model.weights["model.embed_tokens.weight"].T  # [vocab_size]
        counts.append(len(token_ids))
        if len(counts) <= NUM_ROWS:
            shapes = f"{str(list(input_ids.shape)):>9}  {str(list(hidden.shape)):>13}  {list(logits.shape)}"
            print(f"{len(counts):>4}  {shapes}  {most_likely(model, logits)}")
        token_ids.append(int(logits.argmax()))
    print(" ...")
    answer = model.decode(token_ids[len(prompt_ids) :])
    print(f"\nanswer     {answer!r}")
    print(f"in tokens  {'|'.join(pieces(model, token_ids[len(prompt_ids) :]))!r}")
    print(f"computed   {counts[0]} + {counts[1]} + … + {counts[-1]} = {sum(counts)} tokens for {len(counts)} new ones")
    return answer


def most_likely(model: Model, logits: torch.Tensor) -> str:
    probabilities, ids = logits.softmax(dim=-1).topk(5)
    found = zip(pieces(model, ids.tolist()), probabilities.tolist(), strict=True)
    return "  ".join(f"{piece!r} {probability:.2f}" for piece, probability in found)


def pieces(model: Model, token_ids: list[int]) -> list[str]:
    return [model.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]


if __name__ == "__main__":
    main()
