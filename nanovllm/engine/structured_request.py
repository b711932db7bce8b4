"""What becomes of a request whose grammar cannot go on? It ends at once, and says why.

The mask of a grammar that has failed lets no end token in, so no such output ends with `stop`. Made by `intake.py` for
requests with `structured_outputs`.
"""

from nanovllm.engine.request import Request
from nanovllm.scheduling.scheduler import Scheduler


class StructuredRequest(Request):
    """A request whose sequences have grammars."""

    def end_step(self, scheduler: Scheduler, now: float) -> None:
        for completion in self.completions:
            seq = completion.seq
            if seq.grammar.error and seq.finish_reason is None:
                scheduler.finish(seq, "abort", f"structured_outputs: {seq.grammar.error}")
                completion.read_text()
        super().end_step(scheduler, now)
