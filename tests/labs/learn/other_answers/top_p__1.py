"""Loops over Python lists."""


def apply_top_p(probs, p):
    values = probs.tolist()
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    kept, total = {}, 0.0
    for token in order:
        kept[token] = values[token]
        total += values[token]
        if total >= p:
            break
    return [kept.get(token, 0.0) / total for token in range(len(values))]
