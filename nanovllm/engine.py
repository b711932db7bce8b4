"""The engine: the loop that turns requests into tokens. Start reading at `LLMEngine.step()`.

    prompt ─encode→ Sequence ─schedule()→ SchedulerOutput ─build_batch()→ Batch
       ─model(batch, kv_cache)→ logits ─sample()→ token ids ─update()→ StepOutput ─decode→ RequestOutput

One call for each arrow, forward only. This file joins the parts, checks requests before they are queued, reads the
clock at the arrows and keeps the statistics; it decides nothing about memory or order. Driven by `LLM.generate`, or by
anybody who calls `add_request` and `step` themselves.
"""

import time
from dataclasses import dataclass
from typing import Any

from nanovllm.batch import build_batch
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config, resolve_device, resolve_dtype
from nanovllm.detokenizer import Detokenizer
from nanovllm.layers.attention import select_backend
from nanovllm.loader import load_model, load_tokenizer, read_eos_token_ids, read_model_config, resolve_model
from nanovllm.model_runner import ModelRunner
from nanovllm.outputs import EngineStats, RequestOutput, StepOutput
from nanovllm.request import Prompt, Request, encode_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, SchedulerOutput
from nanovllm.sequence import Sequence


@dataclass
class Counters:
    """The engine's own counts over its life; `EngineStats` says what they mean."""

    steps: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    peak_used_blocks: int = 0
    kv_tokens_stored: int = 0
    kv_slots_reserved: int = 0
    prefill_step_tokens: int = 0
    prefill_step_time_s: float = 0.0
    decode_step_tokens: int = 0
    decode_step_time_s: float = 0.0


