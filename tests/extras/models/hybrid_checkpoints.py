"""Random small checkpoints of models with recurrent states, made with `transformers`, and its own continuations."""

import functools
import random

import torch
import transformers

LENS = (1, 7, 16, 33, 48, 61)  # of prompts: beside multiples of the block sizes
MAX_TOKENS = 9  # that follow
QWEN35 = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large, so that greedy outputs vary and margins are wide
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "every fourth layer attends": {"layer_types": None},
    "as many heads of keys": {"linear_num_key_heads": 4},
    "heads that are not whole vectors": {"linear_value_head_dim": 24},
    "wide convolution": {"linear_conv_kernel_dim": 6},
    "half of the head is rotated": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
        }
    },
}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 48}  # fmt: skip
LFM2 = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 150,
    "block_multiple_of": 32,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "num_attention_heads": 2,  # of 32 channels
    "num_key_value_heads": 1,
    "conv_L_cache": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LFM2_VARIANTS = {
    "plain": {},
    "output layer": {"tie_word_embeddings": False},
    "biases": {"conv_bias": True},
    "layers by number": {"layer_types": None, "full_attn_idxs": [0, 3]},
    "narrow convolution": {"conv_L_cache": 2},
    "wide convolution": {"conv_L_cache": 9},
    "size as it is": {"block_auto_adjust_ff_dim": False},
    "larger size": {"block_ffn_dim_multiplier": 1.7, "block_multiple_of": 10},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
FIELDS = {"Qwen3_5": QWEN35, "Qwen3_5Moe": {**QWEN35, **EXPERTS}, "Lfm2": LFM2}


def make_config(kind="Qwen3_5", **fields):
    config_class = getattr(transformers, f"{kind}Config" if kind == "Lfm2" else f"{kind}TextConfig")
    return config_class(**{**FIELDS[kind], **fields}, bos_token_id=None, eos_token_id=None)


def set_weights_that_matter(model):
    """Give an effect to weights that `transformers` starts without any, and let states remember for many tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.data += 0.3 * torch.randn_like(parameter)
        if name.endswith("A_log"):  # decays between 0.6 and almost 1
            parameter.data = torch.empty_like(parameter).uniform_(0.002, 0.4).log()


class HybridCheckpoints:
    """Each variant is made once, as are the continuations that `transformers` computes without a cache.

    `kind` names the classes of `transformers`: a key of `FIELDS`.
    """

    def __init__(self, root, kind="Qwen3_5"):
        self._root, self._kind = root, kind
        self.variants = LFM2_VARIANTS if kind == "Lfm2" else VARIANTS

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def make(self, variant="plain"):
        """(folder, transformers model in float32)"""
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{self._kind}ForCausalLM")
        model = model_class(make_config(self._kind, **self.variants[variant])).eval()
        set_weights_that_matter(model)
        folder = self._root / f"{self._kind}-{len(list(self._root.iterdir()))}"
        model.save_pretrained(folder)
        return folder, model

    def prompts(self):
        """Random tokens; the last two prompts begin with the same 40."""
        rng = random.Random(0)
        prompts = [[rng.randrange(FIELDS[self._kind]["vocab_size"]) for _ in range(n)] for n in LENS]
        prompts[-1][:40] = prompts[-2][:40]
        return prompts

    @functools.cache  # noqa: B019
    def greedy(self, variant="plain"):
        """For each prompt: its continuation, and the log-probability of each of its tokens."""
        _, model = self.make(variant)
        return continue_all(model, self.prompts())


def continue_all(model, prompts, max_tokens=MAX_TOKENS):
    """Return for each prompt `max_tokens` tokens and their log-probabilities; each token recomputes all before it.

    Rows are padded behind their ends, where no token looks: a forward pass of all takes little more than that of one.
    """
    lens = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lens.max()) + max_tokens, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, logprobs = torch.arange(len(prompts)), []
    for i in range(max_tokens):
        with torch.no_grad():
            logits = model(ids[:, : int(lens.max()) + i], use_cache=False).logits[rows, lens + i - 1]
        scores, ids[rows, lens + i] = logits.log_softmax(-1).max(-1)
        logprobs.append(scores.tolist())
    tokens = [row[n : n + max_tokens].tolist() for row, n in zip(ids, lens.tolist(), strict=True)]
    return list(zip(tokens, map(list, zip(*logprobs, strict=True)), strict=True))


def continue_greedily(model, prompt, max_tokens=MAX_TOKENS):
    return continue_all(model, [prompt], max_tokens)[0]


def logprobs_of(model, prompt, output):
    """Return the log-probability that `transformers` gives to each token of `output` after `prompt`."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        rows = model(ids, use_cache=False).logits[0].log_softmax(-1)  # [len, vocab_size]
    return rows[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
