"""Greedy steps by a backend's own argmax; all other steps as `sampler.draw_tokens` has them.

PyTorch's argmax over 32 rows of 150,000 logits takes 7 ms on two cores, a sixteenth of a decode step: it reads at a
tenth of the speed of memory. Chosen by `choices.py` on CPU.
"""

from collections.abc import Callable

import torch

from nanovllm.execution.sampler import Draw, draw_tokens

Argmax = Callable[[torch.Tensor], torch.Tensor]
"""logits: [num_samples, vocab_size] -> token ids: [num_samples] int64"""


def draw_greedily_by(argmax: Argmax) -> Draw:
    """A twin of `draw_tokens`."""

    def draw(
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        uniforms: torch.Tensor | None = None,
        *truncation: torch.Tensor | int | None,
    ) -> torch.Tensor:
        if uniforms is None:
            return argmax(logits)
        return draw_tokens(logits, temperatures, uniforms, *truncation)  # type: ignore[arg-type]

    return draw
