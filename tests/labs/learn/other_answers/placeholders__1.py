"""Keeps the sequences that still get tokens, and looks for the first placeholder."""

END = 4


class Overlap:
    def __init__(self, seqs, block_size, register):
        self.running = list(seqs)
        self.block_size = block_size
        self.register = register

    def launch(self):
        chosen = [seq for seq in self.running if len(seq.token_ids) < seq.num_prompt_tokens + seq.max_tokens]
        step = [(seq, len(seq.token_ids) - 1) for seq in chosen]
        for seq in chosen:
            seq.token_ids.append(-1 - chosen.index(seq))
            seq.num_computed_tokens = len(seq.token_ids) - 1
        return step

    def arrive(self, step, new_tokens):
        for i in range(len(step)):
            seq, position = step[i]
            if seq not in self.running:
                continue
            first = next(j for j, token in enumerate(seq.token_ids) if token < 0)
            seq.token_ids = [*seq.token_ids[:first], new_tokens[i], *seq.token_ids[first + 1 :]]
            if first % self.block_size == 0:
                self.register(seq, first // self.block_size - 1)
            if new_tokens[i] == END or first + 1 == seq.num_prompt_tokens + seq.max_tokens:
                seq.token_ids = seq.token_ids[: first + 1]
                seq.is_finished = True
                self.running = [one for one in self.running if one is not seq]


def fill(input_ids, newest):
    filled = list(input_ids)
    for i, token in enumerate(filled):
        if token < 0:
            filled[i] = newest[abs(token) - 1]
    return filled
