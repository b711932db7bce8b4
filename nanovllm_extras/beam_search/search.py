"""Beam search: the completions of the highest probability, as far as a search of fixed width finds them.

The rule for finished beams is that of `transformers` (`early_stopping=False`), parameters and outputs are vLLM's. A
beam is a sequence that the engine schedules, caches and preempts as any other, and beams share blocks up to where they
part. The scheduler samples the likeliest token for each beam, and the search replaces this token. With beam_width 2:

    beams          [a b] with log-probability -1.0, [a c] with -1.5
    candidates     [a b d] -1.2, [a b e] -1.4, [a c f] -1.9, [a c d] -2.5
    the best two   [a b d] and [a b e]: the sequence of [a b] gets d, a fork of it gets e, that of [a c] ends

The search begins as a request for `beam_width` samples, which share the blocks of the prompt. It chooses when all of
its beams have their candidates. Usually one step brings those of all. If it does not (the budget was spent, or a beam
was preempted), the beams that are early give up their blocks, so that the others find room. They are computed again
with the token that the search chooses for them.
"""

import time
from dataclasses import dataclass
from typing import Any

from nanovllm.scheduler import Scheduler
from nanovllm_extras.beam_search.beam_outputs import BeamSearchOutput, BeamSearchSequence
from nanovllm_extras.engine.cache_salt import salt
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.logits_processors import ProcessorRow
from nanovllm_extras.sampling.runner_hooks import StepTokens
from nanovllm_extras.scheduling.ordered_queues import order_queues
from nanovllm_extras.scheduling.scheduler import fork_anytime


@dataclass
class Beam:
    """A completion that is still growing: the first `num_tokens` tokens of `seq`, to which the scheduler adds one."""

    seq: Sequence
    num_tokens: int
    cum_logprob: float
    candidates: list[tuple[float, int]] | None = None  # (log-probability, next token), once they are computed

    @property
    def is_astray(self) -> bool:
        """Return whether the scheduler has added more than one token: a step failed before the search could choose."""
        return self.seq.num_known_tokens > self.num_tokens + 1

    @property
    def token_ids(self) -> list[int]:
        return self.seq.token_ids.view(0, self.num_tokens).tolist()


@dataclass(frozen=True)
class Finished:
    score: float
    cum_logprob: float
    output_token_ids: list[int]


class ChosenBySearch:
    """A `Processor` that changes no logits: the next step must wait for the token that the search chooses."""

    place, reads_output = 9, True

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> None:
        return None


