"""Score the pairs of texts of a request to `/rerank` or `/score`, as `LLM.score` does (`embedding/pairs.py`)."""

from typing import NamedTuple

from fastapi import Request

from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.pairs import PairScoring, Sides
from nanovllm_extras.embedding.text_cuts import token_limit
from nanovllm_extras.serve.bounds import BoundedTokenizer
from nanovllm_extras.serve.errors import refuse
from nanovllm_extras.serve.messages.pooling_protocol import PairFields
from nanovllm_extras.serve.prompts import MANY, check_lengths, require_tokenizer
from nanovllm_extras.serve.readings import read_prompts, usage_of_prompts
from nanovllm_extras.serve.state import Server
from nanovllm_extras.serve.workers import Check


class Scores(NamedTuple):
    """The scores of pairs, in the order of the second texts, and the usage."""

    values: list[float]
    usage: dict[str, object]


async def score_pairs(server: Server, request: Request, body: PairFields, score_id: str, sides: Sides) -> Scores:
    """Return the score of each text of the second side: with the only text of the first one, or that of its index.

    Raises APIError if a text is invalid or too long. If cancelled, it aborts the unfinished requests.
    """
    scoring = PairScoring(
        sides,
        server.classifier,
        instruction=body.instruction,
        pooling=body.pooling,
        use_activation=body.use_activation is not False,
        max_tokens=token_limit(body.truncate_prompt_tokens, server.bounds.max_model_len, server.bounds.capacity),
        max_tokens_per_doc=body.max_tokens_per_doc,
    )
    scoring.check_fields(refuse)
    is_long = len(sides.second) > MANY
    prompts = await server.workers.run(
        request, lambda check: make_prompts(server, scoring, check), is_long=is_long or None
    )
    outputs = await read_prompts(server, request, body, scoring.params, score_id, prompts, sides.second_name)
    if is_long:
        values = await server.workers.write(request.state.caller, lambda check: scoring.scores(outputs))
    else:
        values = scoring.scores(outputs)
    return Scores(values, usage_of_prompts(outputs))


def make_prompts(server: Server, scoring: PairScoring, check: Check) -> list[Prompt]:
    """Return the prompts of all pairs. Raises APIError 400 if a text or a prompt is too long."""
    tokenizer = bounded_tokenizer(server, scoring, check)
    with refuse("instruction"):
        tokenizer.check_text(scoring.instruction or "")
    for name, texts in scoring.sides.named:
        with refuse(name):
            for text in texts:
                tokenizer.check_text(text)
    prompts: list[Prompt] = []
    for name, prompt in scoring.prompts(tokenizer, refuse):
        check_lengths([prompt], name, server.bounds)
        prompts.append(prompt)
    return prompts


def bounded_tokenizer(server: Server, scoring: PairScoring, check: Check) -> BoundedTokenizer:
    """Return the tokenizer for a request, which takes longer texts if they will be cut."""
    is_cut = scoring.max_tokens is not None or bool(scoring.max_tokens_per_doc)
    bounds = server.bounds.of_truncated() if is_cut else server.bounds
    tokenizer = require_tokenizer(server.check_ready().engine.tokenizer)
    return BoundedTokenizer(tokenizer, bounds, check)
