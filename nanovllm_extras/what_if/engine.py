"""An engine without a model: the core's scheduler takes its steps, and each sample gets its next known token.

    step = engine.schedule()            the core's own `Scheduler.schedule`
    engine.update(step, now)            its `update`, with known tokens in place of the model's

A sequence ends where its answer ends. It also ends where this engine's pool or `max_model_len` ends it. In a replay,
an answer that was aborted is ended by the abort.
"""

from typing import cast

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Step
from nanovllm_extras.what_if.figures import Figures
from nanovllm_extras.what_if.known_sequence import KnownSequence
from nanovllm_extras.what_if.options import Options, Parts
from nanovllm_extras.what_if.requests import PlannedRequest


class SimulatedEngine:
    """Adds requests and takes steps, and tells `figures` when tokens are there."""

    def __init__(self, options: Options, parts: Parts, figures: Figures, is_replay: bool = False) -> None:
        self.figures = figures
        self.is_replay = is_replay
        blocks = parts.block_manager_cls(
            options.num_blocks, options.block_size, options.enable_prefix_caching, figures, parts.prefix_cache_cls
        )
        figures.on_start(blocks)
        limits = options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len
        self.scheduler = parts.scheduler_cls(blocks, *limits)
        self._unfinished = 0

    @property
    def has_unfinished(self) -> bool:
        return self._unfinished > 0

    def add(self, request: PlannedRequest) -> list[KnownSequence]:
        """Queue a request, and return its sequences; none if this engine would refuse it as too large."""
        scheduler, answers = self.scheduler, request.answers
        longest = min(scheduler.max_model_len - 1, scheduler.block_manager.capacity)
        if len(request.prompt) > longest or len(answers) > scheduler.max_num_seqs:
            self.figures.num_refused += 1
            return []
        params = SamplingParams(
            n=len(answers), max_tokens=request.max_tokens, ignore_eos=True, extra_args=request.extra_args
        )
        prompt = cast("list[int]", request.prompt)  # the sequence makes an array of it, which is faster from an array
        seqs = [
            KnownSequence(request.request_id, prompt, params, sample_index=i, answer=answer,
                          arrival_s=request.arrival_s)
            for i, answer in enumerate(answers)
        ]  # fmt: skip
        for seq in seqs:
            seq.root_serial = request.root_serial
        seqs[0].children = [*seqs[1:]]
        scheduler.add(seqs[0])
        self._unfinished += len(seqs)
        return seqs

    def describe_queues(self) -> str:
        return f"{len(self.scheduler.running)} sequences run and {len(self.scheduler.waiting)} wait"

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        if not isinstance(step, Step):
            raise TypeError(f"{type(self.scheduler).__name__}.schedule must return a Step, got {step!r}")
        return step

    def update(self, step: Step, now: float) -> None:
        """Finish a step at the time `now`."""
        token_ids: list[int] = []
        ended_by_text: list[tuple[KnownSequence, str]] = []
        samples = cast("list[KnownSequence]", step.samples)
        for seq in samples:
            answer, i = seq.answer, seq.num_tokens - seq.num_prompt_tokens
            token_ids.append(answer.token(i))
            if i + 1 < answer.num_tokens:
                continue
            if answer.finish_reason in ("abort", None):
                if not self.is_replay:
                    seq.max_num_tokens = min(seq.max_num_tokens, seq.num_tokens + 1)
            elif answer.finish_reason == "length":
                seq.max_num_tokens = min(seq.max_num_tokens, seq.num_tokens + 1)
            elif isinstance(answer.stop_reason, str):
                ended_by_text.append((seq, answer.stop_reason))
            else:
                seq.stop_token_ids = {token_ids[-1]: answer.stop_reason}
        self.scheduler.update(step, token_ids)
        for seq, text in ended_by_text:  # the engine reads the texts of a step after all of its tokens
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "stop", text)
        for seq in samples:
            if seq.first_token_s is None and seq.num_tokens > seq.num_prompt_tokens:
                seq.first_token_s = now
                self.figures.ttft_s.append(now - seq.arrival_s)
            if seq.finish_reason is not None:
                self._end(seq, now)

    def abort(self, seq: KnownSequence, now: float) -> None:
        """End a sequence, as a client does that leaves. Its children that have not started are sequences, too."""
        if seq.finish_reason is None:
            self.scheduler.finish(seq, "abort")
            self._end(seq, now)

    def _end(self, seq: KnownSequence, now: float) -> None:
        if seq.has_ended:  # by an abort in this step
            return
        seq.has_ended = True
        self._unfinished -= 1
        figures, num_tokens = self.figures, seq.num_tokens - seq.num_prompt_tokens
        is_cut = num_tokens < seq.answer.num_tokens
        figures.num_cut += is_cut and seq.finish_reason != "abort"
        figures.num_unknown += not seq.answer.is_whole
        if num_tokens > 1 and seq.first_token_s is not None:
            figures.tpot_s.append((now - seq.first_token_s) / (num_tokens - 1))
