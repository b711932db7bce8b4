"""Where does a consumer in an event loop find the outputs that the engine's thread has made?

Outputs that the consumer has not read yet merge, so an inbox holds at most one output of each request.
"""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace

from nanovllm.engine.intake import Params
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.serve.bell import Bell


class Inbox:
    """The unread outputs of the requests of one call. Made in the consumer's event loop; `put` and `fail` may be called
    in any thread, and return whether `wake` must be called in the loop's thread.
    """

    def __init__(self, request_ids: Iterable[str], delta_ids: Iterable[str], bell: Bell) -> None:
        self.bell = bell
        """It wakes the consumer."""
        self.unfinished = set(request_ids)
        """Requests whose last output has not been read."""
        self._delta_ids = frozenset(delta_ids)
        self._lock = threading.Lock()
        self._unread: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> bool:
        with self._lock:
            is_first = not self._unread and self._error is None
            unread = self._unread.get(output.request_id)
            if unread is not None and output.request_id in self._delta_ids:
                output = merge_deltas(unread, output)
            self._unread[output.request_id] = output  # if it is no delta, it holds all that the one before it holds
            return is_first

    def fail(self, error: BaseException) -> bool:
        with self._lock:
            is_first = not self._unread and self._error is None
            self._error = self._error or error
            return is_first

    def wake(self) -> None:
        self._has_news.set()

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs; those read since the last call, one of each request. Raises the error of a failure."""
        await self._has_news.wait()
        with self._lock:
            self._has_news.clear()
            outputs = list(self._unread.values())
            self._unread.clear()
            if self._error is not None and not outputs:
                raise self._error
            if self._error is not None:
                self._has_news.set()  # the next call raises it
        self.unfinished -= {output.request_id for output in outputs if output.finished}
        return outputs


def gives_deltas(params: Params | None) -> bool:
    return isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA


def merge_deltas(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """One output that says what both say. Completions without news are in neither."""
    completions = {completion.index: completion for completion in old.outputs}
    for completion in new.outputs:
        before = completions.get(completion.index)
        if before is not None:
            logprobs = None if completion.logprobs is None else [*(before.logprobs or []), *completion.logprobs]
            text, token_ids = before.text + completion.text, before.token_ids + completion.token_ids
            completion = replace(completion, text=text, token_ids=token_ids, logprobs=logprobs)
        completions[completion.index] = completion
    outputs = [completions[index] for index in sorted(completions)]
    return replace(new, outputs=outputs, prompt_logprobs=old.prompt_logprobs or new.prompt_logprobs)
