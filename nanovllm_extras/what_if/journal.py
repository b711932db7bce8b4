"""`Journal`: the figures of a run, and the run as a recording, which `nanovllm view` opens like one of an engine.

The events are those of docs/trace.md that the core's scheduler and block manager cause. `trace/recorder.py` writes the
same ones for an engine; a test compares them, event by event. A token that is not known has the text `?`.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from nanovllm.sequence import Sequence
from nanovllm_extras.records.full_observer import count_stored_tokens
from nanovllm_extras.trace.recording import FORMAT, VERSION
from nanovllm_extras.what_if.figures import Figures
from nanovllm_extras.what_if.known_sequence import KnownSequence
from nanovllm_extras.what_if.options import Options
from nanovllm_extras.what_if.requests import UNKNOWN_TOKEN

if TYPE_CHECKING:
    from nanovllm.block_manager import BlockManager
    from nanovllm.scheduler import Step


class Journal(Figures):
    """Writes a line for each step to `file`. `texts` are those of the token ids that the recording has.

    has_times: the clock is good enough to show times. Otherwise the header says so, and the viewer shows none.
    """

    def __init__(
        self, file: TextIO, options: Options, model: str, texts: Mapping[str, str], has_times: bool = True
    ) -> None:
        super().__init__()
        self.has_times = has_times
        self.events: list[list[Any]] = []
        self._file = file
        self._texts = {str(UNKNOWN_TOKEN): "?", **texts}
        self._budget = options.max_num_batched_tokens
        self._decodes: list[Sequence] = []
        self._blocks: BlockManager | None = None
        self._num_steps = 0
        self._num_admitted = 0
        self._num_live = 0
        config = {
            "model": model, "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens, "max_model_len": options.max_model_len,
            "long_prefill_token_threshold": 0, "sliding_window": None, "scheduling_policy": "fcfs",
            "enable_prefix_caching": options.enable_prefix_caching, "preemption_mode": "recompute",
            "tensor_parallel_size": 1, "num_swap_blocks": 0, "enable_overlap": False, "has_times": has_times,
            "description": "simulated by nanovllm what-if",
        }  # fmt: skip
        self._write({
            "format": FORMAT, "version": VERSION, "num_blocks": options.num_blocks, "block_size": options.block_size,
            "num_steps_before": 0, "t": 0, "config": config, "in_flight": [], "state": None,
        })  # fmt: skip

    def on_start(self, blocks: "BlockManager") -> None:
        self._blocks = blocks

    def end_step(self, seconds: float) -> None:
        """Write the events until now, and the time of the step."""
        line: dict[str, Any] = {"t": self._now(), "events": self.events}
        if self.has_times:
            line["times"] = {"run": round(1e6 * seconds)}
        if self._texts:
            line["texts"], self._texts = self._texts, {}
        self._write(line)
        self.events = []

    def close(self) -> None:
        """Write the events after the last step."""
        if self.events:
            self._write({"t": self._now(), "events": self.events})
            self.events = []

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")

    def _now(self) -> int:
        return round(1e6 * self.now_s)

    # ---- sequences

    def number(self, seq: Sequence) -> int:
        assert isinstance(seq, KnownSequence)
        is_new = not seq.number
        number = super().number(seq)
        if is_new:
            self._num_live += 1
            self.events.append(["add", number, self._now(), describe_sequence(seq)])
        return number

    def on_fork(self, parent: Sequence, child: Sequence) -> None:
        number = super().number(child)
        self._num_live += 1
        place = [child.sample_index, child.num_tokens, parent.num_computed_tokens, self._now()]
        self.events.append(["fork", self.number(parent), number, *place])

    def on_finish(self, seq: Sequence) -> None:
        number = self.number(seq)
        self._num_live -= 1
        place = [seq.finish_reason, seq.stop_reason, seq.num_tokens, self._now()]
        self.events.append(["finish", number, *place])

    # ---- decisions

    def on_wait(self, seq: Sequence, has_place: bool, num_needed_blocks: int, num_reserved_blocks: int) -> None:
        assert self._blocks is not None, "an engine has begun"
        num_free = self._blocks.num_free_blocks - num_reserved_blocks
        code = "blocks" if has_place else "max_num_seqs"
        self.events.append(["wait", self.number(seq), code, num_needed_blocks, num_free])

    def on_admit(self, seq: Sequence) -> None:
        super().on_admit(seq)
        self._num_admitted += 1
        code = "new" if seq.num_cached_tokens is None else "again"
        self.events.append(["admit", self.number(seq), code, seq.num_computed_tokens])

    def on_preempt(self, seq: Sequence, needy: Sequence) -> None:
        super().on_preempt(seq, needy)
        self.events.append(["preempt", self.number(seq), self.number(needy), seq.num_computed_tokens, []])

    def on_schedule(self, step: "Step", running: list[Sequence], blocks: "BlockManager") -> None:
        super().on_schedule(step, running, blocks)
        self._note_idle(step, running)
        self._num_steps += 1
        decodes = [seq for seq, _, _ in step.chunks[: step.num_decodes]]
        chunks = [
            [self.number(seq), start, num_new, "all" if start + num_new == seq.num_tokens else "budget"]
            for seq, start, num_new in step.chunks[step.num_decodes :]
        ]
        named = 0 if decodes == self._decodes else [self.number(seq) for seq in decodes]
        samples = 0 if step.samples == decodes else [self.number(seq) for seq in step.samples]
        counts = blocks.num_free_blocks, count_stored_tokens(running, blocks)
        self.events.append(["schedule", self._num_steps, self._now(), named, chunks, samples, [[], []], *counts])
        self._decodes, self._num_admitted = decodes, 0

    def _note_idle(self, step: "Step", running: list[Sequence]) -> None:
        has_waiting = self._num_live > len(running)
        if has_waiting and step.preempted and not self._num_admitted:
            self.events.append(["wait", 0, "preemption", 0, 0])
        elif has_waiting and step.num_scheduled_tokens == self._budget:
            self.events.append(["wait", 0, "budget", 0, 0])
        if len(running) > len(step.chunks):
            scheduled = {seq for seq, _, _ in step.chunks} | set(step.samples)
            self.events += [["idle", self.number(seq), "budget"] for seq in running if seq not in scheduled]

    def on_update(self, step: "Step", new_token_ids: list[int]) -> None:
        super().on_update(step, new_token_ids)
        self.events.append(["update", self._num_steps, self._now(), [*new_token_ids]])

    # ---- blocks

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        self.events.append(["take", self.number(seq), block_id, int(is_evicted)])

    def on_share_block(self, seq: Sequence, block_id: int) -> None:
        self.events.append(["share", self.number(seq), block_id])

    def on_copy_block(self, seq: Sequence, source: int, destination: int) -> None:
        self.events.append(["copy", self.number(seq), source, destination])

    def on_free(self, seq: Sequence) -> None:
        self.events.append(["free", self.number(seq)])

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        self.events.append(["register", self.number(seq), block_id, f"{block_hash:016x}", serial])

    def on_forget_block(self, block_id: int) -> None:
        self.events.append(["forget", block_id])


def describe_sequence(seq: Sequence) -> dict[str, Any]:
    """Return what `add` says of a new sequence."""
    params = seq.sampling_params
    return {
        "request": seq.request_id,
        "sample": seq.sample_index,
        "tokens": seq.token_ids.tolist(),
        "num_prompt_tokens": seq.num_prompt_tokens,
        "max_num_tokens": seq.max_num_tokens,
        "params": {"n": params.n, "max_tokens": params.max_tokens},
    }
