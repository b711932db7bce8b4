def step_us(num_tokens, fixed_us, token_us):
    return fixed_us + num_tokens * token_us


def choose_budget(target_us, fixed_us, token_us, num_decodes):
    budget = num_decodes
    while step_us(budget + 1, fixed_us, token_us) <= target_us:
        budget += 1
    if budget == num_decodes:
        return None
    return budget


def make_chunks(prompt_len, budget, num_decodes):
    while prompt_len:
        chunk = min(prompt_len, budget - num_decodes)
        prompt_len -= chunk
        yield chunk


def count_steps(prompt_len, budget, num_decodes):
    return len(list(make_chunks(prompt_len, budget, num_decodes)))


def compute_ttft(prompt_len, budget, num_decodes, fixed_us, token_us):
    chunks = make_chunks(prompt_len, budget, num_decodes)
    return sum(step_us(chunk + num_decodes, fixed_us, token_us) for chunk in chunks)
