"""Handle requests whose output is constrained by a grammar: if the grammar cannot continue, the request is aborted.

The mask of a grammar that has failed does not allow end tokens, so such an output does not end with `stop`.
`input_processor.py` creates these requests if they have `structured_outputs`.
"""

from nanovllm.scheduler import Scheduler
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.structured.grammar import Grammar


class StructuredRequest(Request):
    """A request whose sequences have grammars."""

    def finish_step(self, scheduler: Scheduler, now: float) -> None:
        """End the samples whose grammar has failed, with the reason, then end the step as usual."""
        for completion in self.completions:
            seq = completion.seq
            errors = [
                processor.error for processor in seq.processors if isinstance(processor, Grammar) and processor.error
            ]
            if errors and seq.finish_reason is None:
                scheduler.finish(seq, "abort", f"structured_outputs: {errors[0]}")
                completion.read_tokens()
        super().finish_step(scheduler, now)
