"""Requests and the pool that they share, as data: random cases, and simpler variants of a case that fails.

A case is played by `played_run.py`. `shrink.py` looks for the shortest run that still fails.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from nanovllm_testing.fake_kv_cache import count

ExtraArgs = Callable[[Random], Mapping[str, Any] | None]
"""Returns the `extra_args` of a random request."""


def no_extra_args(rng: Random) -> None:
    return None


@dataclass(frozen=True)
class Request:
    """A prompt that arrives before step `arrival`, which counts from 0, and gets `n` samples of `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    arrival: int = 0
    abort: int | None = None
    """The step before which the request is aborted, if it has not finished."""
    extra_args: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Traffic:
    """A pool of blocks, the limits of a scheduler, and requests. Each prompt fits into the empty pool."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    requests: tuple[Request, ...]
    enable_prefix_caching: bool = True
    has_equal_hashes: bool = False
    """Whether many blocks have the same hash in the prefix cache, so that a hash by itself proves nothing."""
    eos_token_ids: frozenset[int] = frozenset()

    def is_valid(self) -> bool:
        """Return whether each request can be served."""
        longest = max((len(one.prompt) for one in self.requests), default=0)
        fits = 1 <= longest <= self.num_blocks * self.block_size and all(one.prompt for one in self.requests)
        return fits and all(1 <= one.n <= self.max_num_seqs and one.max_tokens >= 1 for one in self.requests)

    def describe(self) -> list[str]:
        """Return lines: the pool and the limits, then the requests."""
        caching = "with prefix caching" if self.enable_prefix_caching else "without prefix caching"
        caching += ", whose hashes are often equal" if self.has_equal_hashes else ""
        lines = [
            f"{count(self.num_blocks, 'block')} of {count(self.block_size, 'token')} {caching}; at most "
            f"{count(self.max_num_seqs, 'sequence')} and {count(self.budget, 'token')} in a step"
        ]
        for i, one in enumerate(self.requests):
            parts = [f"prompt {list(one.prompt)}", f"max_tokens {one.max_tokens}"]
            parts += [f"{one.n} samples"] if one.n > 1 else []
            parts += [f"extra_args {dict(one.extra_args)}"] if one.extra_args else []
            parts += [f"arrives before step {one.arrival + 1}"] if one.arrival else []
            parts += [f"aborted before step {one.abort + 1}"] if one.abort is not None else []
            lines.append(f"{letter(i)}: {', '.join(parts)}")
        if self.eos_token_ids:
            lines.append(f"end-of-sequence tokens: {sorted(self.eos_token_ids)}")
        return lines

    def simpler(self) -> Iterator["Traffic"]:
        """Yield variants of this case with less in them: fewer requests, shorter ones, fewer special cases."""
        for i, one in reversed(list(enumerate(self.requests))):
            yield self.with_request(i)
            for size in (1, len(one.prompt) // 2, len(one.prompt) - 1):
                yield self.with_request(i, replace(one, prompt=one.prompt[:size]))
            yield self.with_request(i, replace(one, prompt=one.prompt[1:]))
            for at, token in enumerate(one.prompt):
                if token:
                    yield self.with_request(i, replace(one, prompt=(*one.prompt[:at], 0, *one.prompt[at + 1 :])))
            for number in (1, one.max_tokens // 2, one.max_tokens - 1):
                yield self.with_request(i, replace(one, max_tokens=number))
            for number in (0, one.arrival // 2, one.arrival - 1):
                yield self.with_request(i, replace(one, arrival=max(0, number)))
            for number in (1, one.n - 1):
                yield self.with_request(i, replace(one, n=number))
            yield self.with_request(i, replace(one, abort=None))
            if one.abort:
                yield self.with_request(i, replace(one, abort=one.abort - 1))
            yield self.with_request(i, replace(one, extra_args=None))
        yield replace(self, has_equal_hashes=False)
        yield replace(self, enable_prefix_caching=False, has_equal_hashes=False)
        yield replace(self, eos_token_ids=frozenset())
        for name in ("num_blocks", "block_size", "max_num_seqs", "budget"):
            value = getattr(self, name)
            for number in (1, value // 2, value - 1, value + 1, 2 * value):
                changed: dict[str, Any] = {name: max(1, number)}
                yield replace(self, **changed)

    def with_request(self, i: int, *changed: Request) -> "Traffic":
        """Return the case with request `i` replaced by others."""
        return replace(self, requests=(*self.requests[:i], *changed, *self.requests[i + 1 :]))

    @property
    def size(self) -> tuple[int, ...]:
        """How much is in the case, for comparing two cases: what is hardest to read counts first."""
        tokens = sum(len(one.prompt) + one.n * one.max_tokens for one in self.requests)
        special = sum((one.n > 1) + (one.abort is not None) + bool(one.extra_args) for one in self.requests)
        special += self.has_equal_hashes + self.enable_prefix_caching + len(self.eos_token_ids)
        arrivals = sum(one.arrival + (one.abort or 0) for one in self.requests)
        values = sum(sum(one.prompt) for one in self.requests)
        numbers = self.num_blocks + self.block_size + self.max_num_seqs + self.budget
        return len(self.requests), tokens, special, arrivals, numbers, values


def letter(i: int) -> str:
    """Return the name of request `i`: A, B, …, Z, A1, B1, …"""
    return chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "")


def random_traffic(rng: Random, extra_args: ExtraArgs = no_extra_args) -> Traffic:
    """Return a case: a tight pool, prompts that repeat and share prefixes, blocks that are partly filled."""
    block_size, max_num_seqs = rng.randint(1, 4), rng.randint(1, 5)
    prompt: tuple[int, ...] = ()
    requests = []
    for _ in range(rng.randint(1, 5)):
        prompt = prompt[: rng.randint(0, 12)] + tuple(rng.choices(range(3), k=rng.randint(0, 6))) or (0,)
        prompt = prompt[:16]
        requests.append(
            Request(
                prompt,
                max_tokens=rng.randint(1, 9),
                n=min(max_num_seqs, rng.choice([1, 1, 1, 2, 3])),
                arrival=rng.choice([0, 0, rng.randint(0, 8)]),
                abort=rng.choice([None] * 7 + [rng.randint(0, 12)]),
                extra_args=extra_args(rng),
            )
        )
    least = max(-(-len(one.prompt) // block_size) for one in requests)
    caching = rng.random() < 0.8
    return Traffic(
        num_blocks=least + rng.choice([0, 1, 2, 4, 8, 16]),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=rng.choice([1, 2, 3, 5, 8, 16]),
        requests=tuple(requests),
        enable_prefix_caching=caching,
        has_equal_hashes=caching and rng.random() < 0.4,
        eos_token_ids=frozenset(rng.sample(range(50), 2) if rng.random() < 0.2 else ()),
    )
