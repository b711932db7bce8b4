"""Shared fixtures: random small Qwen3 checkpoints, made with `transformers`, which is the oracle too."""

import functools
import os

import pytest
import torch
import transformers

# On models this small a second thread only waits for the first.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

# The kernels' tests need a GPU or Triton's interpreter; test_triton_attention.py runs them in the latter.
collect_ignore = []
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("test_triton_kernels.py")


class TinyCheckpoints:
    """Random Qwen3 checkpoints on disk, one for each shape, with the `transformers` model that wrote it."""

    def __init__(self, root):
        self._root = root

    @functools.cache  # noqa: B019 (lives as long as the test session)
    def make(self, seed=0, **shape):
        """(folder, transformers model in float32); `shape` overrides fields of Qwen3Config."""
        defaults = {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,  # large, so that greedy outputs vary and margins are wide
        }
        config = transformers.Qwen3Config(**{**defaults, **shape}, bos_token_id=None, eos_token_id=None)
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config).eval()
        folder = self._root / f"qwen3-{len(list(self._root.iterdir()))}"
        model.save_pretrained(folder)
        return folder, model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoints):
    """(folder, transformers model) of the default shape: two layers, 4 heads over 2 kv heads of 32."""
    return checkpoints.make()


def hf_greedy(model, prompt_token_ids, max_tokens):
    """Greedy completion of one prompt by `transformers`: a list of token ids."""
    input_ids = torch.tensor([prompt_token_ids])
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt_token_ids) :].tolist()
