"""Lets the block managers do the work: admission of a sequence that looks like the whole one."""

from labs.one_file import Sequence


class HandOver:
    def __init__(self, prefill, decode):
        self.prefill = prefill
        self.decode = decode
        self.running = []
        self.twins = {}

    def try_send(self, seq):
        whole = Sequence([-1] * (seq.num_prompt_tokens + seq.max_tokens), 1, 1)
        if not self.decode.try_admit(whole):
            return None
        self.twins[id(seq)] = whole.block_table
        return list(zip(seq.block_table, whole.block_table, strict=False))

    def arrive(self, seq):
        table = self.twins.pop(id(seq))
        self.prefill.release(seq)
        seq.block_table = table
        self.running.append(seq)
