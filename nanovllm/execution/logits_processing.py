"""What requests change of the logits before a draw: allowed tokens, biases, the users' own processors, penalties,
grammars.

The order is vLLM's. Each stage is skipped unless a row asks for it, so most steps return the logits untouched. Called
by `sampler.sample`.
"""

import torch

from nanovllm.execution.grammar import apply_grammar
from nanovllm.execution.sampling_batch import AllowedTokens, Biases, Penalties, SamplingBatch


def process(raw: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """raw: [num_samples, vocab_size] -> a changed copy in float32; `raw` itself if no row asks for a change"""
    asked = (sampling.allowed, sampling.biases, sampling.penalties, sampling.grammar)
    if not sampling.processors and all([one is None for one in asked]):
        return raw
    logits = raw.to(torch.float32, copy=True)
    if sampling.allowed is not None:
        apply_allowed(logits, sampling.allowed)
    if sampling.biases is not None:
        apply_biases(logits, sampling.biases)
    for row, output_token_ids, processors in sampling.processors:
        for processor in processors:
            logits[row] = processor(output_token_ids, logits[row])
    if sampling.penalties is not None:
        rows = sampling.penalties.rows
        logits[rows] = apply_penalties(logits[rows], sampling.penalties)
    if sampling.grammar is not None:  # last, so that no token gets in again
        apply_grammar(logits, raw, sampling.grammar)
    return logits


def apply_allowed(logits: torch.Tensor, allowed: AllowedTokens) -> None:
    """In place: -inf for all but the allowed tokens of the restricted rows."""
    is_forbidden = torch.ones(len(allowed.rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    is_forbidden[allowed.entries, allowed.token_ids] = False
    logits[allowed.rows] = logits[allowed.rows].masked_fill(is_forbidden, -torch.inf)


def apply_biases(logits: torch.Tensor, biases: Biases) -> None:
    """Add the biases in place; a token may be named twice."""
    logits.index_put_((biases.rows, biases.token_ids), biases.values, accumulate=True)


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """logits: [num_penalized, vocab_size] -> the same; repetition first, then frequency and presence, as in vLLM"""
    prompt_counts = count_tokens(penalties.prompt_ids, logits.shape[1])
    output_counts = count_tokens(penalties.output_ids, logits.shape[1])  # [num_penalized, vocab_size]
    repeated = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where((prompt_counts + output_counts) > 0, repeated, logits)
    return logits - penalties.frequency * output_counts - penalties.presence * (output_counts > 0)


def count_tokens(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[num_rows, length], -1 where there is no token -> how often each token occurs: [num_rows, vocab_size] float32"""
    counts = torch.zeros(len(token_ids), vocab_size + 1, dtype=torch.float32, device=token_ids.device)
    counts.scatter_add_(1, token_ids + 1, torch.ones_like(token_ids, dtype=torch.float32))
    return counts[:, 1:]  # column 0 has collected the -1s
