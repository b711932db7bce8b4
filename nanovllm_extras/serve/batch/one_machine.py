"""Answer a batch without Ray: one engine in this process computes several chunks at a time.

A new engine replaces an engine that has died, as Ray replaces an actor.
"""

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from nanovllm_extras.serve.batch.batch_inputs import Chunk, Digests, Input, Records, are_in, digests_of
from nanovllm_extras.serve.batch.parts import Parts
from nanovllm_extras.serve.batch.replica import Replica, ReplicaSpec
from nanovllm_extras.serve.batch.rows import Row
from nanovllm_extras.serve.commands.serve_command import run as run_loop
from nanovllm_extras.serve.engine_thread import EngineDeadError

logger = logging.getLogger(__name__)


def answer_here(batch: Input, parts: Parts, done: Digests, spec: ReplicaSpec) -> None:
    """Answer all rows that are not `done`. Raises RuntimeError if too many engines die."""
    waiting = deque(enumerate(batch.chunks))
    while waiting:
        replica = Replica(spec)
        try:
            run_loop(Session(replica, batch, parts, done, waiting).run(spec.max_in_flight))
        except EngineDeadError as error:
            logger.warning("%s; a new engine continues", error)
        finally:
            replica.shutdown()


class Session:
    """Computes chunks with one engine until none is left or the engine dies.

    waiting: the chunks that have not been started. A chunk that the engine could not finish returns there.
    """

    def __init__(
        self, replica: Replica, batch: Input, parts: Parts, done: Digests, waiting: deque[tuple[int, Chunk]]
    ) -> None:
        self._replica, self._batch, self._parts, self._done = replica, batch, parts, done
        self._waiting = waiting
        self._files = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-batch")  # reads and writes, one at a time
        self._records = Records()

    async def run(self, max_in_flight: int) -> None:
        """Compute the waiting chunks, several at once. Raises EngineDeadError only if there is no other error."""
        workers = [self._work() for _ in range(self._batch.num_chunks_at_once(max_in_flight))]
        ends = await asyncio.gather(*workers, return_exceptions=True)
        self._files.shutdown()
        errors = [end for end in ends if end is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, EngineDeadError)):
            raise error

    async def _work(self) -> None:
        in_files = partial(asyncio.get_running_loop().run_in_executor, self._files)
        while self._waiting:
            number, chunk = self._waiting.popleft()
            try:
                rows = await in_files(self._read, chunk)
                if rows:
                    await in_files(self._parts.write, number, await self._replica.answer(rows))
            except EngineDeadError:
                self._waiting.appendleft((number, chunk))
                raise

    def _read(self, chunk: Chunk) -> list[Row]:
        rows = self._batch.read(chunk, self._records)
        is_done = are_in(digests_of(row.custom_id for row in rows), self._done)
        return [row for row, one in zip(rows, is_done, strict=True) if not one]
