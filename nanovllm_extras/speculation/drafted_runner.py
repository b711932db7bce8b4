"""The runner of a model that has a draft model: the two share the memory for the KV cache.

The draft model is loaded when the KV cache has been allocated, and needs as many blocks of its own. So before that:

    number of blocks = (free memory - the draft model's weights and graphs) / (bytes of a block in both models)
"""

from dataclasses import replace

import torch

from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.speculation.draft_model import find_draft_model
from nanovllm_extras.speculation.speculation_options import read_options


class DraftedRunner(ModelRunner):
    """Leaves memory for the draft model of `speculative_config`."""

    draft: "UnloadedDraft"

    def num_blocks_that_fit(self) -> int:
        if self.config.num_kv_blocks is None:
            assert self.config.speculative_config is not None
            options = read_options(self.config.speculative_config)
            self.draft = UnloadedDraft(*find_draft_model(self, options, num_kv_blocks=1))
        return super().num_blocks_that_fit()

    @property
    def bytes_per_block(self) -> int:
        return super().bytes_per_block + self.draft.bytes_per_block

    def bytes_to_leave(self, num_graph_bytes: int) -> int:
        """Return the size of the draft model's weights, and of its graphs, which need less than the large model's.

        Its forward pass needs no more: it runs after that of the large model, which takes more memory.
        """
        return self.draft.weight_bytes + num_graph_bytes


class UnloadedDraft(ModelRunner):
    """What a draft model will need: `weight_bytes`, not quantised, and `bytes_per_block`. It loads nothing."""

    def start(self) -> None:
        self.shape = replace(self.shape, max_position_embeddings=self.max_model_len)
        self.backend = self.make_backend()
        with torch.device("meta"):
            model = self.model_class(self.shape, self.backend)
        self.weight_bytes = sum([weight.numel() for weight in model.parameters()]) * self.dtype.itemsize
        self.kv_cache = self.make_kv_cache()
