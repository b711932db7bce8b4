import math


def merge(parts):
    state = None
    for output, s in parts:
        if s == -math.inf:
            continue
        if state is None:
            state = list(output), s
            continue
        old, t = state
        m = max(s, t)
        total = 2.0 ** (s - m) + 2.0 ** (t - m)
        share = 2.0 ** (s - m) / total
        state = [a * (1 - share) + b * share for a, b in zip(old, output, strict=True)], m + math.log(total, 2)
    return state
