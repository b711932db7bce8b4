"""`tensor_parallel_size=N`: from a configuration to a runner whose forward passes N ranks share.

    check sizes → start the other ranks → meet → each rank: cut, load, fast layers, KV cache → wait for all → drive

Rank 0 is the process of the user. The others are processes of their own (`rank.py`), which run no code of the user's
script. All ranks have the same runner, with a `RankPart`, so that they take part in the same collectives.
"""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from nanovllm.config import resolve_device, resolve_dtype
from nanovllm.kv_cache import KVCache
from nanovllm.loader import allocate, init_dummy_weight
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.execution.alone import Whole
from nanovllm_extras.execution.device_setup import Device, Record
from nanovllm_extras.execution.full_runner import (
    BeginCheck,
    MeasureDraft,
    ModelRunner,
    has_overlap_by_default,
    most_rows,
)
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.speculation_options import read_options
from nanovllm_extras.options.store_options import as_json as transfer_as_json
from nanovllm_extras.parallel.communicator import CommunicationError, Communicator
from nanovllm_extras.parallel.driver import Driver
from nanovllm_extras.parallel.joined import join
from nanovllm_extras.parallel.meeting import Meeting, choose_kind, connect, make_meeting
from nanovllm_extras.parallel.processes import accept_other_machines, run_node, share_threads, start_peers
from nanovllm_extras.sampling.runner_hooks import Draw, LapClock
from nanovllm_extras.self_check.mode import begin
from nanovllm_extras.weights.checkpoint import read_model_config
from nanovllm_extras.weights.choose_loader import choose_loader
from nanovllm_extras.weights.cut import Cut, Cutter, read_part, share_of
from nanovllm_extras.weights.dummies import make_dummies
from nanovllm_extras.weights.load_model import load_model, part_of_whole
from nanovllm_extras.weights.quantization_options import check_stored
from nanovllm_extras.weights.shares import Share
from nanovllm_extras.weights.stored_format import read_format

NOT_OF_WORKERS = (
    "scheduling_policy",
    *("tokenizer", "chat_template", "generation_config", "override_generation_config"),
    *("scheduler_cls", "block_manager_cls", "prefix_cache_cls", "sampler_cls", "proposer_cls", "extra_args", "models"),
)


class Plan(NamedTuple):
    """What a rank is to compute: a record that JSON can hold. `config` has the fields that ranks need (`as_json`)."""

    rank: int
    config: dict[str, Any]
    meeting: tuple[Any, ...]
    hears_tokens: bool
    """Whether rank 0's token ids are sent with each batch: with overlap, only its device knows the newest."""
    max_rows: int
    """The most decodes that all ranks record CUDA graphs for. Workers do not use drafts."""


def start_ranks(
    config: Config, folder: Path, measure_draft: MeasureDraft | None = None, begin_check: BeginCheck | None = None
) -> ModelRunner:
    """Start all ranks, and return the runner of rank 0. Raises ValueError, before a process starts, if it cannot.

    measure_draft: returns what a draft model will need, which only rank 0 loads; begin_check: begins the self-check of
    rank 0
    """
    check_nodes(config)
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    if config.quantization is not None:
        check_stored(config.quantization, shape)
    share_of(shape, config.tensor_parallel_size)
    longest = shape.max_position_embeddings
    if (config.max_model_len or 0) > longest:  # each rank would find this too, but only when it has been started
        raise ValueError(
            f"max_model_len must be at most {longest}, the model's max_position_embeddings, got {config.max_model_len}"
        )
    config = replace(config, model=folder, device=device_of(config, 0))
    if config.node_rank:
        run_node(config)
    with private_folder() if config.nnodes == 1 else nullcontext("") as private:
        runner, driver = start_all(config, shape, private, measure_draft, begin_check)
    runner.ranks = driver
    return runner


def private_folder() -> AbstractContextManager[str]:
    """Return a temporary folder that only this user may enter. It is removed before the first step."""
    return tempfile.TemporaryDirectory(prefix="nanovllm-", ignore_cleanup_errors=True)


