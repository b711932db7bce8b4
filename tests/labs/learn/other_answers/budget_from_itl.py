import math


def choose_budget(target_us, fixed_us, token_us, num_decodes):
    room = math.floor((target_us - fixed_us - num_decodes * token_us) / token_us)
    return room + num_decodes if room >= 1 else None


def count_steps(prompt_len, budget, num_decodes):
    return math.ceil(prompt_len / (budget - num_decodes))


def compute_ttft(prompt_len, budget, num_decodes, fixed_us, token_us):
    full, rest = divmod(prompt_len, budget - num_decodes)
    time = full * (fixed_us + budget * token_us)
    if rest:
        time += fixed_us + (rest + num_decodes) * token_us
    return time
