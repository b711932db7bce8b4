"""Answer a batch with Ray Data: a pool of replicas, each an actor with its own devices.

    RowSource ─read→ [done rows are dropped] ─map_batches→ Replicas ─write_parquet→ parts

Each chunk is one block: one read, one call of an actor, one part. So if Ray repeats a task, the task returns the same
rows again. If blocks were cut by their size, which depends on the sampled tokens, a repeated task would return other
blocks. But Ray keeps the blocks of the first attempt that have arrived, and takes the others from the second attempt.

Ray Data's checkpoint (Ray 2.60, `ray/data/checkpoint`) works as follows: a write task writes the names of its rows to
`_checkpoint/PART.pending.parquet`, then writes the part, and then renames the pending file. Two classes of it are
replaced here. `PartsManager` reads from the parts which rows are done; `parts.py` gives the reasons. `DigestFilter`
holds 16 bytes for each row; Ray's own filter holds all names in each actor.
"""

import asyncio
import fcntl
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import pyarrow as pa
import ray
import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.data.block import BlockMetadata
from ray.data.checkpoint import CheckpointConfig, CheckpointFilter, CheckpointManager
from ray.data.datasource import Datasource, FilenameProvider, ReadTask

from nanovllm_extras.kernels.cpu.threads import allowed_threads
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.serve.batch.batch_inputs import Chunk, Digests, Input, Records, are_in, digests_of, read_rows
from nanovllm_extras.serve.batch.parts import ID, Parts, to_table
from nanovllm_extras.serve.batch.rows import Form, Row

logger = logging.getLogger(__name__)

SPARE_CPUS = 2  # in addition to those of the replicas: one for the filter's actor, one for tasks that read or write
MIB = 2**20
EXIT_STATUS = 70  # of the process of an actor whose engine is dead


class Spec(Protocol):
    """The parameters of a replica (`replica.py`). Only actors read them: other tasks do not import the server."""

    @property
    def max_in_flight(self) -> int: ...

    def start(self) -> Any:
        """Return the `Replica`."""


@dataclass(frozen=True)
class Pool:
    """The number of actors, their devices, and the cluster."""

    num_replicas: int
    num_devices: int
    """The number of GPUs for each engine. 0 runs the engines on CPU, where they share the cores of their machine."""
    address: str | None = None
    """The address of a running cluster. None starts a cluster on this machine and ends it after the run."""


def answer_with_ray(batch: Input, parts: Parts, done: Digests, spec: Spec, pool: Pool) -> None:
    """Answer all rows that are not done, which `PartsManager` reads itself. Raises RuntimeError if Ray gives up."""
    num_threads = max(1, (allowed_threads() or 1) // pool.num_replicas) if not pool.num_devices else 1
    num_cpus = pool.num_replicas * num_threads + SPARE_CPUS
    here: dict[str, Any] = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    how = {"address": pool.address} if pool.address else here
    ray.init(logging_level=logging.WARNING, log_to_driver=True, **how)
    try:
        warn_of_too_few("CPU", num_cpus)
        warn_of_too_few("GPU", pool.num_replicas * pool.num_devices)
        with DataContext.current(context_for(parts)):
            answers = answered(batch, spec, pool, num_threads)
            answers.write_parquet(str(parts.folder), filename_provider=PartNames(parts))
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray has given up; finished parts are kept: {error}") from error
    finally:
        ray.shutdown()


def warn_of_too_few(resource: str, num_needed: int) -> None:
    """Warn if the cluster has too few CPUs or GPUs. Ray itself waits silently, since machines may still join."""
    num_there = ray.cluster_resources().get(resource, 0)
    if num_there < num_needed:
        logger.warning("the cluster has %g %ss, the run needs %d, and waits for them", num_there, resource, num_needed)


def context_for(parts: Parts) -> DataContext:
    """Return Ray Data's settings, with a checkpoint that reads from `parts` which rows are done."""
    context = DataContext.get_current().copy()
    context.target_max_block_size = None  # blocks are never cut
    context.enable_progress_bars = False
    context.checkpoint_config = CheckpointConfig(
        ID, str(parts.checkpoint), checkpoint_manager_cls=PartsManager, checkpoint_filter_cls=DigestFilter
    )
    context.checkpoint_config.checkpoint_actor_memory_bytes = 64 * MIB
    context.checkpoint_config.checkpoint_actor_pool_max_size = 1  # more actors would use CPUs that the tasks need
    return context


def answered(batch: Input, spec: Spec, pool: Pool, num_threads: int) -> Dataset:
    """Return the dataset of the answers to all rows that are not done.

    Ray restarts actors and repeats their calls without limit. `attempts.py` sets the limits: the third attempt at a
    chunk finds the row that kills engines, and after too many engines the next replica raises, which ends Ray's run.
    """
    at_once = batch.num_chunks_at_once(spec.max_in_flight)
    rows = ray.data.read_datasource(RowSource(batch), override_num_blocks=len(batch.chunks))
    return rows.map_batches(
        Answerer,
        fn_constructor_args=(spec, num_threads),
        batch_size=None,  # a block: a chunk
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=pool.num_replicas,
            max_concurrent_calls_per_actor=at_once,
            max_tasks_in_flight_per_actor=at_once,
            enable_true_multi_threading=True,
        ),
        num_cpus=num_threads,
        num_gpus=pool.num_devices or None,
    )


