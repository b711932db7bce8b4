"""Show why K and V may be kept in a cache, how much work that saves, and how much memory it takes.

Changes one token in the middle of a prompt, and compares K and V of the tokens before and after it. Then
`labs/recompute.py`, which computes everything again, and `labs/cached.py`, which keeps K and V, answer one question.

    python -m labs.demos.kv_cache
    python -m labs.demos.kv_cache --trace run.jsonl       # record nanovllm's run
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labs import cached, recompute
from labs.model import TINY_QWEN3, Attend, Model
from nanovllm_extras import LLM, SamplingParams

QUESTION = "What is the KV cache?"
CHANGED = 8  # the position of the token that is changed
MAX_TOKENS = 40


class CountingModel(Model):
    num_computed_tokens = num_scores = 0

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.num_computed_tokens += len(input_ids)
        self.num_scores += int((positions + 1).sum())  # of a head in one layer: a token reads itself and all before it
        return super().__call__(input_ids, positions, attend)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show why K and V may be kept, and how much memory they take.")
    parser.add_argument("--trace", help="record nanovllm's run to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are too small for more
    model = CountingModel(TINY_QWEN3)
    token_ids = model.encode(QUESTION)
    compare(model, token_ids)
    answers = [answer(name, make_engine, token_ids) for name, make_engine in ENGINES.items()]
    options = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
    with LLM(TINY_QWEN3, trace=args.trace, block_size=4, num_kv_blocks=24, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        output = llm.generate(token_ids, params, use_tqdm=False)[0].outputs[0]
        print(f"the same answer from both, and from nanovllm: {answers == [list(output.token_ids)] * 2}\n")
        bytes_per_token = llm.engine.runner.kv_cache.bytes_per_block // 4
    layers, kv_heads, head_dim = model.num_layers, model.num_kv_heads, model.head_dim
    print(f"by hand    2 · {layers} layers · {kv_heads} KV heads · {head_dim} dimensions · 4 bytes ", end="")
    print(f"= {2 * layers * kv_heads * head_dim * 4} bytes a token")
    print(f"nanovllm   allocates {bytes_per_token} bytes a token")


def compare(model: Model, token_ids: list[int]) -> None:
    changed = list(token_ids)
    changed[CHANGED] += 1
    n = len(token_ids)
    print(f"token {CHANGED} of 0 … {n - 1} changes: {model.decode([token_ids[CHANGED]])!r}", end=" ")
    print(f"becomes {model.decode([changed[CHANGED]])!r}; largest change of K and V\n")
    before, after = slice(0, CHANGED), slice(CHANGED + 1, n)
    print(f"          causal mask:   causal mask:   no mask:\nlayer     tokens 0 … {CHANGED - 1}   ", end="")
    print(f"tokens {CHANGED + 1} … {n - 1}  tokens 0 … {CHANGED - 1}")
    causal, no_mask = ([run(model, ids, mask) for ids in (token_ids, changed)] for mask in (True, False))
    for layer in range(model.num_layers):
        changes = [difference(causal, layer, before), difference(causal, layer, after)]
        changes.append(difference(no_mask, layer, before))
        print(f"{layer:>5}" + "".join(f"{change:>15.2f}" for change in changes))
    print()


def run(model: Model, token_ids: list[int], is_causal: bool) -> list[Tensor]:
    """Return K and V of each layer: [2, num_tokens, num_kv_heads, head_dim]."""
    kept = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(torch.stack((k, v)))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, num_tokens, head_dim]
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)[0].transpose(0, 1)

    model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return kept


def difference(runs: list[list[Tensor]], layer: int, positions: slice) -> float:
    one, other = (kept[layer][:, positions] for kept in runs)
    return float((one - other).abs().max())


ENGINES = {
    "recompute": lambda: recompute.Engine(TINY_QWEN3),
    "KV cache": lambda: cached.Engine(TINY_QWEN3, max_model_len=256),
}


def answer(name: str, make_engine: Callable[[], Any], token_ids: list[int]) -> list[int]:
    engine = make_engine()
    engine.model = CountingModel(TINY_QWEN3)
    output_ids = engine.generate([token_ids], MAX_TOKENS)[0]
    model = engine.model
    print(f"{name:<10} {engine.num_steps} steps, {model.num_computed_tokens:>5} tokens computed", end=", ")
    print(f"{model.num_scores:>6} scores of a head in each layer")
    return output_ids


if __name__ == "__main__":
    main()
