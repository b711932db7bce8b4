from collections import namedtuple

Model = namedtuple("Model", "num_weights num_layers num_heads num_kv_heads head_dim bytes_per_value")
Machine = namedtuple("Machine", "bytes_per_s flops_per_s")


def count_bytes(model, seq_lens):
    total = model.num_weights * model.bytes_per_value
    for n in seq_lens:
        for _ in range(model.num_layers):
            keys = n * model.num_kv_heads * model.head_dim * model.bytes_per_value
            total += 2 * keys
    return total


def count_flops(model, seq_lens):
    total = 0
    for n in seq_lens:
        total += 2 * model.num_weights
        total += model.num_layers * model.num_heads * (2 * model.head_dim * n + 2 * model.head_dim * n)
    return total


def least_seconds(model, machine, seq_lens):
    return sorted([count_bytes(model, seq_lens) / machine[0], count_flops(model, seq_lens) / machine[1]])[1]
