"""A step has failed: take back all steps in flight, so that their sequences wait again and lose no token.

A step can fail in a forward pass, while its batch is built, or half-way through `schedule()` or `update()`. Kernels of
the failed steps may still run, but the device does everything in the order of the launches, so the blocks that these
kernels write to are free at once. Called by `LLMEngine.step()`. An interrupt between two lines that change the same
sequence may still leave an inconsistent state; `LLMEngine.recover` makes a new scheduler when no request is left.
"""

from nanovllm.scheduling.scheduler import Scheduler


def roll_back(scheduler: Scheduler) -> None:
    """Undo the steps in flight. Their tokens will be drawn again, from the same random numbers."""
    steps, scheduler.in_flight = scheduler.in_flight, []
    scheduler.preemption.take_moves()  # block copies that the half-made step has asked for
    for step in steps:
        for block_id in step.new_blocks:  # first, so that `free` knows which blocks hold nothing
            scheduler.block_manager.prefix_cache.forget(block_id)
        computed = [seq for seq, _, _ in step.chunks]
        for seq in [*computed, *step.samples, *step.admitted]:
            if seq in scheduler.running:
                scheduler.running.remove(seq)
                seq.num_computed_tokens = 0  # so that `free` registers no block that may not have been filled
                scheduler.release(seq)
                scheduler.waiting.add(seq)
        for seq in step.preempted:  # blocks that were to be copied to host memory may not have been
            scheduler.release(seq)
    scheduler.observer.on_roll_back()
