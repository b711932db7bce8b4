def generate(next_token, prompt, end_tokens, max_tokens):
    output = []
    for _ in range(max_tokens):
        output.append(next_token([*prompt, *output]))
        if output[-1] in set(end_tokens):
            return output
    return output
