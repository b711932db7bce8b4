from labs.one_file import Scheduler


class Planner(Scheduler):
    def schedule(self):
        budget, chunks, before = self.max_num_batched_tokens, [], self.num_preemptions
        for seq in list(self.running):
            if not budget or seq not in self.running:
                break
            if self.make_room(seq):
                budget -= self.add_chunk(chunks, seq, budget)
        while budget and self.waiting and self.try_admit(self.waiting[0], self.num_preemptions - before):
            self.running.append(self.waiting.popleft())
            self.num_cached_tokens += self.running[-1].num_computed_tokens
            budget -= self.add_chunk(chunks, self.running[-1], budget)
        return chunks

    def add_chunk(self, chunks, seq, budget):
        chunks.append((seq, min(len(seq.token_ids) - seq.num_computed_tokens, budget)))
        return chunks[-1][1]

    def make_room(self, seq):
        if self.block_manager.try_grow(seq):
            return True
        self.preempt(self.running[-1])
        return seq in self.running and self.make_room(seq)

    def preempt(self, seq):
        self.num_preemptions = self.num_preemptions + 1
        self.running.remove(seq)
        seq.num_computed_tokens = 0
        self.waiting.insert(0, seq)
        self.block_manager.release(seq)

    def try_admit(self, seq, num_preempted):
        if num_preempted:
            return False
        return self.block_manager.try_admit(seq)
