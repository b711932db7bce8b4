"""Events of blocks in groups of layers with a window. The core's events are about group 0, which sees all tokens.

`GroupedBlockManager` calls these methods if its observer is a `GroupObserver`: a recording, `prefix_misses.py`, or an
observer of the user's.
"""

from nanovllm.observer import Observer as CoreObserver
from nanovllm_extras.full_observer import Observer
from nanovllm_extras.full_sequence import Sequence


class GroupObserver(Observer):
    """An observer that is also notified of the blocks of groups 1 …

    A sequence has a block table for each of these groups. Entries that no event names are null blocks.
    """

    def on_take_in_group(self, seq: Sequence, group: int, place: int, block_id: int, is_evicted: bool) -> None:
        """As `on_take_block`. The block becomes entry `place` of the group's block table."""

    def on_share_in_group(self, seq: Sequence, group: int, place: int, block_id: int) -> None:
        """As `on_share_block`. The block becomes entry `place` of the group's block table."""

    def on_copy_in_group(self, seq: Sequence, group: int, source: int, destination: int) -> None:
        """As `on_copy_block`. `destination`, which was taken behind the table's end, replaces `source`."""

    def on_register_in_group(self, seq: Sequence, group: int, block_id: int, block_hash: int, serial: int) -> None:
        """A prefix hit can now use `block_id`. Group 0 has a block with the same tokens, hash and serial number."""

    def on_forget_in_group(self, block_id: int) -> None:
        """`block_id` is no longer in the prefix cache."""


def observe_groups(observer: CoreObserver) -> GroupObserver:
    """Return `observer` if it is notified of groups, otherwise one that does nothing."""
    return observer if isinstance(observer, GroupObserver) else GroupObserver()
