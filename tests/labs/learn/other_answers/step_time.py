from dataclasses import dataclass


@dataclass
class Model:
    num_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int


@dataclass
class Machine:
    bytes_per_s: int
    flops_per_s: int


def per_token(model, heads):
    return 2.0 * model.num_layers * heads * model.head_dim


def count_bytes(model, seq_lens):
    weights = model.num_weights * model.bytes_per_value
    return weights + model.bytes_per_value * per_token(model, model.num_kv_heads) * sum(seq_lens)


def count_flops(model, seq_lens):
    return sum(2 * model.num_weights + 2 * per_token(model, model.num_heads) * n for n in seq_lens)


def least_seconds(model, machine, seq_lens):
    memory = count_bytes(model, seq_lens) / machine.bytes_per_s
    arithmetic = count_flops(model, seq_lens) / machine.flops_per_s
    if memory > arithmetic:
        return memory
    return arithmetic
