"""A runner that is as late as a device can be, for tests of overlap on CPU."""

import contextlib


class LateRunner:
    """Replaces `engine.runner.run`: a step is computed when its tokens are awaited, and not before.

    So nobody can know a token earlier, and what a launched step was given must not change meanwhile. As on a device,
    steps are computed in the order in which they were launched, also those whose tokens are never read.
    """

    def __init__(self, engine):
        self._engine, self._run = engine, engine.runner.run
        engine.runner.run = self.run
        self._queue = []
        self.events = []  # ("launch" or "wait", number of the step)
        self.num_steps = 0
        self.num_ahead = 0  # steps that were launched while another was in flight
        self.num_expected_ids = 0  # input ids that nobody knew at launch

    def run(self, batch):
        pending = getattr(self._engine.scheduler, "pending", None)
        num_in_flight = 1 if pending is None else len(pending.steps)  # the step of this batch included
        assert num_in_flight <= 2
        num_decodes = batch.metadata.num_decodes
        assert (batch.input_ids[num_decodes:] >= 0).all(), "only decodes wait for a token"
        late = LateTokens(self, batch, self.num_steps)
        self.events.append(("launch", late.number))
        self.num_steps += 1
        self.num_ahead += num_in_flight == 2
        self.num_expected_ids += int((batch.input_ids < 0).sum())
        self._queue.append(late)
        return late

    def compute_up_to(self, wanted):
        self.events.append(("wait", wanted.number))
        while True:
            late = self._queue.pop(0)
            if late is wanted:
                return self._run(late.batch).wait()
            with contextlib.suppress(Exception):  # it was taken back: nobody asks what has become of it
                self._run(late.batch)


class LateTokens:
    def __init__(self, runner, batch, number):
        self.runner, self.batch, self.number = runner, batch, number

    def wait(self):
        return self.runner.compute_up_to(self)
