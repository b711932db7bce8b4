"""A runner that is as late as a device can be, for tests of overlap on CPU."""


class LateRunner:
    """Wraps a runner: a step is computed when its tokens are awaited, behind all steps that were launched before it.

    So nobody can know a token earlier, and what a launched step was given must not change meanwhile. Steps that
    nobody waits for are computed all the same, as a device would.
    """

    def __init__(self, runner):
        self._runner = runner
        self._queue = []
        self.num_steps = 0
        self.num_ahead = 0  # steps that were launched while another was in flight
        self.num_expected_ids = 0  # input ids that nobody knew at launch

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, batch):
        assert len(self._queue) <= 1 or any(late.is_dropped for late in self._queue), "three steps in flight"
        late = LateTokens(self, batch)
        self.num_steps += 1
        self.num_ahead += bool(self._queue)
        self.num_expected_ids += int((batch.input_ids < 0).sum())
        self._queue.append(late)
        return late


class LateTokens:
    def __init__(self, runner, batch):
        self._runner, self._batch = runner, batch
        self.is_dropped = False

    def wait(self):
        runner = self._runner
        while True:
            late = runner._queue.pop(0)
            tokens = runner._runner.run(late._batch).wait()
            if late is self:
                return tokens
            late.is_dropped = True


def make_late(engine):
    """The engine, with its runner as late as can be."""
    engine.runner = LateRunner(engine.runner)
    return engine
