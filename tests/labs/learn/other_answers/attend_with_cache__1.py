import math


def attend(q, k, v, k_cache, v_cache, start):
    out = q.clone()
    for i in range(len(q)):
        position = start + i
        k_cache[position], v_cache[position] = k[i], v[i]
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = [float(q[i, head] @ k_cache[j, kv_head]) / math.sqrt(q.shape[2]) for j in range(position + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            values = [weight * v_cache[j, kv_head] for j, weight in enumerate(weights)]
            out[i, head] = sum(values) / sum(weights)
    return out
