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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.scheduler import Scheduler
from nanovllm_extras.beam_search.beam_outputs import BeamSearchOutput, BeamSearchSequence
from nanovllm_extras.engine.cache_salt import salt
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.logits_processors import ProcessorRow
from nanovllm_extras.scheduling.ordered_queues import order_queues
from nanovllm_extras.scheduling.scheduler import fork_anytime

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm_extras.sampling.logprobs import LogprobRow


@dataclass
class Beam:
    """A completion that is still growing: the first `num_tokens` tokens of `seq`, to which the scheduler adds one.

    It is what the request reads of the sequence: of each token, the candidates beside it.
    """

    seq: Sequence
    num_tokens: int
    cum_logprob: float
    candidates: list[tuple[float, int]] | None = None  # (log-probability, next token), once they are computed

    def add_logprobs(self, row: "LogprobRow", token_id: int) -> None:
        """Keep the candidates. A beam that is computed again after preemption gets the same ones again."""
        if not self.is_astray:
            _, _, top, top_ids = row
            params: Any = self.seq.sampling_params
            self.candidates = list(zip(top, top_ids, strict=True))[: params.logprobs]

    def read_tokens(self) -> None:
        """Do nothing: text is made of the beams that are found."""

    @property
    def is_astray(self) -> bool:
        """Return whether the scheduler has added more than one token: a step failed before the search could choose."""
        return self.seq.num_known_tokens > self.num_tokens + 1

    @property
    def token_ids(self) -> list[int]:
        return self.seq.token_ids[: self.num_tokens].tolist()


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


