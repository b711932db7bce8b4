"""Let three samples continue one prompt with different tokens, with copy-on-write or without it.

python -m labs.demos.copy_on_write                    # each sample writes to a block of its own
python -m labs.demos.copy_on_write --without-copies   # the copy is omitted: samples overwrite each other's K and V
"""

import argparse
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence
from nanovllm_extras import LLM, TINY_QWEN3, Config, LLMEngine, SamplingParams

# without a prefix cache, which would find the overwritten blocks again
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_kv_blocks": 64,
    "dtype": "float32",
    "attention_backend": "torch",
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
QUESTION, NUM_SAMPLES, MAX_TOKENS, NUM_SHOWN = "Why use blocks?", 3, 14, 2


class NoCopies(BlockManager):
    """A block manager with one mistake: a sequence that should get its own copy keeps writing to the shared block."""

    def _copy_tail(self, seq: Sequence) -> None:
        pass


class CarelessEngine(LLMEngine):
    def make_block_manager(self) -> BlockManager:
        return NoCopies(self.parts.num_kv_blocks, self.parts.block_size, False, self.observer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy-on-write, and what happens without it.")
    parser.add_argument("--without-copies", action="store_true", help="omit the copies")
    args = parser.parse_args()
    with LLM(TINY_QWEN3, **OPTIONS) as llm:
        [prompt] = llm.render_chat([[{"role": "user", "content": QUESTION}]])
        right = sample(llm.engine, prompt, is_shown=not args.without_copies)
        if args.without_copies:
            wrong = sample(CarelessEngine(Config(TINY_QWEN3, **OPTIONS)), prompt, is_shown=True)
            compare(right, wrong, llm.get_tokenizer())
        else:
            for name, token_ids in right.items():
                print(f"{name}  {llm.get_tokenizer().decode(token_ids)!r}")


def sample(engine: LLMEngine, prompt: Any, is_shown: bool) -> dict[str, list[int]]:
    """Complete the prompt three times, and return the tokens of each sample. Show where its first tokens are stored."""
    params = SamplingParams(temperature=1.5, top_k=6, seed=0, n=NUM_SAMPLES, max_tokens=MAX_TOKENS, ignore_eos=True)
    engine.add_request("C", prompt, params)
    for _ in range(1 + NUM_SHOWN):  # the prompt, and a step for each of the tokens to show
        output = engine.step().outputs[0]
    if is_shown:
        show(engine)
    while engine.has_unfinished_requests():
        output = engine.step().outputs[0]
    return {f"C.{one.index}": list(one.token_ids) for one in output.outputs}


def show(engine: LLMEngine) -> None:
    seqs, size = engine.scheduler.running, OPTIONS["block_size"]
    first = seqs[0].num_prompt_tokens
    print(f"a prompt of {first} tokens: its last block has {-first % size} empty slots\n")
    print("sample   its first tokens, and the slots of their K and V")
    for seq in seqs:
        cells = []
        for position in range(first, first + NUM_SHOWN):
            text = engine.tokenizer.decode([seq.token_ids[position]])
            slot = seq.block_table[position // size] * size + position % size
            cells.append(f"{text!r} in slot {slot}")
        print(f"C.{seq.sample_index}      {', '.join(cells)}")
    print()


def compare(right: dict[str, list[int]], wrong: dict[str, list[int]], tokenizer: Any) -> None:
    """Print each sample with copies and without them, and the first token that differs."""
    for name in right:
        num_same = next((i for i, (a, b) in enumerate(zip(right[name], wrong[name], strict=True)) if a != b), None)
        told = "the same tokens" if num_same is None else f"token {num_same} is the first that differs"
        print(f"{name}  with copies     {tokenizer.decode(right[name])!r}")
        print(f"     without copies  {tokenizer.decode(wrong[name])!r}   {told}")


if __name__ == "__main__":
    main()
