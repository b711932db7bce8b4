from labs.one_file import BlockManager


class Blocks(BlockManager):
    def fork(self, parent, child):
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_table = []
        for i in range(len(parent.block_table)):
            child.block_table.append(parent.block_table[i])
            self.num_owners[child.block_table[i]] += 1
