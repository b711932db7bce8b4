from labs.on_demand import BlockManager


class Blocks(BlockManager):
    def try_admit(self, seq):
        taken = []
        for _ in range(0, len(seq.token_ids), self.block_size):
            if not self.free:
                self.free.extend(reversed(taken))  # as before
                return False
            taken.append(self.free.pop())
        seq.block_table, seq.num_computed_tokens = taken, 0
        return True