def start_all(
    config: Config,
    shape: NetworkConfig,
    private: str,
    measure_draft: MeasureDraft | None,
    begin_check: BeginCheck | None,
) -> tuple[ModelRunner, Driver]:
    """Start all ranks; those of one machine meet in the folder `private`. Returns rank 0's runner, and its driver."""
    size, clock = config.tensor_parallel_size, LapClock()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, shape.dtype, device)
    num_local = size // config.nnodes
    num_threads = share_threads(num_local)
    remote = accept_other_machines(config)
    meeting, store = make_meeting(choose_kind(config, device, dtype), size, config, private)
    peers = start_peers(remote, num_local, num_threads, meeting.memory, private)
    has_overlap = has_overlap_by_default(config)
    try:
        for rank in range(1, size):
            theirs = replace(config, device=device_of(config, rank))
            peers.send_json(rank, Plan(rank, as_json(theirs), meeting, has_overlap, most_rows(config)))
        if device.type == "cpu":
            torch.set_num_threads(num_threads)
        communicator = peers.wait_for(partial(connect, meeting, 0, size, device, dtype, store))
        peers.tell_failure(lambda failure: communicator.abort())
        clock.lap("ranks")
        part = RankPart(communicator, has_overlap, peers.check)
        arguments = (config, Path(config.model), has_overlap, clock)
        runner = ModelRunner(*arguments, part=part, measure_draft=measure_draft, begin_check=begin_check)
        peers.wait_until_ready()
    except BaseException as error:
        peers.stop()
        if peers.failure is not None and isinstance(error, CommunicationError):
            raise peers.failure from error
        raise
    finally:
        meeting.close()
    runner.description = f"{runner.description}, {size} ranks ({meeting.kind})"
    return runner, Driver(runner, peers, communicator)


def start_worker(plan: Plan, host: str | None) -> tuple[ModelRunner, Communicator]:
    """Start a rank above 0. `host` is this machine's address for the others; None is machine 0's."""
    config, meeting = Config(**plan.config), Meeting(*plan.meeting)
    _, shape = read_model_config(Path(config.model), config.hf_overrides, config.max_model_len)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, shape.dtype, device)
    communicator = connect(meeting, plan.rank, config.tensor_parallel_size, device, dtype, None, host)
    part = RankPart(communicator, plan.hears_tokens)
    # ranks above 0 need no token of the step before, so nothing overlaps
    runner = ModelRunner(config, Path(config.model), False, max_rows=plan.max_rows, part=part, begin_check=begin)
    return runner, communicator


class RankPart(Whole):
    """The part of one rank: its share of the network.

    hears_tokens: with overlap, only rank 0's device knows the newest tokens. check: called before each tensor is
    loaded, raises if loading is in vain.
    """

    def __init__(
        self, communicator: Communicator, hears_tokens: bool, check: Callable[[], None] = lambda: None
    ) -> None:
        self.communicator, self.hears_tokens, self.check = communicator, hears_tokens, check
        self.rank, self.num_ranks = communicator.rank, communicator.size

    def share_of(self, shape: NetworkConfig) -> NetworkConfig:
        return share_of(shape, self.communicator.size)

    def load_network(self, runner: ModelRunner) -> Qwen3ForCausalLM:
        """Return the network of a share, with its part of each tensor."""
        config, cutter = runner.config, Cutter(self.communicator.rank, self.communicator.size)
        with torch.device("meta"):
            whole = runner.model_class(runner.whole_shape, runner.backend_of_layers)
            share = runner.model_class(runner.shape, runner.backend_of_layers)
        cuts = cutter.cuts_of_checkpoint(whole, share)
        if config.load_format == "dummy":
            model = self.allocate(runner, share, cuts)
            fill_with_dummies(model, whole, cutter, config.seed, runner.shape.initializer_range)
            return model
        if runner.shape.quantization_config is not None or config.load_format == "gguf":
            load = choose_loader(runner.whole_shape, config, runner.pack_quantised, Share(cuts, self.check))
            return load(runner.wanted())

        def read(file: safe_open, name: str) -> torch.Tensor:
            self.check()
            return read_part(cuts, file, name)

        return load_model(runner.wanted(), read, partial(part_of_whole, cuts))

    def allocate(self, runner: ModelRunner, share: Qwen3ForCausalLM, cuts: dict[str, Cut]) -> Qwen3ForCausalLM:
        """Return the network on the device, with random weights where the checkpoint's are quantised."""
        if runner.shape.quantization_config is None:
            return allocate(share, runner.dtype, runner.device)
        form, part = read_format("quantization_config", runner.shape.quantization_config), Share(cuts, self.check)
        return make_dummies(form, runner.pack_quantised, part, share, runner.wanted(runner.config.seed))

    def wrap(self, device: Device, vocab_size: int) -> Device:
        return RankDevice(device, self.communicator, vocab_size, self.hears_tokens)


def fill_with_dummies(share: nn.Module, whole: nn.Module, cutter: Cutter, seed: int, std: float) -> None:
    """Fill `share` with the rank's part of the weights that a single rank would draw with this seed."""
    generator = torch.Generator(device=next(share.parameters()).device).manual_seed(seed)
    filled = set()
    for path, module, name, cut in cutter.cuts(whole, share):
        if (module, name) not in filled:  # tied embeddings have two paths
            filled.add((module, name))
            place = getattr(share.get_submodule(path), name)
            drawn = torch.empty(cut.whole, dtype=place.dtype, device=place.device)
            init_dummy_weight(module, name, drawn, std, generator)
            place.copy_(cut.of(drawn))


