def stream(next_token, prompt, end_tokens):
    tokens = tuple(prompt)
    token = None
    while token not in end_tokens:
        token = next_token(list(tokens))
        tokens += (token,)
        yield token


def generate(next_token, prompt, end_tokens, max_tokens):
    output = []
    for token in stream(next_token, prompt, end_tokens):
        output.append(token)
        if len(output) == max_tokens:
            break
    return output
