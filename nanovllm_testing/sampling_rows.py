"""Rows of logits with any sampling parameters, the distribution of their next tokens, and checks of a sampler.

The oracle is a loop in float64 over single rows. It is compared with the shares of an even grid of uniform numbers that
each token gets, and by chi-square with draws from the engine's own uniform numbers.
"""

import math
from collections.abc import Sequence as AnySequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.sampler import sample_tokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm_testing import steps
from nanovllm_testing.violation import Violation, require

VOCAB_SIZE = 40
EOS = 39
HISTORY = ([1, 2, 2, 30], [5, 5, 5, 30, 8, 3])


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Return random logits: [num_rows, vocab_size] float32"""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_ids(length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> Any:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def softmax(x: list[float]) -> list[float]:
    powers = [math.exp(value - max(x)) for value in x]
    return [power / math.fsum(powers) for power in powers]


class Rows:
    """Rows of the core's sampler. A subclass makes other sequences, other batches of them, or calls another sampler."""

    fields: dict[str, list[Any]] = {
        "temperature": [0, 1.0, 0.4, 1.7, 3.0],
        "top_k": [0, -1, 0, 3, 12, 1],
        "top_p": [1, 1, 0.9, 0.4],
        "min_p": [0, 0, 0.02, 0.3],
    }

    def sequence(
        self,
        prompt: AnySequence[int] = (1, 2, 3),
        output: AnySequence[int] = (),
        seed: int = 0,
        sample_index: int = 0,
        **fields: Any,
    ) -> Any:
        """Return a sequence that has `output` so far and is about to get its next token."""
        seq = self.make(list(prompt), {"max_tokens": None, **fields}, seed, sample_index)
        for token_id in output:
            seq.append_token(token_id)
        return seq

    def make(self, prompt: list[int], fields: dict[str, Any], seed: int, sample_index: int) -> Any:
        return Sequence("r", prompt, SamplingParams(**fields), frozenset([EOS]), seed, sample_index)

    def sampling_of(self, rows: list[Any]) -> Any:
        return steps.sampling_of(rows)

    def draw(self, raw: Tensor, batch: Any) -> Tensor:
        """Sample a token for each row: [num_samples, vocab_size] -> [num_samples]"""
        return sample_tokens(raw, batch.temperatures, batch.uniforms, batch.top_k, batch.top_p, batch.min_p)

    # ---- the oracle

    def changed(self, x: list[float], seq: Any) -> list[float]:
        """Return the logits as the parameters of `seq` change them before the temperature."""
        return x

    def expected_probs(self, raw: Tensor, seq: Any) -> list[float]:
        """Return the probabilities from which the next token of `seq` is drawn, computed step by step in float64."""
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

    def random_fields(self, seed: int, **more: list[Any]) -> dict[str, Any]:
        """Return random values of all `fields`, and of `more`, which has lists of values too."""
        generator, fields = torch.Generator().manual_seed(seed), {**self.fields, **more}
        return {name: some[int(torch.randint(len(some), (), generator=generator))] for name, some in fields.items()}

    # ---- checks

    def drawn_shares(self, raw: Tensor, rows: list[Any], num_points: int = 400) -> Tensor:
        """Return the share of an even grid of numbers for which each row gets each token: [num_rows, vocab_size]"""
        batch = self.sampling_of(rows)
        counts = torch.zeros(raw.shape, dtype=torch.int64)
        for i in range(num_points):
            uniforms = torch.full((len(rows),), (i + 0.5) / num_points, dtype=torch.float64)
            if batch.uniforms is not None:
                batch = replace(batch, uniforms=uniforms)
            counts[torch.arange(len(rows)), self.draw(raw, batch)] += 1
        return counts / num_points

    def assert_drawn_from(self, raw: Tensor, rows: list[Any], num_points: int = 400) -> None:
        """Each token gets its interval of [0, 1): its share is right to one point of the grid, and 0 if it has none."""
        before = raw.clone()
        shares = self.drawn_shares(raw, rows, num_points)
        require(torch.equal(raw, before), "the sampler changes the logits, of which log-probabilities are taken later")
        for i, seq in enumerate(rows):
            expected = torch.tensor(self.expected_probs(raw[i], seq), dtype=torch.float64)
            is_right = (shares[i] - expected).abs().max() < 1.01 / num_points and not shares[i][expected == 0].any()
            require(is_right, f"tokens are drawn from another distribution: {seq.sampling_params}")

    def assert_a_row_is_drawn_the_same_whatever_its_neighbours_want(self, **more: list[Any]) -> None:
        rows = [self.sequence(*HISTORY, seed=i, **self.random_fields(i, **more)) for i in range(30)]
        raw = random_logits(len(rows))
        together = self.draw(raw, self.sampling_of(rows)).tolist()
        for i, seq in enumerate(rows):
            by_itself = int(self.draw(raw[i : i + 1], self.sampling_of([seq])))
            if together[i] != by_itself:
                raise Violation(
                    f"row {i} of {len(rows)} gets token {together[i]}, but token {by_itself} if it is the only row of "
                    f"the batch: {shown(seq.sampling_params)}"
                )

    def assert_random_combinations(self, **more: list[Any]) -> None:
        """Check 100 rows in one batch, with histories of different lengths."""
        rows = [
            self.sequence(random_ids(1 + i % 9, i), random_ids(i % 13, 99 + i), **self.random_fields(i, **more))
            for i in range(100)
        ]
        self.assert_drawn_from(random_logits(len(rows), scale=2.0), rows)

    def assert_frequencies_follow_the_distribution(
        self, kind: int, fields: dict[str, Any], least_p_value: float = 0.001
    ) -> None:
        """Compare 10,000 draws with the distribution by chi-square. They use the engine's own uniform numbers.

        kind: chooses the logits and the seeds of the 100 sequences, each of which is drawn at 100 positions
        """
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
        p_value = chi_square_test(counts, expected)
        if p_value <= least_p_value:
            i = int(((counts - expected) ** 2 / expected.clamp(min=1)).argmax())
            raise Violation(
                f"10,000 draws do not follow the distribution (chi-square test, p = {p_value:.1g}): token {i} was "
                f"drawn {int(counts[i])} times, and {expected[i]:.0f} times are expected, with {shown(fields)}"
            )


def chi_square_test(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of counts of draws, compared with the expected ones, or 0 if something impossible was drawn.

    counts, expected: [num_tokens] float64. Rare tokens are one cell together.
    """
    if counts[expected == 0].any():
        return 0.0
    is_rare = expected < 10
    cells = [torch.cat([part[~is_rare], part[is_rare].sum()[None]]) for part in (counts, expected)]
    degrees_of_freedom = int((~is_rare).sum()) - 1
    if expected[is_rare].any():
        degrees_of_freedom += 1
    else:
        cells = [part[:-1] for part in cells]
    assert degrees_of_freedom >= 1
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    return float(torch.special.gammaincc(torch.tensor(degrees_of_freedom / 2, dtype=torch.float64), chi_square / 2))


def shown(params: Any) -> str:
    """Return the sampling parameters that change what is drawn: "temperature 0.4, top_k 3"."""
    fields = params if isinstance(params, dict) else vars(params)
    names = ("temperature", "top_k", "top_p", "min_p")
    defaults = vars(SamplingParams())
    given = [f"{name} {fields[name]}" for name in names if fields.get(name, defaults[name]) != defaults[name]]
    return ", ".join(given) or "temperature 1.0"
