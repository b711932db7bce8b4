"""Qwen3 in float64, one token at a time, for tests of what a token attends to.

All keys are kept without their rotation. For each query, a test says which positions it reads, and at which places: the
oracle of caches that keep a part of the tokens, or give them other positions.
"""

import torch


def everything(naive, layer, head, position):
    """Read all tokens, each at its own place: the model as it was trained."""
    return range(position + 1), range(position + 1)


class NaiveQwen3:
    """Made from the `transformers` model. `probs[layer, head, position]` is what a query head attended with."""

    def __init__(self, model):
        self.config = model.config
        self.tensors = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.theta = self.config.rope_parameters["rope_theta"]

    @torch.inference_mode()
    def generate(self, prompt, max_tokens, read=everything):
        """Return the greedy completion. read(self, layer, kv head, position) -> positions to read, and their places."""
        layers = range(self.config.num_hidden_layers)
        self.probs, self.keys, self.values = {}, [[] for _ in layers], [[] for _ in layers]
        tokens = list(prompt)
        for position in range(len(prompt) + max_tokens - 1):
            logits = self.forward(tokens[position], position, read)
            if position >= len(prompt) - 1:
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    def forward(self, token, position, read):
        x = self.tensors["model.embed_tokens.weight"][token]
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            x = x + self.attend(self.norm(x, f"{name}.input_layernorm"), layer, position, read)
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = self.linear(y, f"{name}.mlp.gate_proj"), self.linear(y, f"{name}.mlp.up_proj")
            x = x + self.linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")
        return self.linear(self.norm(x, "model.norm"), "lm_head")

    def attend(self, x, layer, position, read):
        name, config = f"model.layers.{layer}.self_attn", self.config
        q, k, v = (self.linear(x, f"{name}.{kind}_proj").view(-1, config.head_dim) for kind in "qkv")
        self.keys[layer].append(self.norm(k, f"{name}.k_norm"))  # [num_kv_heads, head_dim]
        self.values[layer].append(v)
        q, out = self.norm(q, f"{name}.q_norm"), []
        for head in range(config.num_attention_heads):
            kv_head = head * config.num_key_value_heads // config.num_attention_heads
            kept, places = read(self, layer, kv_head, position)
            keys = self.rotate(torch.stack([self.keys[layer][i][kv_head] for i in kept]), places)
            probs = (keys @ self.rotate(q[head, None], places[-1:])[0] / config.head_dim**0.5).softmax(-1)
            self.probs[layer, head, position] = probs
            out.append(probs @ torch.stack([self.values[layer][i][kv_head] for i in kept]))
        return self.linear(torch.cat(out), f"{name}.o_proj")

    def linear(self, x, name):
        return self.tensors[f"{name}.weight"] @ x

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.tensors[f"{name}.weight"]

    def rotate(self, x, places):
        """x: [n, head_dim], rotated by the angles of n places"""
        half = x.shape[1] // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.tensor([*places], dtype=torch.float64)[:, None] * frequencies  # [n, head_dim / 2]
        first, second = x.chunk(2, dim=1)
        rotated = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(rotated, dim=1)
