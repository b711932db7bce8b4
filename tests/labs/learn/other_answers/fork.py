from labs.one_file import BlockManager


class Blocks(BlockManager):
    def fork(self, parent, child):
        child.block_table[:] = parent.block_table
        counts = zip(self.num_owners, range(self.num_blocks), strict=True)
        self.num_owners = [n + (block_id in child.block_table) for n, block_id in counts]
        child.num_computed_tokens += parent.num_computed_tokens
