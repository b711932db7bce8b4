import torch


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    return m, *(x * torch.exp2(a[0] - m) + y * torch.exp2(b[0] - m) for x, y in zip(a[1:], b[1:], strict=True))


def attend(q, k_cache, v_cache, block_table, seq_len):
    state, states = None, []
    num_blocks = (seq_len + k_cache.shape[1] - 1) // k_cache.shape[1]
    for i, block_id in enumerate(block_table[:num_blocks]):
        is_used = torch.arange(k_cache.shape[1]) + i * k_cache.shape[1] < seq_len
        scores = (k_cache[block_id] * q).sum(1).masked_fill(~is_used, -torch.inf)
        v = v_cache[block_id].masked_fill(~is_used[:, None], 0)
        weights = torch.exp2(scores - scores.max())
        part = scores.max(), weights.sum(), (weights[:, None] * v).sum(0)
        state = part if state is None else merge(state, part)
        states.append(state)
    return state[2] / state[1], states
