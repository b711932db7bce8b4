import torch
import torch.nn.functional as F


def attend(q, k, v, k_cache, v_cache, start):
    positions = torch.arange(start, start + len(q))
    k_cache[positions], v_cache[positions] = k, v
    end = int(positions[-1]) + 1
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, k_cache[:end], v_cache[:end]))
    mask = torch.ones(len(positions), end, dtype=torch.bool).tril(start)
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)[0].transpose(0, 1)
