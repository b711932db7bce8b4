"""Several ranks for groups of layers: each rank has its heads of all groups, in the same blocks as the other ranks.

    K and V of a sequence        rank 0                rank 1
    group 0, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 0
    group 1, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 1

Rank 0 decides which sequence owns which blocks, and sends the slots and block tables of all groups with each batch
(`parallel/messages.py`). Copies of blocks and swap are those of other models: a block serves one group at a time.

If K and V have two shapes, each number of heads is divided by itself, and ranks share heads of which there are too few.
All ranks then have blocks of the same layout, that of their share:

    Gemma 4 31B          16 heads of 256 with a window     4 heads of 512     a block: 10 layers, or 5 with a window
    each of 8 ranks       2 heads of 256                   1 head of 512      a block: 10 layers, or 10 with a window
"""

from pathlib import Path

from nanovllm_extras.all_options import Config
from nanovllm_extras.checkpoint import read_model_config
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.kv_groups.equal_blocks_runner import EqualBlocksRunner
from nanovllm_extras.kv_groups.group_runner import GroupRunner
from nanovllm_extras.kv_groups.grouped_runner import GroupedLayersRunner
from nanovllm_extras.kv_groups.layer_groups import has_groups
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.parallel.start_ranks import RankRunner, start_ranks


class GroupedRankRunner(RankRunner, GroupedLayersRunner):
    """The runner of one rank, with its share of the network and of the blocks of all groups.

    All ranks have the same number of blocks: they find it from the least memory of all ranks, and have the same groups.
    """


class EqualBlocksRankRunner(RankRunner, EqualBlocksRunner):
    """The same, if K and V have two shapes."""


class ShapesRankRunner(RankRunner, GroupRunner):
    """The runner of one rank with one block table, if K and V have several shapes."""


def start_grouped_ranks(config: Config, folder: Path) -> ModelRunner:
    """Start all ranks, and return the runner of rank 0. Raises ValueError, before a process starts, if it cannot."""
    return start_ranks(config, folder, GroupedRankRunner)


def start_shape_ranks(config: Config, folder: Path) -> ModelRunner:
    """Start all ranks as `start_grouped_ranks` does, for a model whose K and V have several shapes."""
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    return start_ranks(config, folder, kind_of_shapes(config, shape))


def kind_of_shapes(config: Config, shape: NetworkConfig) -> type[RankRunner]:
    """Return the class of the runners of all ranks, for a model whose K and V have several shapes."""
    return EqualBlocksRankRunner if has_groups(config, shape) else ShapesRankRunner
