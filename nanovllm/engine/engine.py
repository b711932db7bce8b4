"""The engine: the loop that turns requests into tokens. Start reading at `LLMEngine.step()`.

    prompt ─encode→ Sequence ─schedule()→ SchedulerOutput ─build_batch()→ Batch
       ─model(batch, kv_cache)→ logits ─sample()→ token ids ─update()→ StepOutput ─decode→ RequestOutput

Forward only; afterwards a request may end its sequences in the scheduler (stop strings, beam search). This file joins
the parts, has requests checked before they are queued, and reads the clock at the arrows; it decides nothing about
memory or order. With overlap, the way up to the token ids is that of the next step already. Driven by `LLM.generate`,
or by anybody who calls `add_request` and `step` themselves.
"""

import time
from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config, resolve_device
from nanovllm.engine.beam_search import BeamSearch
from nanovllm.engine.detokenizer import TokenDecoder
from nanovllm.engine.limits import Limits
from nanovllm.engine.request import Prompt, Request, encode_bad_words, encode_prompt
from nanovllm.engine.stats import Counters, make_stats
from nanovllm.execution.batch import build_batch
from nanovllm.execution.loader import (
    load_tokenizer,
    read_default_sampling_params,
    read_eos_token_ids,
    read_model_config,
    resolve_model,
)
from nanovllm.execution.logprobs import prompt_targets
from nanovllm.execution.model_runner import ArrivingTokens, StepTokens
from nanovllm.execution.startup import start_runner
from nanovllm.outputs import EngineStats, RequestOutput, StepOutput
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.policies import POLICIES
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput
from nanovllm.scheduling.swap import SwapSpace


@dataclass(frozen=True)
class Flight:
    """A step that has been launched: what it computes, where its tokens will arrive, and when what happened to it."""

    scheduled: SchedulerOutput
    tokens: ArrivingTokens
    prompt_positions: list[tuple[Request | None, range]]
    """Whose (None: aborted) prompt tokens the prompt log-probabilities are of, in the order of their rows."""
    start: float
    scheduled_at: float
    built_at: float


