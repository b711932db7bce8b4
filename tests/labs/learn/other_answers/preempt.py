from labs.one_file import Scheduler


class Planner(Scheduler):
    """Decides by itself, in one method."""

    def schedule(self):
        budget, chunks, num_preempted = self.max_num_batched_tokens, [], 0
        for seq in tuple(self.running):
            while budget and seq in self.running and not self.block_manager.try_grow(seq):
                *self.running, victim = self.running
                victim.num_computed_tokens = 0
                self.block_manager.release(victim)
                self.waiting.extendleft([victim])
                num_preempted += 1
            if budget and seq in self.running:
                num = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
                chunks.append((seq, num))
                budget -= num
        self.num_preemptions += num_preempted
        while not num_preempted and budget and self.waiting:
            seq = self.waiting[0]
            if not self.block_manager.try_admit(seq):
                break
            del self.waiting[0]
            self.running += [seq]
            self.num_cached_tokens += seq.num_computed_tokens
            num = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
            chunks.append((seq, num))
            budget -= num
        return chunks
