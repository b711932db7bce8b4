"""Runs of a scheduler without a model, whose sequences get drafts: see `full_traffic.py`."""

import random

from nanovllm_extras.scheduling.drafter import Drafter
from nanovllm_testing.fake_kv_cache import tokens_of
from nanovllm_testing.run import VOCAB_SIZE, next_token
from tests.extras.full_traffic import Run


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

    is_plain = False

    def make_drafter(self):
        limits, max_chunk_len = self.limits, self.threshold or self.max_chunk_len  # as in `make_drafter` of the engine
        limits["max_drafts"] = min(limits["max_drafts"], max_chunk_len - 1)
        limits["max_rows"] = min(limits["max_rows"], self.max_chunk_len)
        return Drafter(self.proposer, vocab_size=VOCAB_SIZE, **limits)

    def planned(self, out, before):
        verification, limits = self.scheduler.pending.verification, self.limits
        if verification is None:
            return out
        planned, drafts, _ = verification
        assert not self.flights, "drafts that come after tokens that nobody knows"
        assert planned.preempted == [], "drafts cost no other sequence anything"
        assert out.num_scheduled_tokens == out.num_decodes
        assert out.num_scheduled_tokens <= limits["max_rows"]
        for seq, token_ids in drafts.items():
            before.num_tokens[seq] += len(token_ids)
            assert 1 <= len(token_ids) <= limits["max_drafts"]
            assert not any(token_id in seq.all_stop_token_ids for token_id in token_ids)
            assert seq.num_tokens < seq.max_num_tokens
        return planned

    def has_reason_to_wait(self):
        """A step with drafts must have landed, and so must one after which somebody may get drafts."""
        scheduler = self.scheduler
        could_draft = not scheduler.drafter.rests(scheduler.running, scheduler.may_admit())
        return scheduler.pending.verification is not None or could_draft

    def draw_rows(self, out, writes, before):
        drawn = []
        for seq, i in zip(out.samples, out.sampled_chunks, strict=True):
            owner, start, num_new = out.chunks[i]
            drawn.append(next_token(self.cache.tokens_of(owner, start + num_new), seq.sample_index))
        verification = self.scheduler.pending.verification
        return (out if verification is None else verification.planned).samples, drawn

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
