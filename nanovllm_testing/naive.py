"""An engine that computes all tokens of a request again for each new token: the oracle for tokens.

It serves one request at a time in float32, and has no cache, no blocks, no scheduler and no batch. It shares only the
network and its weights with the engine, and the function that samples from a row of logits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.loader import allocate, load_weights, read_json
from nanovllm.plugins import find_architecture
from nanovllm.sampler import sample_tokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm_testing.steps import batch_of, sampling_of

NEAR = 1e-3
"""Logits of float32 that differ by less than this may change places if they are computed in another order."""


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v.

    q: [1, num_heads, n, head_dim]; k, v: [1, num_kv_heads, n, head_dim] -> as q
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [1, num_heads, n, n]
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.matmul(weights, v)


class WholeSequenceAttention(TorchAttention):
    """Attention among the tokens of one call, which are all tokens of one sequence. Nothing is kept."""

    def store_kv(self, k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        self.k, self.v = k, v  # of this layer, for the call of `attend` that follows

    def attend(
        self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh: Any = attend_plainly
    ) -> Tensor:
        n = len(q)
        is_seen = torch.ones(n, n, dtype=torch.bool).tril()[None, None]  # [1, 1, n, n]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, self.k, self.v))  # [1, heads, n, head_dim]
        out: Tensor = weigh(q, k, v, is_seen)
        return out[0].transpose(0, 1)


class NaiveModel:
    """The network of a folder, in float32 on CPU. `models` are networks of one's own, as the engine's option."""

    def __init__(self, folder: str | Path, models: Mapping[str, Any] | None = None) -> None:
        raw = read_json(Path(folder) / "config.json")
        model_class = find_architecture(raw, models)
        self.shape = shape = model_class.read_config(raw)
        backend = WholeSequenceAttention(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        if reason := shape.why_not(WholeSequenceAttention, torch.device("cpu"), torch.float32):
            raise ValueError(f"the naive engine cannot compute this model: {reason}")
        with torch.device("meta"):
            model = model_class(shape, backend)
        self.model = allocate(model, torch.float32, torch.device("cpu"))
        getattr(model_class, "load_weights", load_weights)(self.model, Path(folder))
        self.no_cache = torch.zeros(backend.kv_cache_shape(shape.num_hidden_layers, 1))

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits of the token after `token_ids`: [vocab_size]"""
        seq = Sequence("", token_ids, SamplingParams())
        seq.block_table.append(0)
        batch = batch_of([(seq, 0, len(token_ids))], len(token_ids))
        hidden = self.model(batch.input_ids, batch.positions, batch.metadata, self.no_cache)  # [num_tokens, hidden]
        logits: Tensor = self.model.compute_logits(hidden[-1:])[0]
        return logits

    def sample(self, seq: Sequence) -> int:
        """Return the next token of `seq`. Its parameters and its seed decide it."""
        batch = sampling_of([seq])
        return int(sample_tokens(self.logits(seq.token_ids.tolist())[None], **vars(batch)))

    def generate(self, seq: Sequence, max_model_len: int) -> list[int]:
        """Return the output of a sequence that has only its prompt."""
        params = seq.sampling_params
        for _ in range(params.max_tokens or max_model_len):
            token = self.sample(seq)
            seq.append_token(token)
            if token in seq.stop_token_ids or seq.num_tokens == max_model_len:
                break
        return seq.token_ids.tolist()[seq.num_prompt_tokens :]

    def is_near_tie(self, seq: Sequence, found: int) -> bool:
        """Return whether rounding may decide between the next token of `seq` and the token `found`.

        The sequence has all tokens before this one.
        """
        logits = self.logits(seq.token_ids.tolist())
        temperature = seq.sampling_params.temperature
        if temperature == 0:
            return bool(logits.max() - logits[found] < NEAR)
        ends = (logits.double() / temperature).softmax(-1).cumsum(-1)  # the token's interval ends here
        uniforms = sampling_of([seq]).uniforms
        assert uniforms is not None
        first = ends[found - 1] if found else 0.0
        return bool(first - NEAR < uniforms[0] < ends[found] + NEAR)