class RankDevice(Device):
    """A rank's device: what its kind adds to the start, and the places where the ranks meet."""

    def __init__(self, kind: Device, communicator: Communicator, vocab_size: int, hears_tokens: bool) -> None:
        self.kind = kind
        self.note, self.memory_knob = kind.note, kind.memory_knob
        self.draw = None if communicator.rank else kind.draw
        self.communicator, self.vocab_size, self.hears_tokens = communicator, vocab_size, hears_tokens

    def choose_draw(self, default: Draw) -> Draw:
        return draw_nothing if self.communicator.rank else self.kind.choose_draw(default)

    def prepare(self, runner: ModelRunner) -> None:
        self.kind.prepare(runner)
        join(runner.model, self.communicator, self.vocab_size, self.hears_tokens)

    def send(self, record: Record) -> Record:
        return self.kind.send(record)

    def step(self) -> AbstractContextManager[None]:
        return self.kind.step()

    def advice(self) -> AbstractContextManager[None]:
        return self.kind.advice()

    def free_bytes(self, runner: ModelRunner) -> int:
        """Return the least free memory of all ranks, so that they have as many slots of states."""
        return self._least(self.kind.free_bytes(runner), runner.device)

    def num_common_blocks(self, num_blocks: int, device: torch.device) -> int:
        """Return the least number of blocks of all ranks. Rank 0 may have memory for fewer, beside a draft model."""
        return self._least(num_blocks, device)

    def _least(self, number: int, device: torch.device) -> int:
        """Return the least of the numbers that all ranks give."""
        own = torch.tensor([[number]], device=device)
        least = self.communicator.gather(own).amin(1, keepdim=True)  # [1, 1]; that of all ranks on rank 0
        return int(self.communicator.broadcast(least))

    def allocate(self, caches: list[KVCache], num_blocks: int) -> None:
        self.kind.allocate(caches, num_blocks)

    def record(self, runner: ModelRunner) -> None:
        self.kind.record(runner)


def draw_nothing(logits: torch.Tensor, *_: object) -> torch.Tensor:
    """Return zeros: [num_samples] int64. Ranks above 0 do not sample, as they hold the logits of some tokens only."""
    return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)


def device_of(config: Config, rank: int) -> str:
    """Return the device of one rank. Raises ValueError if the machine has fewer devices than ranks."""
    if resolve_device(config.device).type == "cpu":
        return "cpu"
    num_local = config.tensor_parallel_size // config.nnodes
    if config.device not in ("auto", "cuda", "cuda:0"):
        raise ValueError(f"device must be auto or cuda with tensor_parallel_size > 1, got {config.device!r}")
    if num_local > torch.cuda.device_count():
        raise ValueError(f"tensor_parallel_size needs {num_local} CUDA devices, there are {torch.cuda.device_count()}")
    return f"cuda:{rank % num_local}"


def check_nodes(config: Config) -> None:
    if config.tensor_parallel_size % config.nnodes:
        raise ValueError(
            f"nnodes must divide tensor_parallel_size {config.tensor_parallel_size}, got {config.nnodes}: take "
            f"nnodes=1, or more ranks"
        )
    if config.node_rank >= config.nnodes:
        raise ValueError(f"node_rank must be below nnodes {config.nnodes}, got {config.node_rank}")


def as_json(config: Config) -> dict[str, Any]:
    """Return the fields that another rank needs, as JSON can hold them."""
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in NOT_OF_WORKERS}
    values["model"] = str(config.model)
    if config.speculative_config is not None:  # the others need to know how many drafts there may be
        options = read_options(config.speculative_config)
        method = "mtp" if options.method == "mtp" else "ngram"  # which they take no part in
        values["speculative_config"] = {"method": method, "num_speculative_tokens": options.num_speculative_tokens}
        if options.model is not None:  # so all layers of rank 0 have one block table (`why_one_table`)
            values["disable_hybrid_kv_cache_manager"] = True
    if config.extension is not None:  # each rank imports the file itself
        values["extension"] = str(config.extension)
        values["attention_backend"] = "auto"
        if config.proposer_cls is not None:
            del values["speculative_config"]["method"]
    elif isinstance(config.attention_backend, type):
        values["attention_backend"] = name_of_class(config.attention_backend)
    if config.kv_transfer_config is not None:
        values["kv_transfer_config"] = transfer_as_json(config.kv_transfer_config)
    if isinstance(config.dtype, torch.dtype):
        values["dtype"] = str(config.dtype).removeprefix("torch.")
    return values


def name_of_class(kind: type) -> str:
    """Return the name of an attention backend, which other ranks import. ValueError if they cannot."""
    if kind.__module__ == "__main__":
        raise ValueError(
            f"attention_backend={kind.__name__} is a class of the program itself, which other ranks cannot import: put "
            f"it into a file, and give extension='the_file.py'"
        )
    return f"{kind.__module__}:{kind.__qualname__}"
