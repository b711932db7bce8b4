"""A runner whose forward passes fail when a test wants it."""


class Failing:
    """Replaces the runner's `run`: raises at the nth call, before or after the step is computed.

    `countdown` may be set again: the number of calls until the next failure.
    """

    def __init__(self, engine, nth, exception, when):
        self.run, self.countdown, self.exception, self.when = engine.runner.run, nth, exception, when
        engine.runner.run = self

    def __call__(self, batch):
        self.countdown -= 1
        if self.countdown == 0 and self.when == "before":
            raise self.exception
        tokens = self.run(batch)
        if self.countdown == 0:
            raise self.exception
        return tokens
