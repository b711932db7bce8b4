"""The exercises in the order of the book: no exercise comes before one whose solution its file shows."""

from importlib import import_module

from labs.learn.exercise import Exercise
from labs.learn.texts import Text

MODULES = (
    "remove_one_line",
    "generation_loop",
    "predict_numbers",
    "attend_with_cache",
    "step_time",
    "schedule",
    "count_padding",
    "block_diagonal_mask",
    "grow_table",
    "release_blocks",
    "admit_whole",
    "attend_to_blocks",
    "merge_partials",
    "fork",
    "copy_on_write",
    "hash_chain",
    "revive_blocks",
    "register_blocks",
    "chunk_limit",
    "budget_from_itl",
    "preempt",
    "swap",
    "my_policy",
    "whole_engine",
    "full_block",
    "stale_hash",
    "freed_duplicate",
    "stale_prefix",
    "find_the_bug",
    "top_p",
    "draw_token",
    "streaming_detokenizer",
    "stop_strings",
    "placeholders",
    "graph_padding",
    "prefix_router",
    "verify_draft",
    "rejection_sampling",
    "predict_speculation",
    "hand_over",
    "predict_hand_over",
    "predict_states",
)
"""Modules of `exercises/`. Each has a tuple `EXERCISES`. Within a chapter, this is the order of the exercises."""

CHAPTERS = {
    "01_one_token": Text("1. One token", "1. 一个 token"),
    "02_kv_cache": Text("2. The KV cache", "2. KV cache"),
    "03_what_a_step_waits_for": Text("3. What a step waits for", "3. 一步在等什么"),
    "04_one_step": Text("4. One step", "4. 一步"),
    "05_blocks_and_tables": Text("5. Blocks and tables", "5. 块与块表"),
    "06_paged_attention": Text("6. Paged attention", "6. 分页注意力"),
    "07_sharing": Text(
        "7. Sharing: prefix cache, parallel samples, copy-on-write", "7. 共享：前缀缓存、并行采样、写时复制"
    ),
    "08_chunked_prefill": Text("8. Chunked prefill: TTFT against TPOT", "8. 分块预填充：TTFT 与 TPOT"),
    "09_when_memory_is_full": Text(
        "9. When memory is full: preemption, swap, policies", "9. 内存满了怎么办：抢占、换出和调度策略"
    ),
    "10_from_logits_to_text": Text("10. From logits to text", "10. 从 logits 到文本"),
    "11_making_it_fast": Text("11. Making it fast", "11. 让它变快"),
    "12_beyond_one_engine": Text("12. Beyond one engine", "12. 走出单个引擎"),
    "13_speculation": Text("13. Speculation: several tokens from one pass", "13. 投机解码：一次前向计算得到几个 token"),
    "14_kv_beyond_the_pool": Text("14. K and V beyond the pool", "14. 块池之外的 K 和 V"),
    "15_state_beside_pages": Text("15. Recurrent states: slots and snapshots", "15. 循环状态：槽位与快照"),
}
"""The titles of the book's chapters, which an installed package does not have."""


def list_exercises() -> list[Exercise]:
    """Return all exercises in the order of the book's chapters, and within a chapter in the order of `MODULES`."""
    found: list[Exercise] = []
    for name in MODULES:
        found += import_module(f"labs.learn.exercises.{name}").EXERCISES
    return sorted(found, key=lambda exercise: exercise.chapter)


def find_exercise(which: str) -> Exercise:
    """Return the exercise with this name or number, counted from 1. ValueError if no exercise has it."""
    exercises = list_exercises()
    if which.isdecimal():
        if 1 <= int(which) <= len(exercises):
            return exercises[int(which) - 1]
        raise ValueError(f"there is no exercise {which}; the numbers are 1 to {len(exercises)}")
    for exercise in exercises:
        if exercise.name == which:
            return exercise
    raise ValueError(f"there is no exercise {which!r}; `nanovllm learn list` shows their names")
