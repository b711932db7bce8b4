"""What happens if none of a sequence's next tokens can be sampled: the sequence ends, and its output says why.

`runner_hooks.py` marks such rows with `NO_TOKEN`. The engine calls `end_without_token` after the scheduler has appended
the step's tokens, and `isolation.py` gives the request's user a `NoTokenError`.
"""

from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN

NO_TOKEN_REASON = (
    "no token can be sampled: the parameters of the request (allowed_token_ids, bad_words, min_tokens, logit_bias, "
    "logits_processors, structured_outputs) forbid all of them together, or the model's logits are NaN"
)


class NoTokenError(ValueError):
    """Raised with the reason to the user of a request that has ended, because no next token could be sampled."""


def end_without_token(scheduler: Scheduler, advanced: list[tuple[int, Sequence]]) -> list[str]:
    """End sequences whose newest token is `NO_TOKEN`, and remove this token. Return the ids of their requests."""
    ended = [seq for _, seq in advanced if seq.token_ids[-1] == NO_TOKEN]
    seqs = list(dict.fromkeys(ended))  # with drafts, a sequence may have advanced several times
    for seq in seqs:
        del seq.token_ids[-1]
        seq.num_tokens = len(seq.token_ids)
        if seq.finish_reason is None:
            scheduler.finish(seq, "abort")
        seq.finish_reason, seq.stop_reason = "abort", NO_TOKEN_REASON
    return [seq.request_id for seq in seqs]
