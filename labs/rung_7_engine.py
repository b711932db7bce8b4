"""Rung 7: nanovllm, with PyTorch's layers.

The one file serves greedy tokens of prompts that are all there at once, for itself.
The engine adds what users ask for: requests that come and go, sampling, parallel samples with copy-on-write, text that
streams, stop rules, errors, statistics. Its layers are those of rung 6: the same work, with less Python around it.

    python -m labs.rung_7_engine "What is the KV cache?" "What is a block table?"
"""

import sys
from pathlib import Path

from labs.model import TINY_QWEN3, Model
from nanovllm import Config, LLMEngine, SamplingParams


class Engine:
    def __init__(self, folder: str | Path, num_blocks: int, block_size: int, max_num_batched_tokens: int) -> None:
        self.engine = LLMEngine(
            Config(
                folder,
                dtype="float32",
                num_kv_blocks=num_blocks,
                block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens,
                skip_tokenizer_init=True,
                attention_backend="torch",
                enforce_eager=True,
            )
        )
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Greedy output tokens of each prompt; `max_tokens` for all of them, or one number for each."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            self.engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=limit), stream=False)
        token_ids: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            step = self.engine.step()
            self.max_num_running = max(self.max_num_running, step.num_seqs)
            token_ids |= {output.request_id: output.outputs[0].token_ids for output in step.outputs}
        self.count()
        return [token_ids[str(i)] for i in range(len(prompts))]

    def count(self) -> None:
        """Since the engine started. Waste is 1 - num_stored / num_reserved. A shared block counts once."""
        stats = self.engine.get_stats()
        self.num_steps = stats.steps
        self.num_stored, self.num_reserved = stats.kv_tokens_stored, stats.kv_slots_reserved


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, num_blocks=64, block_size=16, max_num_batched_tokens=64)
    model = Model(TINY_QWEN3)
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(model.decode(token_ids))
