"""Beam search: the completions of the highest probability, as far as a search of fixed width finds them.

The rule for finished beams is that of `transformers` (`early_stopping=False`), parameters and outputs are vLLM's. A
beam is a sequence: it is scheduled, cached and preempted as any other, and beams share blocks up to where they part.
Only the tokens are chosen for all beams together, once all have caught up. With beam_width 2:

    beams          [a b] with log-probability -1.0, [a c] with -1.5
    candidates     [a b d] -1.2, [a b e] -1.4, [a c f] -1.9, [a c d] -2.5
    the best two   [a b d] and [a b e]: the sequence of [a b] gets d, a fork of it gets e, that of [a c] ends

Driven by `LLMEngine`, as a `Request` of another kind; made by `intake.py`.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.engine.request import Request
from nanovllm.execution.model_runner import StepTokens
from nanovllm.outputs import BeamSearchOutput, BeamSearchSequence
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.scheduling.forks import fork, resume
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence


@dataclass
class Beam:
    """A completion that is still growing. `candidates` are (log-probability, next token) of the likeliest tokens."""

    seq: Sequence
    cum_logprob: float
    candidates: list[tuple[float, int]] | None = None  # None until a step has computed its last token


@dataclass(frozen=True)
class Finished:
    score: float
    cum_logprob: float
    output_token_ids: list[int]


class BeamSearch(Request):
    """One prompt's search."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        tokenizer: Any,
        arrival_time: float,
    ) -> None:
        # so many that beam_width of them go on even if all others end
        self._num_candidates = max(2, 1 + len(eos_token_ids)) * params.beam_width
        self._seq_params = SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=self._num_candidates)
        seq = self._new_sequence(request_id, prompt_token_ids)
        seq.num_places = params.beam_width
        super().__init__(prompt, prompt_token_ids, [seq], False, tokenizer, None, arrival_time)
        self.params = params
        self.eos_token_ids = eos_token_ids
        self.beams = [Beam(seq, 0.0)]
        self.ended: list[Finished] = []
        self._num_beams_made = 1
        self._is_done = False

    @property
    def is_finished(self) -> bool:
        return self._is_done

    def read_token(self, seq: Sequence, tokens: StepTokens, row: int) -> None:
        """Keep the candidates of one beam. A beam that is computed again after preemption gets the same ones again."""
        assert tokens.logprobs is not None
        k = self._num_candidates
        top, top_ids = tokens.logprobs.top[row][:k], tokens.logprobs.top_ids[row][:k]
        for beam in self.beams:
            if beam.seq is seq:
                beam.candidates = list(zip(top, top_ids, strict=True))

    def end_step(self, scheduler: Scheduler, now: float) -> None:
        """If all beams have caught up, choose the beams that go on, and the next token of each."""
        if any(beam.candidates is None for beam in self.beams):
            return
        self.token_times.append(now)
        num_output_tokens = self.beams[0].seq.num_output_tokens + 1  # with the token to come
        is_last = self.beams[0].seq.num_tokens + 1 >= self.beams[0].seq.max_num_tokens
        going_on = self._choose(num_output_tokens, is_last)
        if is_last or not self._can_improve(going_on[0][0], num_output_tokens):
            self._finish(scheduler)
        else:
            self._go_on(going_on, scheduler)

    def abort(self, scheduler: Scheduler, now: float) -> None:
        self._finish(scheduler)
        self.finished_time = now

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
        width = self.params.beam_width
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
                score = cum_logprob / num_output_tokens**self.params.length_penalty
                self.ended.append(Finished(score, cum_logprob, [*beam.seq.output_token_ids, token_id]))
        self.ended = sorted(self.ended, key=lambda one: one.score, reverse=True)[:width]
        return going_on[:width]

    def _can_improve(self, best_cum_logprob: float, num_output_tokens: int) -> bool:
        """Whether the best growing beam, if it ended here, would be better than the worst of enough finished ones."""
        if len(self.ended) < self.params.beam_width:
            return True
        return best_cum_logprob / num_output_tokens**self.params.length_penalty > self.ended[-1].score

    def _go_on(self, going_on: list[tuple[float, Beam, int]], scheduler: Scheduler) -> None:
        """Give each chosen token a sequence: the beam's own for the first, a fork of it for any other."""
        children: list[Beam] = []
        by_parent: dict[int, list[tuple[float, int]]] = {id(beam): [] for beam in self.beams}
        for cum_logprob, beam, token_id in going_on:
            by_parent[id(beam)].append((cum_logprob, token_id))
        for beam in self.beams:  # beams without a chosen token end first: forks need their places
            beam.seq.num_places = 1
            if not by_parent[id(beam)]:
                scheduler.finish(beam.seq, "abort")
        for beam in self.beams:
            chosen = by_parent[id(beam)]
            if not chosen:
                continue
            forks = [self._fork(beam.seq, scheduler) for _ in chosen[1:]]  # before `beam.seq` gets its next token
            for seq, (cum_logprob, token_id) in zip([beam.seq, *forks], chosen, strict=True):
                seq.append_token(token_id)
                resume(scheduler, seq)
                children.append(Beam(seq, cum_logprob))
        self.beams = children

    def _fork(self, parent: Sequence, scheduler: Scheduler) -> Sequence:
        child = self._new_sequence(parent.request_id, parent.token_ids.view().tolist())
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.sample_index = self._num_beams_made
        self._num_beams_made += 1
        child.max_num_tokens, child.arrival = parent.max_num_tokens, parent.arrival
        child.order = (*parent.order[:2], child.sample_index)
        self.seqs.append(child)
        fork(scheduler, parent, child)
        return child

    def _finish(self, scheduler: Scheduler) -> None:
        for beam in self.beams:
            scheduler.finish(beam.seq, "stop")
        self._is_done = True

    def _new_sequence(self, request_id: str, token_ids: list[int]) -> Sequence:
        seq = Sequence(request_id, token_ids, self._seq_params)
        seq.is_beam = True
        return seq
