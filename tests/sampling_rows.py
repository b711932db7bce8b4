"""Rows that ask for anything, what their next tokens must be drawn from, and checks that they are.

The oracle is a loop in float64 over single rows. It is compared with the shares of an even grid of uniform numbers that
each token gets, and by chi-square with draws from the engine's own uniform numbers.
"""

import math
from dataclasses import replace

import torch

from nanovllm.sampler import sample_tokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from tests import steps

VOCAB_SIZE = 40
EOS = 39
HISTORY = ([1, 2, 2, 30], [5, 5, 5, 30, 8, 3])


def random_logits(num_rows, vocab_size=VOCAB_SIZE, seed=0, scale=3.0):
    """[num_rows, vocab_size] float32"""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_ids(length, seed, vocab_size=VOCAB_SIZE):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def softmax(x):
    powers = [math.exp(value - max(x)) for value in x]
    return [power / math.fsum(powers) for power in powers]


class Rows:
    """Of the core. A subclass makes other sequences, and other batches of them."""

    fields = {
        "temperature": [0, 1.0, 0.4, 1.7, 3.0],
        "top_k": [0, -1, 0, 3, 12, 1],
        "top_p": [1, 1, 0.9, 0.4],
        "min_p": [0, 0, 0.02, 0.3],
    }

    def sequence(self, prompt=(1, 2, 3), output=(), seed=0, sample_index=0, **fields):
        """A sequence that has `output` so far and is about to get its next token."""
        seq = self.make(list(prompt), {"max_tokens": None, **fields}, seed, sample_index)
        for token_id in output:
            seq.append_token(token_id)
        return seq

    def make(self, prompt, fields, seed, sample_index):
        return Sequence("r", prompt, SamplingParams(**fields), frozenset([EOS]), seed, sample_index)

    def sampling_of(self, rows):
        return steps.sampling_of(rows)

    def draw(self, raw, batch):
        """[num_samples, vocab_size] -> [num_samples]"""
        return sample_tokens(raw, batch.temperatures, batch.uniforms, batch.top_k, batch.top_p, batch.min_p)

    # ---- the oracle

    def changed(self, x, seq):
        """The logits as `seq` wants them to be changed before the temperature: a list."""
        return x

    def expected_probs(self, raw, seq):
        """What the next token of `seq` is drawn from, step by step in float64: a list of probabilities."""
        p = seq.sampling_params
        x = self.changed([float(value) for value in raw], seq)
        if p.temperature == 0:
            best = max(range(len(x)), key=lambda t: x[t])
            return [float(t == best) for t in range(len(x))]
        x = [value / p.temperature for value in x]
        probs = softmax(x)
        x = [value if probs[t] >= p.min_p * max(probs) else -math.inf for t, value in enumerate(x)]
        if p.top_k > 0:
            kth = sorted(x, reverse=True)[min(p.top_k, len(x)) - 1]
            x = [value if value >= kth else -math.inf for value in x]
        if p.top_p < 1:
            probs, so_far = softmax(x), 0.0
            for t in sorted(range(len(x)), key=lambda t: -x[t]):
                if so_far >= p.top_p:
                    x[t] = -math.inf
                so_far += probs[t]
        return softmax(x)

    def random_fields(self, seed, **more):
        """Random values of all `fields`, and of `more`, which has values to choose among too."""
        generator, fields = torch.Generator().manual_seed(seed), {**self.fields, **more}
        return {name: some[int(torch.randint(len(some), (), generator=generator))] for name, some in fields.items()}

    # ---- checks

    def drawn_shares(self, raw, rows, num_points=400):
        """Share of an even grid of uniform numbers for which each row gets each token: [num_rows, vocab_size]"""
        batch = self.sampling_of(rows)
        counts = torch.zeros(raw.shape, dtype=torch.int64)
        for i in range(num_points):
            uniforms = torch.full((len(rows),), (i + 0.5) / num_points, dtype=torch.float64)
            if batch.uniforms is not None:
                batch = replace(batch, uniforms=uniforms)
            counts[torch.arange(len(rows)), self.draw(raw, batch)] += 1
        return counts / num_points

    def assert_drawn_from(self, raw, rows, num_points=400):
        """Each token gets its interval of [0, 1): its share is right to one point of the grid, and 0 if it has none."""
        before = raw.clone()
        shares = self.drawn_shares(raw, rows, num_points)
        assert torch.equal(raw, before), "log-probabilities are to be taken of these"
        for i, seq in enumerate(rows):
            expected = torch.tensor(self.expected_probs(raw[i], seq), dtype=torch.float64)
            assert (shares[i] - expected).abs().max() < 1.01 / num_points, seq.sampling_params
            assert not shares[i][expected == 0].any(), seq.sampling_params

    def assert_a_row_is_drawn_the_same_whatever_its_neighbours_want(self, **more):
        rows = [self.sequence(*HISTORY, seed=i, **self.random_fields(i, **more)) for i in range(30)]
        raw = random_logits(len(rows))
        together = self.draw(raw, self.sampling_of(rows)).tolist()
        assert together == [int(self.draw(raw[i : i + 1], self.sampling_of([seq]))) for i, seq in enumerate(rows)]

    def assert_random_combinations(self, **more):
        """100 rows in one batch, with histories of different lengths."""
        rows = [
            self.sequence(random_ids(1 + i % 9, i), random_ids(i % 13, 99 + i), **self.random_fields(i, **more))
            for i in range(100)
        ]
        self.assert_drawn_from(random_logits(len(rows), scale=2.0), rows)

    def assert_frequencies_follow_the_distribution(self, kind, fields):
        """Chi-square with the engine's own uniform numbers, over 100 seeds and 100 positions; p below 0.001 fails."""
        raw = random_logits(1, seed=kind, scale=1.0)
        seq = self.sequence(*HISTORY, **fields)
        draws = [self.sequence(seed=1000 * kind + i) for i in range(100)]
        uniforms = []
        for _ in range(100):
            uniforms.append(self.sampling_of(draws).uniforms)
            for drawn in draws:
                drawn.token_ids.append(0)
        batch = replace(self.sampling_of([seq] * 10_000), uniforms=torch.cat(uniforms))
        token_ids = self.draw(raw.expand(10_000, -1), batch)
        counts = torch.bincount(token_ids, minlength=VOCAB_SIZE).double()
        expected = torch.tensor(self.expected_probs(raw[0], seq), dtype=torch.float64) * 10_000
        assert not counts[expected == 0].any()
        is_rare = expected < 10  # together they are one cell
        cells = [torch.cat([part[~is_rare], part[is_rare].sum()[None]]) for part in (counts, expected)]
        degrees_of_freedom = int((~is_rare).sum()) - 1
        if expected[is_rare].any():
            degrees_of_freedom += 1
        else:
            cells = [part[:-1] for part in cells]
        assert degrees_of_freedom >= 3
        chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
        p_value = torch.special.gammaincc(torch.tensor(degrees_of_freedom / 2, dtype=torch.float64), chi_square / 2)
        assert p_value > 0.001, fields