# ---- read


class RowSource(Datasource):
    """A Ray data source that reads each chunk of the input in a separate task."""

    def __init__(self, batch: Input) -> None:
        super().__init__()
        self._batch = batch

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        form, first_of = self._batch.form, self._batch.first_of
        return [
            ReadTask(
                partial(read_block, chunk, form, first_of),
                BlockMetadata(num_rows=chunk.num_rows, size_bytes=None, input_files=None, exec_stats=None),
                per_task_row_limit=per_task_row_limit,
            )
            for chunk in self._batch.chunks
        ]

    def estimate_inmemory_data_size(self) -> int | None:
        return None


def read_block(chunk: Chunk, form: Form, first_of: dict[bytes, str]) -> Iterable[pa.Table]:
    """Return the rows of a chunk as one table, with the fields of `Row` as its columns."""
    rows = read_rows(chunk, form, first_of, Records())
    columns = zip(*rows, strict=True)
    return [pa.table({name: pa.array(values, pa.string()) for name, values in zip(Row._fields, columns, strict=True)})]


# ---- what is done


class PartsManager(CheckpointManager):
    """Reads from the parts which rows are done. `Parts.opened` has removed the unfinished parts of a killed run."""

    def load_checkpoint(self, data_file_dir: str | None = None, data_file_filesystem: Any = None) -> tuple[Any, int]:
        digests = Parts(Path(self.checkpoint_path_unwrapped).parent, "").done()
        return (ray.put(digests), digests.nbytes) if len(digests) else (None, 0)


class DigestFilter(CheckpointFilter):
    """Drops rows that are done."""

    def __init__(self, config: CheckpointConfig, checkpoint_ref: Any = None) -> None:
        super().__init__(config, checkpoint_ref)
        self._done = ray.get(checkpoint_ref)

    def filter_rows_for_block(self, block: pa.Table) -> pa.Table:
        is_done = are_in(digests_of(block.column(self.id_column).to_pylist()), self._done)
        return block.filter(pa.array(~is_done))


# ---- answer


class Answerer:
    """A replica in an actor. Ray calls it in several threads with one chunk each, so that its engine stays busy."""

    def __init__(self, spec: Spec, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._replica = spec.start()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="nanovllm-batch", daemon=True).start()

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = [Row(**row) for row in table.to_pylist()]
        try:
            return to_table(asyncio.run_coroutine_threadsafe(self._replica.answer(rows), self._loop).result())
        except EngineDeadError as error:
            # Ray would repeat the task on this actor, whose engine stays dead. If an actor ends by an exception or by
            # `exit_actor`, Ray neither replaces it nor repeats its tasks. If its process exits, Ray does both.
            logger.error("%s; its process ends, and Ray starts another one", error)
            os._exit(EXIT_STATUS)


# ---- write


class PartNames(FilenameProvider):
    """Names the parts, and prevents a killed run from writing.

    Ray requests the name of a part before it writes the part. At this moment the driver may have been killed, and
    another run may use the folder: then this raises RuntimeError. Otherwise it takes a shared lock on `_writers.lock`
    and holds it as long as this object exists, which is as long as the task that writes. The next run waits for the
    lock (`Parts.opened`).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._lock, self._run = parts.folder / "_writers.lock", parts.run
        self._held: TextIO | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_held": None}

    def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
        if self._held is None:
            held = self._lock.open()
            fcntl.flock(held, fcntl.LOCK_SH)
            if held.read() != self._run:
                raise RuntimeError("another run has taken over this folder")
            self._held = held
        return f"part-{write_uuid}-{task_index:012}.parquet"
