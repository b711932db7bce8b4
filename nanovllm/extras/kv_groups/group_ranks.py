"""Several ranks for groups of layers: each rank has its heads of all groups, in the same blocks as the other ranks.

    K and V of a sequence        rank 0                rank 1
    group 0, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 0
    group 1, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 1

Rank 0 decides which sequence owns which blocks, and sends the slots and block tables of all groups with each batch
(`parallel/messages.py`). Copies of blocks and swap are those of other models: a block serves one group at a time.
"""

from pathlib import Path

from nanovllm.extras.all_options import Config
from nanovllm.extras.full_runner import ModelRunner
from nanovllm.extras.kv_groups.grouped_runner import GroupedLayersRunner
from nanovllm.extras.parallel.start_ranks import RankRunner, start_ranks


class GroupedRankRunner(RankRunner, GroupedLayersRunner):
    """The runner of one rank, with its share of the network and of the blocks of all groups.

    All ranks have the same number of blocks: they find it from the least memory of all ranks, and have the same groups.
    """


def start_grouped_ranks(config: Config, folder: Path) -> ModelRunner:
    """Start all ranks, and return the runner of rank 0. Raises ValueError, before a process starts, if it cannot."""
    return start_ranks(config, folder, GroupedRankRunner)
