"""Check an attention backend: random steps over a cache whose unused slots hold NaN, against a reference in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from nanovllm_testing.attention_steps import HEADS, TOLERANCES, Step, random_lens
from nanovllm_testing.fake_kv_cache import count, table_of
from nanovllm_testing.played_run import Played, describe_error
from nanovllm_testing.timetable import draw_columns
from nanovllm_testing.violation import Violation

BLOCK_SIZES = (4, 1, 3, 16, None)  # None: the backend's default
HEAD_DIMS = (32, 64)


@dataclass(frozen=True)
class AttentionCase:
    """A step: the shape of the heads, the size of a block, and (num_computed, num_new) of each sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None
    lens: tuple[tuple[int, int], ...]
    seed: int = 0

    @property
    def size(self) -> tuple[int, ...]:
        return len(self.lens), sum(computed + new for computed, new in self.lens), self.num_heads, self.num_kv_heads

    def is_valid(self) -> bool:
        return bool(self.lens) and self.num_heads % self.num_kv_heads == 0

    def simpler(self) -> Iterator["AttentionCase"]:
        """Yield variants with fewer sequences, fewer tokens, and fewer heads."""
        for i, (computed, new) in reversed(list(enumerate(self.lens))):
            before, after = self.lens[:i], self.lens[i + 1 :]
            yield replace(self, lens=before + after)
            for pair in ((0, new), (computed // 2, new), (computed - 1, new), (computed, 1), (computed, new - 1)):
                if pair[0] >= 0 and pair[1] >= 1:
                    yield replace(self, lens=(*before, pair, *after))
        yield replace(self, num_heads=1, num_kv_heads=1)
        yield replace(self, num_heads=2, num_kv_heads=1)

    def make_step(self, backend: Any) -> Step:
        return Step(backend, list(self.lens), self.seed)


def usable_shapes(backend_cls: Any) -> tuple[list[tuple[int, int | None]], str | None]:
    """Return pairs of head_dim and block size that a backend can compute on CPU, and the reason against the others."""
    usable: list[tuple[int, int | None]] = []
    reason = None
    for head_dim in HEAD_DIMS:
        for block_size in BLOCK_SIZES:
            why_not = backend_cls.why_not(torch.device("cpu"), torch.float32, head_dim, block_size)
            if why_not is None:
                usable.append((head_dim, block_size))
            else:
                reason = why_not
    return usable, reason


def random_case(rng: Random, shapes: list[tuple[int, int | None]], default_block_size: int) -> AttentionCase:
    """Return a step of one to six sequences, most of which begin or end near the border of a block."""
    head_dim, block_size = rng.choice(shapes)
    seed = rng.randrange(1 << 30)
    lens = random_lens(block_size or default_block_size, seed)
    lens = rng.sample(lens, rng.randint(1, len(lens)))
    return AttentionCase(*rng.choice(HEADS), head_dim, block_size, tuple(lens), seed)


class AttentionCheck:
    """Computes cases with a backend. is_exact: whether the result must be that of the reference."""

    def __init__(self, backend_cls: Callable[..., Any], is_exact: bool) -> None:
        self.backend_cls = backend_cls
        self.is_exact = is_exact

    @torch.inference_mode()
    def find_error(self, case: AttentionCase) -> Exception | None:
        try:
            backend = self.backend_cls(case.num_heads, case.num_kv_heads, case.head_dim, case.block_size)
            step = case.make_step(backend)
            self.check(step, step.run(backend))
        except Exception as error:  # the code under test raises any kind
            return error
        return None

    def play(self, case: AttentionCase) -> Played:
        """Compute a case, which has no steps, for `shrink`."""
        return Played(error=self.find_error(case))

    def check(self, step: Step, out: torch.Tensor) -> None:
        if out.shape != step.q.shape or out.dtype != step.q.dtype:
            raise Violation(
                f"`attend` must return the shape and dtype of q, {tuple(step.q.shape)} {step.q.dtype}, but returns "
                f"{tuple(out.shape)} {out.dtype}"
            )
        first = 0
        for i, (_, start, num_new) in enumerate(step.chunks):
            rows, right = out[first : first + num_new], step.expected[first : first + num_new]
            for row in range(num_new):
                where = f"sequence {i}, the new token at position {start + row}, which sees {start + row + 1} tokens"
                if rows[row].isnan().any():
                    raise Violation(
                        f"{where}: the result has NaN. The backend reads a slot in which no token is stored: after the "
                        f"end of a sequence, in the null block, or in a block that is free"
                    )
                error = float((rows[row].double() - right[row]).abs().max())
                tolerance = 5 * TOLERANCES[out.dtype]
                if self.is_exact and error > tolerance:
                    raise Violation(
                        f"{where}: the result differs from the reference by {error:.2g} (allowed: {tolerance:.0g}). "
                        f"The backend reads too few or too many tokens, other slots, or computes something else "
                        f"(if it is meant to, give --approximate)"
                    )
            first += num_new

    def explain(self, case: AttentionCase) -> list[str]:
        """Return lines: the sequences of the step with their block tables, and what is wrong."""
        error = self.find_error(case)
        assert error is not None
        backend = self.backend_cls(case.num_heads, case.num_kv_heads, case.head_dim, case.block_size)
        heads = f"{count(case.num_heads, 'head')}, {count(case.num_kv_heads, 'K and V head')} of {case.head_dim}"
        lines = [f"a step of {count(len(case.lens), 'sequence')}; {heads}; blocks of {backend.block_size} tokens"]
        rows = [["sequence", "computed tokens", "new tokens", "block table", ""]]
        for i, (seq, start, num_new) in enumerate(case.make_step(backend).chunks):
            rows.append([str(i), str(start), str(num_new), str(table_of(seq)), ""])
        return [*lines, *draw_columns(rows), "", f"wrong: {describe_error(error)}"]