class BeamSearch:
    """One prompt's search: what ends the sequences of its request, and the request's `Answer`."""

    gives_tokens = True

    def __init__(
        self,
        beam_width: int,
        max_tokens: int,
        length_penalty: float,
        eos_token_ids: frozenset[int],
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> None:
        # enough that beam_width survive when the rest are end tokens
        self._num_candidates = max(2, 1 + len(eos_token_ids)) * beam_width
        self._seq_params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=self._num_candidates)
        self.tokenizer = tokenizer
        self.beam_width, self.length_penalty = beam_width, length_penalty
        self.eos_token_ids = eos_token_ids
        self.beams: list[Beam] = []
        self.spare_seqs: list[Sequence] = []  # they have begun beside the first, and are nobody's yet
        self.ended: list[Finished] = []

    def make_request(self, request_id: str, prompt: str | None, token_ids: list[int], priority: int) -> Request:
        """Return the request of this search. token_ids: of the prompt"""
        beams = [self._new_beam(request_id, token_ids, i, 0.0, priority) for i in range(self.beam_width)]
        seqs = [beam.seq for beam in beams]
        self.beams, self.spare_seqs = beams[:1], seqs[1:]
        seqs[0].children = [*seqs[1:]]
        return Request(prompt, token_ids, seqs, False, [*beams], (self.choose,), answer=self)

    def choose(self, request: Request, scheduler: Scheduler) -> None:
        """Choose the beams that continue, and the next token of each, once all beams have their candidates."""
        order_queues(scheduler)  # forks have their place beside their parents
        for i, beam in enumerate(self.beams):
            if beam.is_astray:
                end(scheduler, beam.seq)
                if beam.candidates is None:
                    self.beams[i] = self._fork(request, beam, [], beam.cum_logprob, scheduler)
        late = [beam for beam in self.beams if beam.candidates is None]
        if any(beam.seq.finish_reason is not None for beam in late):  # no token can be sampled
            self._finish(scheduler)
            return
        if late:
            for beam in self.beams:
                if beam.candidates is not None:
                    end(scheduler, beam.seq)
            request.token_times.pop()  # this step has not brought the request a token
            return
        first = self.beams[0]
        num_output_tokens = first.num_tokens + 1 - len(request.prompt_token_ids)  # with the token to choose
        is_last = first.num_tokens + 1 >= first.seq.max_num_tokens
        going_on = self._rank(num_output_tokens, is_last)
        if is_last or not self._can_improve(going_on[0][0], num_output_tokens):
            self._finish(scheduler)
        else:
            self._go_on(request, going_on, scheduler)

    def make_output(self, request: Request) -> BeamSearchOutput:
        best_first = sorted(self.ended, key=lambda one: one.score, reverse=True)
        sequences = [
            BeamSearchSequence(
                tokens=request.prompt_token_ids + one.output_token_ids,
                cum_logprob=one.cum_logprob,
                text="" if self.tokenizer is None else str(self.tokenizer.decode(one.output_token_ids, True)),
            )
            for one in best_first
        ]
        return BeamSearchOutput(request.request_id, sequences, request.is_finished)

    def _rank(self, num_output_tokens: int, is_last: bool) -> list[tuple[float, Beam, int]]:
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
                output_token_ids = beam.token_ids[beam.seq.num_prompt_tokens :]
                self.ended.append(Finished(score, cum_logprob, [*output_token_ids, token_id]))
        self.ended = sorted(self.ended, key=lambda one: one.score, reverse=True)[:width]
        return going_on[:width]

    def _can_improve(self, best_cum_logprob: float, num_output_tokens: int) -> bool:
        """Return whether the best growing beam, if it ended here, would beat the worst of enough finished ones."""
        if len(self.ended) < self.beam_width:
            return True
        return best_cum_logprob / num_output_tokens**self.length_penalty > self.ended[-1].score

    def _go_on(self, request: Request, going_on: list[tuple[float, Beam, int]], scheduler: Scheduler) -> None:
        """Give each chosen token a sequence: the beam's own for the first, a fork of it for any other."""
        chosen: dict[int, list[tuple[float, int]]] = {id(beam): [] for beam in self.beams}
        for cum_logprob, beam, token_id in going_on:
            chosen[id(beam)].append((cum_logprob, token_id))
        dropped = [beam.seq for beam in self.beams if not chosen[id(beam)]]
        for seq in [*self.spare_seqs, *dropped]:  # first: forks need their places
            end(scheduler, seq)
        beams: list[Beam] = []
        for beam in self.beams:
            seq = beam.seq
            for i, (cum_logprob, token_id) in enumerate(chosen[id(beam)]):
                if i == 0 and seq in scheduler.running:
                    seq.token_ids[beam.num_tokens] = token_id  # no step has computed its K and V yet
                    request.completions[seq.sample_index] = own = Beam(seq, beam.num_tokens + 1, cum_logprob)
                    beams.append(own)
                else:
                    beams.append(self._fork(request, beam, [token_id], cum_logprob, scheduler))
        self.beams, self.spare_seqs = beams, []

    def _fork(
        self, request: Request, beam: Beam, next_token: list[int], cum_logprob: float, scheduler: Scheduler
    ) -> Beam:
        """Return a beam that continues `beam`. It shares blocks, unless `beam` has given up its own."""
        parent = beam.seq
        token_ids, index = beam.token_ids + next_token, len(request.seqs)
        fork = self._new_beam(request.request_id, token_ids, index, cum_logprob, parent.priority)
        child = fork.seq
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.max_num_tokens, child.arrival = parent.max_num_tokens, parent.arrival
        salt(child, parent.cache_salt, parent.adapter)
        child.adapter_slot = parent.adapter_slot
        child.order = (*parent.order[:-1], child.sample_index)
        request.seqs.append(child)
        request.completions.append(fork)
        fork_anytime(scheduler, parent, child)
        return fork

    def _finish(self, scheduler: Scheduler) -> None:
        for seq in [*self.spare_seqs, *[beam.seq for beam in self.beams]]:
            end(scheduler, seq)

    def _new_beam(self, request_id: str, token_ids: list[int], index: int, cum_logprob: float, priority: int) -> Beam:
        processors = (ChosenBySearch(),)
        seq = Sequence(
            request_id, token_ids, self._seq_params, priority=priority, sample_index=index, processors=processors
        )
        return Beam(seq, len(token_ids), cum_logprob)


def end(scheduler: Scheduler, seq: Sequence) -> None:
    if seq.finish_reason is None:
        scheduler.finish(seq, "stop")
