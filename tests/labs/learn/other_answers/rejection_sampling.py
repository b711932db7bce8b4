"""Recursion, and the random number is scaled instead of the rest."""


def draw(probs, u):
    total = 0
    for token, prob in enumerate(probs):
        total += prob
        if total > u:
            return token
    raise ValueError(u)


def accept(drafts, draft_probs, model_probs, uniforms):
    p, u = model_probs[0], uniforms[0]
    if not drafts:
        return [draw(p, u)]
    x, q = drafts[0], draft_probs[0]
    if p[x] > u * q[x]:
        return [x] + accept(drafts[1:], draft_probs[1:], model_probs[1:], uniforms[1:])
    rest = [a - b if a > b else 0 for a, b in zip(p, q, strict=True)]
    return [draw(rest, uniforms[1] * sum(rest))]
