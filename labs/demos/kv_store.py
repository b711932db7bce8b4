"""Compute a prompt in one process and continue it in another: the blocks of K and V go through a folder.

    python -m labs.demos.kv_store
    python -m labs.demos.kv_store --trace run.jsonl    # record the process that continues
    python -m labs.demos.kv_store --times              # computing and loading longer prompts; differs by machine

Each line is a process with an engine of its own. The first one saves the blocks and samples one token. The others have
empty pools: all that they find comes from the folder. Before the last process starts, one byte of one file is changed.
"""

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

CHAT = [
    {"role": "user", "content": "What is a block table?"},
    {"role": "assistant", "content": "A block table is the list of block ids of one sequence, in order."},
    {"role": "user", "content": "What is paged attention?"},
]
ENGINE: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True, "block_size": 4}
DAMAGED = 4  # index of the block whose file is changed
NUM_TOKENS = 20  # of the answer, at most
NUM_ROUNDS = 3
LENGTHS = (64, 256, 1024)  # of the prompts of --times


class Result(NamedTuple):
    text: str
    num_prompt_tokens: int
    num_found: int
    num_failed: int


def transfer(folder: str, role: str) -> dict[str, Any]:
    """Return the options of an engine that saves to a folder (kv_producer) or loads from it (kv_consumer)."""
    extra = {"shared_storage_path": folder, "max_bytes": 1 << 30}
    return {"kv_connector": "SharedStorageConnector", "kv_role": role, "kv_connector_extra_config": extra}


def answer(folder: str | None, role: str, max_tokens: int, trace: str | None = None) -> tuple[str, int, int, int]:
    """Answer the chat with an engine of this process, and return the fields of a `Result`.

    Without a folder, the engine has no store.
    """
    import torch

    from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

    torch.set_num_threads(1)  # steps are too small for more
    store: dict[str, Any] = {} if folder is None else {"kv_transfer_config": transfer(folder, role)}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(TINY_QWEN3, num_kv_blocks=32, trace=trace, **ENGINE, **store) as llm:
        [output] = llm.chat(CHAT, params, use_tqdm=False)
        stats = llm.get_stats().kv_store
    num_found, num_failed = (0, 0) if stats is None else (stats.loaded_tokens, stats.num_failed_loads)
    return output.outputs[0].text, len(output.prompt_token_ids), num_found, num_failed


def in_new_process(function: Any, *arguments: Any) -> Any:
    """Call a function in a process that ends with the call. It shares nothing with this process but files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanovllm.llm", "transformers.models.auto"])  # these imports take seconds
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def damage(folder: Path) -> None:
    """Change the last byte of one block's file. The files were written from the last block to the first one."""
    files = sorted(folder.glob("*.kv"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    data = bytearray(files[DAMAGED].read_bytes())
    data[-1] ^= 1
    files[DAMAGED].write_bytes(data)


def compare(trace: str | None) -> None:
    """Run four processes one after the other, and print a row for each."""
    print("process                    prompt   found   computed   failed   text")
    with tempfile.TemporaryDirectory() as name:
        computed = Result(*in_new_process(answer, name, "kv_producer", 1))
        show("1 computes the prompt", computed)
        num_files = len(list(Path(name).glob("*.kv")))
        continued = Result(*in_new_process(answer, name, "kv_consumer", NUM_TOKENS, trace))
        show("2 continues", continued)
        damage(Path(name))
        survived = Result(*in_new_process(answer, name, "kv_consumer", NUM_TOKENS))
        show("3 finds a damaged block", survived)
    plain = Result(*in_new_process(answer, None, "", NUM_TOKENS))
    show("4 has no store", plain)
    print(f"\n{num_files} files; same text: {'yes' if continued.text == survived.text == plain.text else 'NO'}")


def show(name: str, result: Result) -> None:
    num_computed = result.num_prompt_tokens - result.num_found
    print(
        f"{name:25} {result.num_prompt_tokens:>7} {result.num_found:>7} {num_computed:>10} {result.num_failed:>8}"
        f"   {result.text!r}"
    )


# ---- times


def first_token_ms(folder: str | None, role: str) -> list[float]:
    """Return the least processor time to the first token for each of `LENGTHS`, with an empty pool each time."""
    import torch

    from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams

    torch.set_num_threads(1)
    store: dict[str, Any] = {} if folder is None else {"kv_transfer_config": transfer(folder, role)}
    params = SamplingParams(temperature=0, max_tokens=1)
    found = []
    with LLM(TINY_QWEN3, num_kv_blocks=LENGTHS[-1] // 4 + 2, **ENGINE, **store) as llm:
        for length in LENGTHS:
            times = []
            for i in range(NUM_ROUNDS):
                begin = time.process_time()  # not the time in which other programs have the core
                # each round has its own first token, so the pool has none of the blocks; the folder has them all
                llm.generate([{"prompt_token_ids": [100 + i, *range(200, 199 + length)]}], params, use_tqdm=False)
                times.append(1000 * (time.process_time() - begin))
            found.append(min(times))
    return found


def measure_times() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_new_process(first_token_ms, folder, "kv_producer")
        loaded = in_new_process(first_token_ms, folder, "kv_consumer")
    computed = in_new_process(first_token_ms, None, "")
    print("tokens   computed   loaded    ratio")
    for length, before, after in zip(LENGTHS, computed, loaded, strict=True):
        print(f"{length:>6}   {before:>5.1f} ms   {after:>4.1f} ms   {before / after:>6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A prompt computed in one process and continued in another.")
    parser.add_argument("--trace", type=Path, help="record the second process to this file")
    parser.add_argument("--times", action="store_true", help="measure the time to the first token instead")
    args = parser.parse_args()
    if args.times:
        measure_times()
    else:
        compare(None if args.trace is None else str(args.trace))


if __name__ == "__main__":
    main()
