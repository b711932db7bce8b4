from dataclasses import dataclass


@dataclass(eq=False)
class Sequence:
    name: str
    num_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0


class Scheduler:
    def __init__(self, budget, chunk_limit):
        self.budget, self.chunk_limit = budget, chunk_limit
        self.waiting, self.running = [], []

    def schedule(self):
        chunks = []
        for seq in self.running + self.waiting:
            work = seq.num_tokens - seq.num_computed_tokens
            num = min(self.chunk_limit, self.budget - sum(n for _, n in chunks))
            if num > 0:
                chunks.append((seq, num if num < work else work))
        scheduled = [seq for seq, _ in chunks]
        self.running += [seq for seq in self.waiting if seq in scheduled]
        self.waiting = [seq for seq in self.waiting if seq not in scheduled]
        return chunks

    def update(self, chunks):
        for seq, num in chunks:
            seq.num_computed_tokens += num
            if seq.num_computed_tokens == seq.num_tokens:
                seq.num_tokens, seq.max_tokens = seq.num_tokens + 1, seq.max_tokens - 1
        self.running = [seq for seq in self.running if seq.max_tokens]
