"""The engine: the loop that turns requests into tokens. Begin with `LLMEngine.step()`.

    prompt ─encode→ Sequence ─schedule()→ Step ─build_batch()→ Batch
       ─model(…, kv_cache)→ logits ─sample_tokens()→ token ids ─update()→ sequences that advanced
       ─make_output()→ RequestOutput

One call for each arrow, forward only. This file connects the parts; it decides nothing about memory or order. `LLM`
uses it, or your own loop over `add_request` and `step`.
"""

from pathlib import Path
from typing import Any

from nanovllm.batch import build_batch
from nanovllm.block_manager import BlockManager
from nanovllm.checks import check_class, narrowed
from nanovllm.config import Config
from nanovllm.loader import find_folder, load_tokenizer, read_eos_token_ids
from nanovllm.model_runner import ModelRunner
from nanovllm.observer import Stats
from nanovllm.one_thread import InUseError, OneThread
from nanovllm.prefix_cache import PrefixCache
from nanovllm.prompts import Prompt, check_prompt_len, encode_prompt
from nanovllm.request import Request, RequestOutput, make_seed
from nanovllm.sampling_params import SamplingParams, check_extra_args
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence

PARTS = {
    "scheduler_cls": Scheduler,
    "block_manager_cls": BlockManager,
    "prefix_cache_cls": PrefixCache,
    "runner_cls": ModelRunner,
}
"""Option -> the class that another one may replace."""


def check_parts(config: Config) -> None:
    """Raise TypeError unless the user's own classes extend those that they replace."""
    for name, kind in PARTS.items():
        check_class(name, getattr(config, name), kind)


