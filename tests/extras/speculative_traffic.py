"""Runs of a scheduler without a model, whose sequences get drafts: see `full_traffic.py`."""

import random

from nanovllm_extras.scheduling.drafter import SpeculativeScheduler
from tests.extras.full_traffic import Before, Flight, Run
from tests.fake_kv_cache import tokens_of
from tests.scheduling_traffic import VOCAB_SIZE, next_token


class Guesser:
    """Knows the rule of `next_token`; some guesses are wrong, too many, or no tokens at all."""

    def __init__(self, share_right=0.75, is_erratic=True):
        self.share_right = share_right
        self.is_erratic = is_erratic

    def propose(self, wanted):
        return [self.guess(seq, count) for seq, count in wanted]

    def guess(self, seq, count):
        tokens = tokens_of(seq)
        assert count >= 1
        rng = random.Random(f"{tokens} {seq.sample_index}")
        drafts = []
        for _ in range(rng.randint(0, count + 2) if self.is_erratic else count):
            right = next_token(tokens + drafts, seq.sample_index)
            wrong = [(right + 1) % VOCAB_SIZE, *((-1, VOCAB_SIZE) if self.is_erratic else ())]
            drafts.append(right if rng.random() < self.share_right else rng.choice(wrong))
        return drafts


class SpeculativeRun(Run):
    """`Run`, whose steps may have several rows of a sequence."""

    def __init__(self, max_drafts=4, max_rows=24, max_seqs=99, proposer=None, **options):
        self.proposer = proposer or Guesser()
        self.limits = {"max_drafts": max_drafts, "max_rows": max_rows, "max_seqs": max_seqs}
        super().__init__(**options)

    @property
    def has_unknown_tokens(self):
        return True

    def make_extended_scheduler(self, *arguments):
        return SpeculativeScheduler(*arguments, proposer=self.proposer, vocab_size=VOCAB_SIZE, **self.limits)

    def launch(self):
        before = Before(self)
        out = self.scheduler.schedule()
        underway = self.scheduler._underway
        planned = out if underway is None else underway.planned
        if underway is not None:
            assert planned.preempted == planned.admitted == [], "drafts cost no other sequence anything"
            assert out.num_scheduled_tokens == out.num_decodes
            assert out.num_scheduled_tokens <= self.scheduler.max_rows
            for seq, token_ids in underway.drafts.items():
                before.num_tokens[seq] += len(token_ids)
                assert 1 <= len(token_ids) <= self.scheduler.max_drafts
                assert not any(token_id in seq.all_stop_token_ids for token_id in token_ids)
                assert seq.num_tokens < seq.max_num_tokens
        before.check(planned)
        self.check_scheduled(planned)
        if not out.chunks:
            return
        writes = [(seq, start, start + num_new) for seq, start, num_new in planned.chunks]
        before.writers.check(writes, self.manager.block_size)
        journal = self.write(out, writes)
        drawn = []
        for seq, i in zip(out.samples, out.sampled_chunks, strict=True):
            owner, start, num_new = out.chunks[i]
            drawn.append(next_token(self.cache.tokens_of(owner, start + num_new), seq.sample_index))
        self.cache.newest = drawn
        self.flights.append(Flight(out, planned.samples, drawn, {}, journal, before.children))

    def update(self, flight):
        known = {seq: tokens_of(seq) for seq in flight.samples}
        living = [seq for seq in dict.fromkeys(flight.samples) if seq.finish_reason is None]
        advanced = self.scheduler.update(flight.out, flight.tokens)
        assert list(dict.fromkeys(seq for _, seq in advanced)) == living, "each gets one token at least"
        for row, seq in advanced:
            known[seq].append(flight.tokens[row])
        assert all(tokens_of(seq) == known[seq] for seq in living)
        for search in self.searches:
            search.end_step([seq for _, seq in advanced])
