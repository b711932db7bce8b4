"""Log-probabilities as OpenAI's two endpoints show them."""

from collections.abc import Sequence
from typing import Any

from nanovllm.outputs import Logprob
from nanovllm.serve.token_bytes import TokenBytes

LOWEST = -9999.0  # in place of minus infinity (a token that cannot be drawn), which JSON lacks


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(
    positions: Sequence[dict[int, Logprob]], token_ids: Sequence[int], num_top: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """For each token its own entry, and those of the `num_top` likeliest."""
    content = []
    for position, token_id in zip(positions, token_ids, strict=True):
        likeliest = sorted(position, key=lambda i: position[i].rank)[:num_top]
        top = [chat_entry(i, position[i], token_bytes) for i in likeliest]
        content.append(chat_entry(token_id, position[token_id], token_bytes) | {"top_logprobs": top})
    return {"content": content}


def chat_entry(token_id: int, one: Logprob, token_bytes: TokenBytes) -> dict[str, Any]:
    token = one.decoded_token or ""
    return {"token": token, "logprob": finite(one.logprob), "bytes": list(token_bytes.of(token_id, token))}


def completion_logprobs(
    positions: Sequence[dict[int, Logprob] | None], token_ids: Sequence[int], offset: int, tokenizer: Any
) -> dict[str, Any]:
    """`offset` is the length of the text before the first token; the first token of a prompt has no log-probability."""
    tokens, offsets, top = [], [], []
    chosen: list[float | None] = []
    for position, token_id in zip(positions, token_ids, strict=True):
        token = position[token_id].decoded_token if position else None
        tokens.append(token or ("" if tokenizer is None else tokenizer.decode([token_id])))
        offsets.append(offset)
        offset += len(tokens[-1])
        chosen.append(finite(position[token_id].logprob) if position else None)
        top.append({one.decoded_token or "": finite(one.logprob) for one in position.values()} if position else None)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}
