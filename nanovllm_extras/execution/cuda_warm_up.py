"""Small steps of each kind before the first request, which then need not wait until Triton has compiled its kernels.

`cuda_startup.py` runs them at each start: with a fixed number of blocks nothing else computes chunks of prefill or
draws. All slots are in the null block, which no sequence reads.
"""

from dataclasses import fields
from itertools import accumulate

import torch

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.execution.step_graphs import StepSizes
from nanovllm_extras.sampling.runner_hooks import draw_arguments

CONTEXT = 1024  # tokens: long enough to be split
CHUNK = 32  # tokens: more than `few_tokens.py` takes
MANY = 65  # tokens: more than a tile of `cuda_quantised.py` has


def warm_up(runner: Runner, sizes: StepSizes) -> None:
    """Run decodes, chunks of prefill with nothing before them, and a short one late in its sequence."""
    most = min(sizes.max_num_batched_tokens, sizes.max_model_len)
    context = min(CONTEXT, sizes.max_model_len)
    chunk, many, short = min(CHUNK, most), min(MANY, most), min(2, most)
    table_width = -(-sizes.max_model_len // runner.backend.block_size)
    for num_new, seq_len, is_decode, kind in [
        (1, context, True, "greedy"),
        (1, context, True, "plain"),
        (chunk, chunk, False, "limited"),
        (many, many, False, "plain"),
        (short, context, False, "plain"),
    ]:
        sampling = draws(kind, 1)
        runner.run(null_batch([num_new], [seq_len], is_decode, table_width, sampling, runner.metadata_cls)).wait()
    draw_from_both(runner)


@torch.inference_mode()
def draw_from_both(runner: Runner) -> None:
    """Compute the logits of many rows, as for a prompt's log-probabilities, and draw from logits in both dtypes.

    Logits that a request has changed are float32.
    """
    with runner.step_context():
        for num_rows in (CHUNK, MANY):
            hidden = torch.zeros(num_rows, runner.shape.hidden_size, dtype=runner.dtype, device=runner.device)
            logits = runner.compute_logits(hidden)  # [num_rows, vocab_size]
        for kind in ("greedy", "plain", "limited"):
            runner.draw(logits[:1].float(), *draw_arguments(runner.send(draws(kind, 1))))


def null_batch(
    new_lens: list[int],
    seq_lens: list[int],
    are_decodes: bool,
    table_width: int,
    sampling: SamplingBatch,
    metadata_cls: type[AttentionMetadata] = AttentionMetadata,
) -> Batch:
    """Return a batch in the null block: sequences of `seq_lens` tokens, the last `new_lens` of which are computed.

    metadata_cls: of the runner; the fields that it adds are 0 for each token
    """
    cu = torch.tensor([0, *accumulate(new_lens)], dtype=torch.int32)
    cu_k = torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32)
    zeros = torch.zeros(sum(new_lens), dtype=torch.int32)
    own = [one.name for one in fields(metadata_cls)[len(fields(AttentionMetadata)) :]]
    return Batch(
        input_ids=zeros,
        positions=zeros,
        metadata=metadata_cls(
            slot_mapping=zeros,
            block_tables=torch.zeros(len(new_lens), table_width, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            cu_seqlens_q=cu,
            prefill_cu_seqlens_q=cu[:1] if are_decodes else cu,
            prefill_cu_seqlens_k=cu[:1] if are_decodes else cu_k,
            num_decodes=len(new_lens) if are_decodes else 0,
            max_seqlen_q=0 if are_decodes else max(new_lens),
            max_seqlen_k=0 if are_decodes else max(seq_lens),
            num_prefix_tokens=0 if are_decodes else sum(seq_lens) - sum(new_lens),
            **dict.fromkeys(own, zeros),
        ),
        logits_indices=cu[1:] - 1,
        sampling=sampling,
        copies=[],
    )


def draws(kind: str, num_rows: int) -> SamplingBatch:
    """Return a sampling batch. `kind`: `greedy`, `plain` (by a temperature), or `limited` (by top-p too)."""
    if kind == "greedy":
        return SamplingBatch(torch.zeros(num_rows), None)
    top_p = torch.full((num_rows,), 0.5) if kind == "limited" else None
    return SamplingBatch(torch.ones(num_rows), torch.full((num_rows,), 0.5, dtype=torch.float64), top_p=top_p)
