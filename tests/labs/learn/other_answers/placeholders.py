"""Tensors fill the placeholders, and the known tokens are kept beside the sequences."""

import torch

END = 4


class Overlap:
    def __init__(self, seqs, block_size, register):
        self.running = list(seqs)
        self.block_size = block_size
        self.register = register
        self.known = {id(seq): list(seq.token_ids) for seq in seqs}
        self.most = {id(seq): seq.num_prompt_tokens + seq.max_tokens for seq in seqs}

    def launch(self):
        step = []
        for seq in self.running:
            if seq.num_computed_tokens < self.most[id(seq)] - 1:
                step.append((seq, seq.num_computed_tokens))
                seq.num_computed_tokens += 1
                seq.token_ids += [-len(step)]
        return step

    def arrive(self, step, new_tokens):
        ended = []
        for (seq, _), token in zip(step, new_tokens, strict=True):
            known = self.known[id(seq)]
            if seq.is_finished:
                continue
            known.append(token)
            seq.token_ids[: len(known)] = known
            if len(known) > 1 and (len(known) - 1) % self.block_size == 0:
                self.register(seq, (len(known) - 1) // self.block_size - 1)
            if token == END or len(known) == self.most[id(seq)]:
                ended.append(seq)
                seq.token_ids, seq.is_finished = known, True
        for seq in ended:
            self.running.remove(seq)


def fill(input_ids, newest):
    ids = torch.tensor(input_ids, dtype=torch.int64)
    if not newest:
        return ids.tolist()
    rows = (-1 - ids).clamp(min=0)
    return torch.where(ids < 0, torch.tensor(newest)[rows.clamp(max=len(newest) - 1)], ids).tolist()