class LLMEngine:
    """Add requests, call `step()` while `has_unfinished_requests()`.

    Raises ValueError or TypeError if the model cannot be loaded as the config says; see `Config` for the knobs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = resolve_model(config.model, with_weights=config.load_format != "dummy")
        model_class, self.model_config = read_model_config(self.folder)
        self.tokenizer = load_tokenizer(self.folder)
        self._decoder = None if self.tokenizer is None else TokenDecoder(self.tokenizer)
        eos_token_ids = read_eos_token_ids(self.folder) | tokenizer_eos(self.tokenizer)
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < self.model_config.vocab_size)
        self.default_sampling_params = read_default_sampling_params(self.folder)
        self.max_model_len = limit_model_len(config.max_model_len, self.model_config.max_position_embeddings)

        is_cuda = resolve_device(config.device).type == "cuda"
        self.max_num_batched_tokens = config.max_num_batched_tokens or (8192 if is_cuda else 2048)
        shape, limits = self.model_config, (self.max_model_len, self.max_num_batched_tokens)
        self.startup = start_runner(config, self.folder, model_class, shape, *limits)
        self.runner, self.description = self.startup.runner, self.startup.description
        self.num_kv_blocks, self.num_swap_blocks = self.startup.num_kv_blocks, self.startup.num_swap_blocks
        self.block_size = self.runner.backend.block_size

        self.limits = Limits(
            vocab_size=shape.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            num_kv_blocks=self.num_kv_blocks,
            block_size=self.block_size,
            num_eos_tokens=len(self.eos_token_ids),
            has_tokenizer=self.tokenizer is not None,
        )

        self.scheduler = self._fresh_scheduler()
        self.enable_overlap = is_cuda if config.enable_overlap is None else config.enable_overlap
        self._ahead: Flight | None = None  # the step that was launched before the one before it had landed
        self._requests: dict[str, Request] = {}
        self._counters = Counters()
        self._is_stepping = False  # a logits processor may abort meanwhile
        self._aborted_meanwhile: list[Request] = []

    # ---- the loop

    def step(self) -> StepOutput:
        """Advance the unfinished requests by one forward pass, and return what it brought.

        With overlap, the forward pass after it is launched before its tokens are awaited, and is in flight on return.
        If building a batch or a forward pass fails, all that is in flight is taken back: its requests wait to be
        computed anew.
        """
        start = time.monotonic()
        self._is_stepping = True
        try:
            flight = self._ahead or self._launch()
            self._ahead = self._launch() if flight and self.enable_overlap else None  # while `flight` is computed
            tokens = flight.tokens.wait() if flight else None
        except BaseException:
            self._ahead = None
            self.scheduler.rollback()
            self._end_step()
            raise
        if flight is None or tokens is None:
            self._end_step()
            return StepOutput(schedule_time_s=time.monotonic() - start)
        arrived = time.monotonic()
        advanced = self.scheduler.update(flight.scheduled, tokens.token_ids)
        updated = time.monotonic()
        outputs = self._make_outputs(flight, advanced, tokens, arrived)
        self._end_step()
        self._counters.count_step(flight.scheduled, len(advanced), self.block_size, updated - start)
        return StepOutput(
            outputs=outputs,
            num_scheduled_tokens=flight.scheduled.num_scheduled_tokens,
            num_prefill_tokens=flight.scheduled.num_prefill_tokens,
            num_decode_tokens=flight.scheduled.num_decodes,
            num_seqs=len(flight.scheduled.chunks),
            num_preempted=len(flight.scheduled.preempted),
            schedule_time_s=flight.scheduled_at - flight.start,
            build_time_s=flight.built_at - flight.scheduled_at,
            run_time_s=arrived - flight.built_at,
            update_time_s=updated - arrived,
            output_time_s=time.monotonic() - updated,
        )

    def _launch(self) -> Flight | None:
        """Schedule the next step and start it on the device; None if there is nothing to do, or not yet."""
        start = time.monotonic()
        scheduled = self.scheduler.schedule()
        if not scheduled.chunks:
            return None
        scheduled_at = time.monotonic()
        prompt_positions = self._note_prompts(scheduled, scheduled_at)
        batch = build_batch(scheduled, self.block_size)
        built_at = time.monotonic()
        return Flight(scheduled, self.runner.run(batch), prompt_positions, start, scheduled_at, built_at)

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to `step()` for: a request, or a step in flight whose requests are all gone."""
        return bool(self._requests) or self._ahead is not None

    def settle(self) -> None:
        """If no request is left, let the step in flight land, so that nothing holds a block."""
        if self._ahead is not None and not self._requests:
            self.step()

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
        params = sampling_params if sampling_params is not None else self.default_sampling_params
        self._check_request_id(request_id)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be an int, got {priority!r}")
        self.limits.check_params(params)
        seqs = self._make_sequences(request_id, token_ids, params, priority)
        self._queue(Request(text, token_ids, seqs, stream, self.tokenizer, self._decoder, time.monotonic()))

    def add_beam_search(self, request_id: str, prompt: Prompt, params: BeamSearchParams) -> None:
        """Check and queue one beam search; a step returns its `BeamSearchOutput` when it has finished."""
        text, token_ids = self.encode(prompt)
        self._check_request_id(request_id)
        self.limits.check_beam_search_params(params)
        eos_token_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        self._queue(BeamSearch(request_id, text, token_ids, params, eos_token_ids, self.tokenizer, time.monotonic()))

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks; returns what there is of it, or None if it is unknown or over."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if self._is_stepping:  # the scheduler is at work: it will hear of it when the step has ended
            self._aborted_meanwhile.append(request)
            return request.make_output()
        request.abort(self.scheduler, time.monotonic())
        return request.make_output()

    def recover(self) -> None:
        """After an interrupt, which may strike between any two lines: with no request left, start on clean books."""
        if not self._requests:
            self.scheduler = self._fresh_scheduler(self.scheduler)
            self._ahead = None
            self._is_stepping = False
            self._aborted_meanwhile.clear()

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (None if there was none) and token ids of a prompt that this engine can serve, else an error."""
        text, token_ids = encode_prompt(prompt, self.tokenizer, self.model_config.vocab_size)
        self.limits.check_prompt_len(len(token_ids))
        return text, token_ids

    # ---- what is going on

    def get_stats(self) -> EngineStats:
        return make_stats(self._counters, self.scheduler)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as before a fair measurement. Requests that run are not disturbed."""
        self.scheduler.block_manager.reset_prefix_cache()

    # ---- inside

    def _end_step(self) -> None:
        """What was aborted during the step can go."""
        self._is_stepping = False
        for request in self._aborted_meanwhile:
            request.abort(self.scheduler, time.monotonic())
        self._aborted_meanwhile.clear()

    def _check_request_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        if request_id in self._requests or any(one.request_id == request_id for one in self._aborted_meanwhile):
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request; choose another")

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request.seqs[0])
        self._requests[request.request_id] = request
        self._counters.prompt_tokens += len(request.prompt_token_ids)

    def _make_sequences(
        self, request_id: str, token_ids: list[int], params: SamplingParams, priority: int
    ) -> list[Sequence]:
        """One sequence for each sample; the first computes the prompt, the others are its children."""
        # without a seed of its own a request gets one that depends on the engine's seed and the order of arrival alone
        own_seed = 1 << 63 | (self.config.seed * 1_000_003 + self._counters.num_requests) % 2**63
        seed = own_seed if params.seed is None else params.seed
        self._counters.num_requests += 1
        bad_word_ids = encode_bad_words(params.bad_words or (), self.tokenizer)
        seqs = [
            Sequence(request_id, token_ids, params, self.eos_token_ids, priority, seed, i, bad_word_ids)
            for i in range(params.n)
        ]
        seqs[0].children = seqs[1:]
        return seqs

    def _make_outputs(
        self, flight: Flight, advanced: list[tuple[int, Sequence]], tokens: StepTokens, now: float
    ) -> list[RequestOutput]:
        """What the step's tokens mean for their requests: text, log-probabilities, times, and whether they are done."""
        if tokens.prompt_logprobs is not None:
            first_row = 0
            for request, positions in flight.prompt_positions:
                if request is not None:
                    request.add_prompt_logprobs(tokens.prompt_logprobs, first_row, positions)
                first_row += len(positions)
        requests: dict[str, Request] = {}
        for row, seq in advanced:
            request = self._requests.get(seq.request_id)
            if request is not None:  # else it was aborted during this step
                request.read_token(seq, tokens, row)
                requests[seq.request_id] = request
        outputs = []
        for request_id, request in requests.items():
            request.end_step(self.scheduler, now)
            if is_finished := request.is_finished:
                request.finished_time = now
                self._counters.num_finished += 1
                del self._requests[request_id]
            if request.stream or is_finished:
                outputs.append(request.make_output())
        return outputs

    def _note_prompts(self, scheduled: SchedulerOutput, now: float) -> list[tuple[Request | None, range]]:
        """Note which requests begin to be served now; returns `Flight.prompt_positions`."""
        for seq, _ in scheduled.chunks:
            if seq.num_computed_tokens < seq.num_prompt_tokens:
                request = self._requests.get(seq.request_id)
                if request is not None and request.scheduled_time is None:
                    request.scheduled_time = now
        return [(self._requests.get(seq.request_id), positions) for _, seq, positions in prompt_targets(scheduled)]

    def _fresh_scheduler(self, old: Scheduler | None = None) -> Scheduler:
        """An empty scheduler and block manager; the counts of `old` go on."""
        config = self.config
        policy = config.scheduling_policy if callable(config.scheduling_policy) else POLICIES[config.scheduling_policy]
        new = Scheduler(
            BlockManager(self.num_kv_blocks, self.block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            policy,
            config.long_prefill_token_threshold,
            SwapSpace(self.num_swap_blocks, self.block_size) if self.num_swap_blocks else None,
        )
        if old is not None:
            for name in ("num_preemptions", "num_swaps", "prefix_cache_query_tokens", "prefix_cache_hit_tokens"):
                setattr(new, name, getattr(old, name))
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
