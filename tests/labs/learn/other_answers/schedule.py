from dataclasses import dataclass


@dataclass(eq=False)
class Sequence:
    name: str
    num_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0

    def work(self):
        return self.num_tokens - self.num_computed_tokens


class Scheduler:
    def __init__(self, budget):
        self.budget = budget
        self.waiting = []
        self.running = []

    def schedule(self):
        chunks = {}
        while sum(chunks.values()) < self.budget:
            seq = next((seq for seq in self.running if seq not in chunks), None)
            if seq is None and self.waiting:
                seq = self.waiting.pop(0)
                self.running.append(seq)
            if seq is None:
                break
            chunks[seq] = min(seq.work(), self.budget - sum(chunks.values()))
        return list(chunks.items())

    def update(self, chunks):
        for seq, num in chunks:
            seq.num_computed_tokens += num
            if seq.work() == 0:
                seq.num_tokens += 1
                seq.max_tokens -= 1
            if seq.max_tokens == 0:
                self.running.remove(seq)