class LLMEngine:
    """Add requests, call `step()` while `has_unfinished_requests()`.

    Raises ValueError or TypeError if the model cannot be loaded as the config says; see `Config` for the knobs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        is_dummy = config.load_format == "dummy"
        self.folder = resolve_model(config.model, with_weights=not is_dummy)
        model_class, self.model_config = read_model_config(self.folder)
        self.tokenizer = load_tokenizer(self.folder)
        self.eos_token_ids = read_eos_token_ids(self.folder) | tokenizer_eos(self.tokenizer)
        self.max_model_len = limit_model_len(config.max_model_len, self.model_config.max_position_embeddings)

        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, self.model_config.dtype)
        shape = self.model_config
        backend_class = select_backend(config.attention_backend, device, dtype)
        self.block_size = config.block_size or backend_class.default_block_size
        backend = backend_class(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, self.block_size)
        seed = config.seed if is_dummy else None
        model = load_model(model_class, shape, backend, dtype, device, self.folder, seed)
        self.runner = ModelRunner(model, backend, shape.num_hidden_layers, dtype, device, config.seed)
        self.num_kv_blocks = self.runner.num_blocks_that_fit(config, self.max_model_len)
        self.runner.allocate_kv_cache(self.num_kv_blocks)

        self.scheduler = self._fresh_scheduler()
        self._requests: dict[str, Request] = {}
        self._counters = Counters()

    # ---- the loop

    def step(self) -> StepOutput:
        """Advance the unfinished requests by one forward pass.

        If anything fails on the way, the step is taken back, and its requests wait to be computed anew.
        """
        t0 = time.monotonic()
        scheduled = self.scheduler.schedule()
        if not scheduled.chunks:
            return StepOutput([], 0, 0, 0, 0, scheduled.num_preempted, time.monotonic() - t0, 0.0, 0.0, 0.0, 0.0)
        try:
            t1 = time.monotonic()
            batch = build_batch(scheduled, self.block_size)
            t2 = time.monotonic()
            token_ids = self.runner.run(batch).wait()
        except BaseException:
            self.scheduler.rollback(scheduled)
            raise
        t3 = time.monotonic()
        advanced = self.scheduler.update(scheduled, token_ids)
        t4 = time.monotonic()
        outputs = self._make_outputs(advanced, t3)
        self._count(scheduled, advanced, t4 - t0)
        return StepOutput(
            outputs=outputs,
            num_scheduled_tokens=scheduled.num_scheduled_tokens,
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_decode_tokens=scheduled.num_decodes,
            num_seqs=len(scheduled.chunks),
            num_preempted=scheduled.num_preempted,
            schedule_time_s=t1 - t0,
            build_time_s=t2 - t1,
            run_time_s=t3 - t2,
            update_time_s=t4 - t3,
            output_time_s=time.monotonic() - t4,
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # ---- requests come

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        stream: bool = True,
    ) -> None:
        """Check and queue one request. With `stream=False` steps return its output only when it has finished.

        `priority` is kept with the sequence for scheduling policies; first come, first served does not look at it.
        Raises ValueError or TypeError before anything changes.
        """
        text, token_ids = self.encode(prompt)
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request; choose another")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams or None, got {params!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int, got {priority!r}")
        seq = Sequence(request_id, token_ids, params, self.eos_token_ids, priority)
        self.scheduler.add(seq)
        self._requests[request_id] = Request(
            request_id, text, token_ids, seq, stream, Detokenizer(self.tokenizer), time.monotonic()
        )
        self._counters.prompt_tokens += len(token_ids)

    def abort_request(self, request_id: str) -> None:
        """End a request at once and free its blocks; one that is finished or unknown is left alone."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request.seq)

    def recover(self) -> None:
        """After an interrupt, which may strike between any two lines: with no request left, start on clean books."""
        if not self._requests:
            self.scheduler = self._fresh_scheduler(self.scheduler)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (None if there was none) and token ids of a prompt that this engine can serve, else an error."""
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.model_config.vocab_size)
        num_tokens, capacity = len(token_ids), self.num_kv_blocks * self.block_size
        if num_tokens == 0:
            raise ValueError("the prompt is empty; it must have at least 1 token")
        if num_tokens > self.max_model_len - 1:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; at most {self.max_model_len - 1} are allowed "
                f"(max_model_len {self.max_model_len}, less one for the output)"
            )
        if num_tokens > capacity:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; the whole KV cache holds {capacity} "
                f"({self.num_kv_blocks} blocks of {self.block_size}): give more num_kv_blocks or kv_cache_memory_bytes"
            )
        return text, token_ids

    # ---- what is going on

    def get_stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            num_kv_blocks=self.num_kv_blocks,
            num_free_blocks=scheduler.block_manager.num_free_blocks,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_query_tokens=scheduler.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=scheduler.prefix_cache_hit_tokens,
            **vars(self._counters),
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as before a fair measurement. Requests that run are not disturbed."""
        self.scheduler.block_manager.reset_prefix_cache()

    # ---- inside

    def _make_outputs(self, advanced: list[Sequence], now: float) -> list[RequestOutput]:
        outputs = []
        for seq in advanced:
            request = self._requests[seq.request_id]
            if request.first_token_time is None:
                request.first_token_time = now
            is_finished = seq.finish_reason is not None
            if is_finished:
                request.finished_time = now
                del self._requests[seq.request_id]
            if request.stream or is_finished:
                outputs.append(request.make_output())
        return outputs

    def _count(self, scheduled: SchedulerOutput, advanced: list[Sequence], time_s: float) -> None:
        counters = self._counters
        counters.steps += 1
        counters.num_finished += sum(seq.finish_reason is not None for seq in advanced)
        counters.generation_tokens += len(advanced)
        counters.kv_tokens_stored += scheduled.kv_tokens_stored
        counters.kv_slots_reserved += scheduled.kv_slots_reserved
        counters.peak_used_blocks = max(counters.peak_used_blocks, scheduled.kv_slots_reserved // self.block_size)
        if scheduled.num_prefill_tokens:
            counters.prefill_step_tokens += scheduled.num_scheduled_tokens
            counters.prefill_step_time_s += time_s
        else:
            counters.decode_step_tokens += scheduled.num_scheduled_tokens
            counters.decode_step_time_s += time_s

    def _fresh_scheduler(self, old: Scheduler | None = None) -> Scheduler:
        """An empty scheduler and block manager; the counts of `old` go on."""
        blocks = BlockManager(self.num_kv_blocks, self.block_size, self.config.enable_prefix_caching)
        config = self.config
        new = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len)
        if old is not None:
            new.num_preemptions = old.num_preemptions
            new.prefix_cache_query_tokens = old.prefix_cache_query_tokens
            new.prefix_cache_hit_tokens = old.prefix_cache_hit_tokens
        return new


def limit_model_len(wanted: int | None, model_limit: int) -> int:
    if wanted is None:
        return model_limit
    if wanted > model_limit:
        raise ValueError(
            f"max_model_len must be at most the model's max_position_embeddings {model_limit}, got {wanted}"
        )
    return wanted


def tokenizer_eos(tokenizer: Any) -> frozenset[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if eos is None else frozenset([eos])
