"""A request whose output must fit a grammar: if the grammar cannot go on, the request ends at once, and says why.

The mask of a grammar that has failed lets no end token in, so no such output ends with `stop`. Made by
`input_processor.py` for requests with `structured_outputs`.
"""

from nanovllm.extras.full_request import Request
from nanovllm.extras.structured.grammar import Grammar
from nanovllm.scheduler import Scheduler


class StructuredRequest(Request):
    """A request whose sequences have grammars."""

    def finish_step(self, scheduler: Scheduler, now: float) -> None:
        for completion in self.completions:
            seq = completion.seq
            errors = [
                processor.error for processor in seq.processors if isinstance(processor, Grammar) and processor.error
            ]
            if errors and seq.finish_reason is None:
                scheduler.finish(seq, "abort", f"structured_outputs: {errors[0]}")
                completion.read_tokens()
        super().finish_step(scheduler, now)