class LLMEngine:
    """Add requests, and call `step()` while `has_unfinished_requests()`. The `make_…` methods choose the parts."""

    def __init__(self, config: Config) -> None:
        self.config = self.check_config(config)
        folder = self.find_folder()
        self.tokenizer = self.load_tokenizer(folder)
        self.runner = self.make_runner(folder)
        self.eos_token_ids = self.read_eos_token_ids(folder)
        self.description = self.runner.description  # which classes compute, and why
        self.stats = self.make_stats()
        self.one_thread = OneThread()  # refuses a second thread, and calls from within a step
        self.reset()

    def reset(self) -> None:
        """Drop all requests and free all blocks."""
        with self.one_thread.use(during_step=True):
            self.requests: dict[str, Request] = {}
            self.scheduler = self.make_scheduler(self.make_block_manager())

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Advance the unfinished requests by one forward pass, and return the outputs of those that advanced.

        A step that fails or is interrupted may have changed anything half-way, so all requests are dropped.
        """
        before, has_begun = self.one_thread.state, False
        try:
            with self.one_thread.step():
                has_begun = True
                launched = self.launch()
                return [] if launched is None else self.complete(*launched)
        except BaseException as error:
            if has_begun or not isinstance(error, InUseError):  # else another thread's step goes on
                self.one_thread.restore(before)
                self.on_failure()
            raise

    def launch(self) -> tuple[Step, Any] | None:
        """Start a step: everything up to the forward pass. None if there is nothing to do."""
        step = self.scheduler.schedule()  # which sequence computes how many tokens
        return (step, self.compute(step)) if step.chunks else None

    def compute(self, step: Step) -> Any:
        """Return the tokens that the step samples. On CUDA they may not be ready yet: `tolist` waits for them."""
        batch = build_batch(step, self.runner.backend.block_size, self.runner.make_metadata)  # the step as tensors
        return self.runner.run(batch)  # the model computes, the sampler samples

    def complete(self, step: Step, tokens: Any) -> list[RequestOutput]:
        """Finish a step with the tokens that it has sampled."""
        advanced = self.scheduler.update(step, tokens.tolist())  # append tokens, end what is done
        return self.make_outputs(advanced)  # tokens become text

    def make_outputs(self, advanced: list[tuple[int, Sequence]]) -> list[RequestOutput]:
        """Return the outputs of the requests that advanced, and remove finished requests."""
        requests: dict[str, Request] = {}
        for _, seq in advanced:  # subclasses read the first, the sequence's row among those sampled
            request = requests[seq.request_id] = self.requests[seq.request_id]
            request.read_tokens(seq, self.scheduler)
        outputs = []
        for request in requests.values():
            if is_finished := request.is_finished:
                del self.requests[request.request_id]
            if request.stream or is_finished:
                outputs.append(request.make_output())
        return outputs

    def on_failure(self) -> None:
        """Called when a step has failed or was interrupted."""
        self.reset()

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # ---- requests come and go

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None, *, stream: bool = True
    ) -> None:
        """Check and queue one request. With `stream=False` its only output is the last one.

        TypeError or ValueError, before anything changes, for a request that this engine can never serve.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        with self.one_thread.use():
            if request_id in self.requests:
                raise ValueError(f"request_id {request_id!r} belongs to an unfinished request; choose another")
            params = self.check_params(sampling_params)
            text, token_ids = self.encode(prompt)
            seed = make_seed(params.seed, self.config.seed, self.stats.num_requests, token_ids)
            # one sequence for each sample; the first computes the prompt, the others are its children
            seqs = [Sequence(request_id, token_ids, params, self.eos_token_ids, seed, i) for i in range(params.n)]
            seqs[0].children = seqs[1:]
            backend_tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
            self.requests[request_id] = Request(text, seqs, stream, backend_tokenizer)
            try:
                self.scheduler.add(seqs[0])
            except Exception:  # a scheduler of the user's own refuses it
                self.requests.pop(request_id).abort(self.scheduler)
                raise

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request and free its blocks. Returns its output so far, or None if it is unknown or finished."""
        with self.one_thread.use():
            request = self.requests.pop(request_id, None)
            if request is None:
                return None
            request.abort(self.scheduler)
            return request.make_output()

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return text and token ids of a prompt that this engine can serve."""
        runner = self.runner
        text, token_ids = encode_prompt(prompt, self.tokenizer, runner.shape.vocab_size)
        capacity = self.scheduler.block_manager.capacity
        check_prompt_len(len(token_ids), runner.max_model_len, capacity, runner.backend.block_size, "num_kv_blocks")
        return text, token_ids

    def check_params(self, params: SamplingParams | None) -> SamplingParams:
        """Return a checked copy of the parameters, so that later changes do not affect the request."""
        if not isinstance(params, SamplingParams | None):
            raise TypeError(f"sampling_params must be a SamplingParams or None, got {params!r}")
        params = narrowed(params or SamplingParams(), SamplingParams)
        vocab_size, max_num_seqs = self.runner.shape.vocab_size, self.config.max_num_seqs
        if bad := [token_id for token_id in params.stop_token_ids or () if token_id >= vocab_size]:
            raise ValueError(f"stop_token_ids must hold token ids from 0 to {vocab_size - 1}, got {bad[0]}")
        if params.n > max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs {max_num_seqs}, got {params.n}")
        if self.tokenizer is None and params.stop_strings:
            raise ValueError(f"stop needs a tokenizer, but this model has none, got stop {params.stop!r}")
        check_extra_args(params.extra_args, self.config.extra_args)
        return params

    # ---- the parts, which a subclass may choose differently

    def check_config(self, config: Config) -> Config:
        if not isinstance(config, Config):
            raise TypeError(f"config must be a Config, got {config!r}")
        check_parts(config)
        return narrowed(config, Config)

    def find_folder(self) -> Path:
        return find_folder(self.config.model)

    def load_tokenizer(self, folder: Path) -> Any:
        return load_tokenizer(folder)

    def make_runner(self, folder: Path) -> ModelRunner:
        return (self.config.runner_cls or ModelRunner)(self.config, folder)

    def read_eos_token_ids(self, folder: Path) -> frozenset[int]:
        return read_eos_token_ids(folder, self.tokenizer, self.runner.shape.vocab_size)

    def make_stats(self) -> Stats:
        """Return the observer that is notified of the decisions of scheduler and block manager."""
        return Stats()

    def make_block_manager(self) -> BlockManager:
        config, runner = self.config, self.runner
        sizes = runner.kv_cache.num_blocks, runner.backend.block_size
        prefix_cache_cls = config.prefix_cache_cls or PrefixCache
        kind = config.block_manager_cls or BlockManager
        return kind(*sizes, config.enable_prefix_caching, self.stats, prefix_cache_cls)

    def make_scheduler(self, block_manager: BlockManager) -> Scheduler:
        config, runner = self.config, self.runner
        kind = config.scheduler_cls or Scheduler
        return kind(block_manager, config.max_num_seqs, runner.max_num_batched_tokens, runner.max_model_len)
