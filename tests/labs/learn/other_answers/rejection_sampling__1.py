"""Counts the accepted drafts first, then draws once."""


def draw(probs, u):
    total = 0
    for token, prob in enumerate(probs):
        total += prob
        if total > u:
            return token
    raise ValueError(u)


def accept(drafts, draft_probs, model_probs, uniforms):
    num_accepted = 0
    for i, x in enumerate(drafts):
        if uniforms[i] >= min(1, model_probs[i][x] / draft_probs[i][x]):
            break
        num_accepted += 1
    probs = list(model_probs[num_accepted])
    u = uniforms[num_accepted]
    if num_accepted < len(drafts):
        probs = [p - min(p, q) for p, q in zip(probs, draft_probs[num_accepted], strict=True)]
        u = uniforms[num_accepted + 1]
    return [*drafts[:num_accepted], draw([one / sum(probs) for one in probs], u)]
