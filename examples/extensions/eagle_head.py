"""Speculative decoding by a head on the model's own features, and drafts that cannot change an output.

EAGLE (Li et al. 2024, https://arxiv.org/abs/2401.15077) predicts the next *feature*, the hidden state that the model's
output layer reads, from the newest feature f and the embedding e of the token that was sampled from it. It goes on from
its own predictions:

    known      f5 is the feature of token 5, and token 6 was sampled from it
    drafts     [f5, e(t6)] -> f6' -> d7,   [f6', e(d7)] -> f7' -> d8,   …          d: the most likely token of f'

This head is one matrix. It has random weights, so that hardly any draft is right: the outputs are the same anyway,
which is the point. Give `EagleHead.linear` trained weights to gain time. EAGLE's own head is a decoder layer, with a KV
cache, and proposes trees. The features are kept by slot, like K and V: hidden_size numbers for each token of the pool.

The engine of nanovllm_extras is needed, and one process.

    nanovllm serve MODEL --extension examples/extensions/eagle_head.py
    LLM(model, extension="examples/extensions/eagle_head.py", speculative_config={"num_speculative_tokens": 3})
"""

import torch
from torch import Tensor


class EagleHead:
    """A `Proposer` of drafts and a `Follower` of the model: it keeps the features of each step."""

    def __init__(self, runner) -> None:
        self.runner, self.block_size = runner, runner.backend.block_size
        size, like = runner.shape.hidden_size, {"dtype": runner.dtype, "device": runner.device}
        num_slots = (runner.kv_cache.num_blocks + 1) * self.block_size
        self.features = torch.zeros(num_slots, size, **like)
        self.linear = torch.nn.Linear(2 * size, size, bias=False, **like)  # of [feature, embedding]

    def follow(self, batch, computed, newest_ids) -> None:
        """Keep the features of a step's tokens, each in the slot of its K and V."""
        slots = computed.batch.metadata.slot_mapping.to(self.features.device)  # [num_tokens]
        self.features[slots] = computed.hidden[: len(slots)]

    @torch.inference_mode()
    def propose(self, wanted):
        """Return drafts for each (sequence, most drafts): tokens that may follow its known ones."""
        device = self.features.device
        # the newest token is known, but not computed, so the newest feature is that of the token before
        slots = torch.tensor([self.slot_of(seq, len(seq.token_ids) - 2) for seq, _ in wanted], device=device)
        tokens = torch.tensor([seq.token_ids[-1] for seq, _ in wanted], dtype=torch.int32, device=device)
        features, drafts = self.features[slots], []  # [num_seqs, hidden_size]
        with self.runner.step_context():
            for _ in range(max(count for _, count in wanted)):
                features = self.predict(features, tokens)
                tokens = self.runner.compute_logits(features).argmax(-1).int()  # [num_seqs]
                drafts.append(tokens)
        columns = torch.stack(drafts, dim=1).tolist()  # [num_seqs][most drafts]
        return [row[:count] for row, (_, count) in zip(columns, wanted, strict=True)]

    def predict(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return the features of `tokens`: [num_seqs, hidden_size]

        features: those of the tokens before, of the same shape; tokens: [num_seqs]
        """
        embeddings = self.runner.model.model.embed_tokens(tokens)  # [num_seqs, hidden_size]
        return self.linear(torch.cat((features, embeddings), dim=-1))

    def slot_of(self, seq, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size


proposer_cls = EagleHead
