"""nanovllm itself: first with PyTorch's layers, then with one option more each time.

    python -m labs.engine_options "What is the KV cache?" "What is a block table?"         # PyTorch's layers
    python -m labs.engine_options --fast-layers "What is the KV cache?"
    python -m labs.engine_options --fast-layers --cuda-graphs "What is the KV cache?"      # needs a CUDA device
    python -m labs.engine_options --fast-layers --cuda-graphs --overlap "What is the KV cache?"

`one_file.py` computes greedy tokens for prompts that all arrive at the start. The engine adds what users need: requests
that arrive and leave at any time, sampling, streamed text, stop conditions, errors and statistics. Without options, its
layers compute the same as those of `one_file.py`, more slowly: its attention clears the slots after the end of each
sequence, because they may hold NaN, and its norm takes several operations, to round as `transformers` does.

- `--fast-layers`: PyTorch runs dozens of small operations for each layer. Each operation reads and writes memory, and
  takes some microseconds before it computes anything. With fast layers, a layer is one call of C on a CPU, and nine
  kernel launches on a GPU. `attention_backend="auto"` chooses the fastest version that this machine has.
- `--cuda-graphs`: on a GPU, a decode of a small model waits for its launches: Python takes longer to launch the kernels
  than they take to run. A CUDA graph is a recording of a whole decode step for a fixed number of sequences. One launch
  replays the recording.
- `--overlap`: between two steps, the GPU waits while Python reads the last tokens and prepares the next step. With
  overlap, the engine launches the next step while the GPU still computes the current one. The newest tokens stay on the
  GPU.
"""

import argparse
from pathlib import Path

from labs.model import TINY_QWEN3, Model
from nanovllm_extras import Config, LLMEngine, SamplingParams


class Engine:
    def __init__(
        self,
        folder: str | Path,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        *,
        fast_layers: bool = False,
        cuda_graphs: bool = False,
        overlap: bool = False,
    ) -> None:
        self.engine = LLMEngine(
            Config(
                folder,
                dtype="float32",
                num_kv_blocks=num_blocks,
                block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens,
                skip_tokenizer_init=True,
                attention_backend="auto" if fast_layers else "torch",
                enforce_eager=not fast_layers,
                enable_cuda_graphs=cuda_graphs,
                enable_overlap=overlap,
            )
        )
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Return the greedy output tokens of each prompt. `max_tokens` is one limit, or one for each prompt."""
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
        """Read the totals since the start: waste = 1 - num_stored / num_reserved. A shared block counts once."""
        stats = self.engine.get_stats()
        self.num_steps = stats.steps
        self.num_stored, self.num_reserved = stats.kv_tokens_stored, stats.kv_slots_reserved


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer questions with nanovllm, with one option more each time.")
    parser.add_argument("question", nargs="*", default=["What is the KV cache?", "What is a block table?"])
    parser.add_argument("--fast-layers", action="store_true", help="the fastest layers that this machine has")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay decode steps (with --fast-layers, on CUDA)")
    parser.add_argument("--overlap", action="store_true", help="launch the next step before the current one has ended")
    args = parser.parse_args()
    if args.cuda_graphs and not args.fast_layers:
        parser.error("--cuda-graphs needs --fast-layers: PyTorch's layers are not recorded in graphs")
    options = {"fast_layers": args.fast_layers, "cuda_graphs": args.cuda_graphs, "overlap": args.overlap}
    engine = Engine(TINY_QWEN3, num_blocks=64, block_size=16, max_num_batched_tokens=64, **options)
    model = Model(TINY_QWEN3)
    prompts = [model.encode(question) for question in args.question]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(model.decode(token_ids))


if __name__ == "__main__":
    main()