class BeamSearch(Request):
    """One prompt's search."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        beam_width: int,
        max_tokens: int,
        length_penalty: float,
        eos_token_ids: frozenset[int],
        tokenizer: Any,
        priority: int,
    ) -> None:
        # enough that beam_width survive when the rest are end tokens
        self._num_candidates = max(2, 1 + len(eos_token_ids)) * beam_width
        self._seq_params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=self._num_candidates)
        self._priority = priority
        self._num_seqs_made = 0
        seqs = [self._new_sequence(request_id, prompt_token_ids) for _ in range(beam_width)]
        seqs[0].children = [*seqs[1:]]
        super().__init__(prompt, prompt_token_ids, seqs, False, None, time.monotonic())
        self.tokenizer = tokenizer
        self.beam_width, self.length_penalty = beam_width, length_penalty
        self.eos_token_ids = eos_token_ids
        self.beams = [Beam(seqs[0], len(prompt_token_ids), 0.0)]
        self.spare_seqs = seqs[1:]  # they have begun beside the first, and are nobody's yet
        self.ended: list[Finished] = []
        self._is_done = False

    @property
    def is_finished(self) -> bool:
        return self._is_done

    def queue(self, scheduler: Scheduler, max_num_seqs: int) -> None:
        order_queues(scheduler)  # forks have their place beside their parents
        super().queue(scheduler, max_num_seqs)

    def read_token(self, seq: Sequence, tokens: StepTokens, row: int) -> None:
        """Keep the candidates of one beam. A beam that is computed again after preemption gets the same ones again."""
        assert tokens.logprobs is not None
        _, _, top, top_ids = tokens.logprobs[row]
        for beam in self.beams:
            if beam.seq is seq and not beam.is_astray:
                beam.candidates = list(zip(top, top_ids, strict=True))[: self._num_candidates]

    def finish_step(self, scheduler: Scheduler, now: float) -> None:
        """Choose the beams that continue, and the next token of each, once all beams have their candidates."""
        for beam in self.beams:
            if beam.is_astray:
                end(scheduler, beam.seq)
                if beam.candidates is None:
                    beam.seq = self._fork(beam, [], scheduler)
        if any(beam.candidates is None for beam in self.beams):
            for beam in self.beams:
                if beam.candidates is not None:
                    end(scheduler, beam.seq)
            return
        self.token_times.append(now)
        first = self.beams[0]
        num_output_tokens = first.num_tokens + 1 - len(self.prompt_token_ids)  # with the token to choose
        is_last = first.num_tokens + 1 >= first.seq.max_num_tokens
        going_on = self._choose(num_output_tokens, is_last)
        if is_last or not self._can_improve(going_on[0][0], num_output_tokens):
            self._finish(scheduler)
        else:
            self._go_on(going_on, scheduler)

    def abort(self, scheduler: Scheduler) -> None:
        self._finish(scheduler)
        self.finished_time = time.monotonic()

    def make_output(self) -> Any:
        best_first = sorted(self.ended, key=lambda one: one.score, reverse=True)
        sequences = [
            BeamSearchSequence(
                tokens=self.prompt_token_ids + one.output_token_ids,
                cum_logprob=one.cum_logprob,
                text="" if self.tokenizer is None else self.tokenizer.decode(one.output_token_ids, True),
            )
            for one in best_first
        ]
        return BeamSearchOutput(self.request_id, sequences, self._is_done)

    def _choose(self, num_output_tokens: int, is_last: bool) -> list[tuple[float, Beam, int]]:
        """Rank the continuations of all beams; note those that end, return the best that go on."""
        width = self.beam_width
        ranked = [
            (beam.cum_logprob + logprob, beam, token_id)
            for beam in self.beams
            for logprob, token_id in beam.candidates or ()
        ]
        ranked.sort(key=lambda one: one[0], reverse=True)
        going_on = []
        for place, (cum_logprob, beam, token_id) in enumerate(ranked[: self._num_candidates]):
            if not is_last and token_id not in self.eos_token_ids:
                going_on.append((cum_logprob, beam, token_id))
            elif place < width:  # an ending that ranks lower is dropped
                score = cum_logprob / num_output_tokens**self.length_penalty
                output_token_ids = beam.token_ids[len(self.prompt_token_ids) :]
                self.ended.append(Finished(score, cum_logprob, [*output_token_ids, token_id]))
        self.ended = sorted(self.ended, key=lambda one: one.score, reverse=True)[:width]
        return going_on[:width]

    def _can_improve(self, best_cum_logprob: float, num_output_tokens: int) -> bool:
        """Return whether the best growing beam, if it ended here, would beat the worst of enough finished ones."""
        if len(self.ended) < self.beam_width:
            return True
        return best_cum_logprob / num_output_tokens**self.length_penalty > self.ended[-1].score

    def _go_on(self, going_on: list[tuple[float, Beam, int]], scheduler: Scheduler) -> None:
        """Give each chosen token a sequence: the beam's own for the first, a fork of it for any other."""
        chosen: dict[int, list[tuple[float, int]]] = {id(beam): [] for beam in self.beams}
        for cum_logprob, beam, token_id in going_on:
            chosen[id(beam)].append((cum_logprob, token_id))
        dropped = [beam.seq for beam in self.beams if not chosen[id(beam)]]
        for seq in [*self.spare_seqs, *dropped]:  # first: forks need their places
            end(scheduler, seq)
        beams: list[Beam] = []
        for beam in self.beams:
            seq, num_tokens = beam.seq, beam.num_tokens + 1
            for i, (cum_logprob, token_id) in enumerate(chosen[id(beam)]):
                if i == 0 and seq in scheduler.running:
                    seq.token_ids.data[beam.num_tokens] = token_id  # no step has computed its K and V yet
                    beams.append(Beam(seq, num_tokens, cum_logprob))
                else:
                    beams.append(Beam(self._fork(beam, [token_id], scheduler), num_tokens, cum_logprob))
        self.beams, self.spare_seqs = beams, []

    def _fork(self, beam: Beam, next_token: list[int], scheduler: Scheduler) -> Sequence:
        """Return a sequence that continues `beam`. It shares blocks, unless the beam has given up its own."""
        parent = beam.seq
        child = self._new_sequence(parent.request_id, beam.token_ids + next_token)
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.max_num_tokens, child.arrival = parent.max_num_tokens, parent.arrival
        salt(child, parent.cache_salt)
        child.order = (*parent.order[:-1], child.sample_index)
        self.seqs.append(child)
        fork_anytime(scheduler, parent, child)
        return child

    def _finish(self, scheduler: Scheduler) -> None:
        for seq in [*self.spare_seqs, *[beam.seq for beam in self.beams]]:
            end(scheduler, seq)
        self._is_done = True

    def _new_sequence(self, request_id: str, token_ids: list[int]) -> Sequence:
        index, self._num_seqs_made = self._num_seqs_made, self._num_seqs_made + 1
        processors = (ChosenBySearch(),)
        return Sequence(
            request_id, token_ids, self._seq_params, priority=self._priority, sample_index=index, processors=processors
        )


def end(scheduler: Scheduler, seq: Sequence) -> None:
    if seq.finish_reason is None:
        scheduler.finish(seq, "stop")
