from collections import deque


class Sequence:
    def __init__(self, name, num_tokens, max_tokens):
        self.name = name
        self.num_tokens = num_tokens
        self.limit = num_tokens + max_tokens
        self.num_computed_tokens = 0


class Scheduler:
    def __init__(self, budget):
        self.budget = budget
        self.waiting = deque()
        self.running = []

    def schedule(self):
        left = self.budget
        chunks = []
        candidates = [*self.running, *self.waiting]
        for seq in candidates:
            num = min(seq.num_tokens - seq.num_computed_tokens, left)
            if num:
                chunks.append([seq, num])
                left -= num
                if seq in self.waiting:
                    self.waiting.remove(seq)
                    self.running.append(seq)
        return chunks

    def update(self, chunks):
        for seq, num in chunks:
            seq.num_computed_tokens += num
        for seq, _ in chunks:
            seq.num_tokens += seq.num_computed_tokens == seq.num_tokens
        self.running = [seq for seq in self.running if seq.num_tokens < seq.limit]
