import math


def attend(q, k_cache, v_cache, block_table, seq_len):
    block_size, states = k_cache.shape[1], []
    largest, total, out = None, 0.0, [0.0] * len(q)
    for position in range(seq_len):
        block_id, offset = block_table[position // block_size], position % block_size
        score = sum(float(a) * float(b) for a, b in zip(q, k_cache[block_id, offset], strict=True))
        if largest is None or score > largest:
            factor = 0.0 if largest is None else math.pow(2, largest - score)
            total, out, largest = total * factor, [x * factor for x in out], score
        weight = math.pow(2, score - largest)
        total += weight
        out = [x + weight * float(y) for x, y in zip(out, v_cache[block_id, offset], strict=True)]
        if offset == block_size - 1 or position == seq_len - 1:
            states.append((largest, total, list(out)))
    return [x / total for x in out], states
