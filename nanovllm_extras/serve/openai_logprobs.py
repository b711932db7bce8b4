"""Format log-probabilities for OpenAI's two endpoints.

An answer may have a hundred thousand of them. Those of a chat contain the bytes of each token. They are encoded here
from the JSON of each token, which `TokenBytes` caches: encoding Python values would take twenty times as long.
"""

from collections.abc import Mapping, Sequence

from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.sampling.logprobs import Logprob, PositionLogprobs
from nanovllm_extras.serve.streaming import Written

Position = Mapping[int, Logprob]

LOWEST = -9999.0  # replaces minus infinity (a token that cannot be sampled), which JSON cannot represent


def entries_of(position: Position) -> Mapping[int, tuple[float, int]]:
    """Return a dict: token id -> (log-probability, which is finite; rank)."""
    if isinstance(position, PositionLogprobs):
        entries = position.entries
    else:  # the position was copied, or sent from another process
        entries = {i: (one.logprob, one.rank) for i, one in position.items()}
    return {i: (value if value > LOWEST else LOWEST, rank) for i, (value, rank) in entries.items()}


def chat_logprobs(
    positions: Sequence[Position], token_ids: Sequence[int], num_top: int, token_bytes: TokenBytes
) -> dict[str, list[Written]]:
    """Return for each token its own entry, and the entries of the `num_top` likeliest tokens."""
    json_of, content = token_bytes.json_of, []
    for position, token_id in zip(positions, token_ids, strict=True):
        entries, top = entries_of(position), []
        for i in sorted(entries, key=lambda i: entries[i][1])[:num_top]:
            token, its_bytes = json_of(i)
            top.append(f'{{"token":{token},"logprob":{entries[i][0]!r},"bytes":{its_bytes}}}')
        token, its_bytes = json_of(token_id)
        own = f'"token":{token},"logprob":{entries[token_id][0]!r},"bytes":{its_bytes}'
        content.append(Written(f'{{{own},"top_logprobs":[{",".join(top)}]}}'.encode("ascii")))
    return {"content": content}


def completion_logprobs(
    positions: Sequence[Position | None], token_ids: Sequence[int], offsets: Sequence[int], token_bytes: TokenBytes
) -> dict[str, object]:
    """Return the log-probabilities of a completion. offsets: where the text of each token begins.

    The first token of a prompt has no log-probability.
    """
    text_of, tokens = token_bytes.text_of, []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for position, token_id in zip(positions, token_ids, strict=True):
        entries = entries_of(position) if position else None
        tokens.append(text_of(token_id))
        chosen.append(entries[token_id][0] if entries else None)
        top.append({text_of(i): value for i, (value, _) in entries.items()} if entries else None)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": list(offsets)}
