"""Several ranks for models with states: each rank has its heads of every state, in the same slot as the other ranks.

    state of a sequence        rank 0                rank 1
    recurrent, 4 heads         heads 0, 1            heads 2, 3
    convolution                channels of q, k and v of these heads

Rank 0 decides which sequence owns which slot, and sends the slots and the copies of states with each batch
(`parallel/messages.py`). `StateShape.share_of` divides the shape of a state, and `parallel/cut.py` the weights.
"""

from pathlib import Path

from nanovllm_extras.all_options import Config
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.parallel.start_ranks import RankRunner, start_ranks
from nanovllm_extras.states.state_runner import StateRunner


class StateRankRunner(RankRunner, StateRunner):
    """The runner of one rank, with its share of the network and of the states.

    All ranks have the same number of slots: the memory that it depends on is the least of all ranks, and a slot has the
    same size on all of them.
    """


def start_state_ranks(config: Config, folder: Path) -> ModelRunner:
    """Start all ranks, and return the runner of rank 0. Raises ValueError, before a process starts, if it cannot."""
    return start_ranks(config, folder, StateRankRunner)
