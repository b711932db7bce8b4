from collections import deque


class Sequence:
    def __init__(self, name, num_tokens, max_tokens):
        self.name, self.num_tokens, self.num_computed_tokens = name, num_tokens, 0
        self.end = num_tokens + max_tokens


class Scheduler:
    def __init__(self, budget, chunk_limit):
        self.budget, self.limit = budget, chunk_limit
        self.running, self.waiting = [], deque()

    def schedule(self):
        chunks, left = [], self.budget
        while left and len(chunks) < len(self.running) + len(self.waiting):
            if len(chunks) == len(self.running):
                self.running.append(self.waiting.popleft())
            seq = self.running[len(chunks)]
            num = sorted([left, self.limit, seq.num_tokens - seq.num_computed_tokens])[0]
            chunks.append((seq, num))
            left -= num
        return chunks

    def update(self, chunks):
        for seq, num in chunks:
            seq.num_computed_tokens += num
            if seq.num_computed_tokens == seq.num_tokens:
                seq.num_tokens += 1
            if seq.num_tokens == seq.end:
                self.running.remove(seq)
