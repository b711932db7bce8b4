"""`SelfCheck`: the kernels are compared with PyTorch's layers, on the engine's own weights, before the first request.

`ModelRunner.start` calls it: `layers()` around the replacement of the layers, `steps()` when CUDA graphs are recorded.

    attention    random queries, keys and values through the attention backend: its store and its attend
    layers       some layers of the network, and the logits of some tokens
    draws        the sampler's fast version, over random logits
    graphs       (on CUDA) decodes by a graph, with different inputs and with padding, and the same ones without a graph
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.layers.attention import TorchAttention
from nanovllm.sampler import sample_tokens
from nanovllm_extras.execution.choices import choose
from nanovllm_extras.execution.device_setup import Device, Unchecked, sample_with
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.machine.machine_limits import free_bytes
from nanovllm_extras.machine.own_process import CrashTest, HangError, LoadError, SelfCheckError
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN, draw_arguments
from nanovllm_extras.self_check.comparison import (
    OF_INT8_KV,
    OF_QUANTISED,
    WIDER,
    check_rows,
    has_kernels,
    memory_errors,
)
from nanovllm_extras.self_check.crash_test import start_crash_test
from nanovllm_extras.self_check.networks import (
    Choices,
    attending_with,
    choose_layers,
    in_wider_dtype,
    num_weights,
    only_layers,
    quantised_weight_of,
    run_attention,
    run_network,
    send,
    unpacked,
)
from nanovllm_extras.self_check.steps import draw_vectors, make_long_steps, make_steps, repeat_decodes
from nanovllm_extras.self_check.stored_results import Result, StoredResult

logger = logging.getLogger(__name__)

NUM_USED = 64  # tokens of the vocabulary that the steps have in their prompts
NUM_DRAWS = 32
SHORT_WINDOW = 5  # tokens
NUMS_OF_TOKENS = (1, 17, 65)  # of products, for each of which kernels may have other tiles
NUM_LOGITS = 4  # rows, of which logits are compared
ENDS = [0, -1]  # layers whose K and V are compared: the first and the last
NEARLY_EQUAL = 0.25  # the length of a difference, as a share of a vector's; the last layer has the roundings of all
NEARLY_BEST = 0.2  # in standard deviations of the logits; another batch size may decide between almost equal ones


class SelfCheck(Unchecked):
    def __init__(self, runner: Runner, stored: StoredResult, crash_test: CrashTest) -> None:
        self.runner, self.stored, self.crash_test = runner, stored, crash_test
        self.backend: TorchAttention = runner.backend
        config = replace(runner.config, attention_backend="torch")
        self.plain, _ = choose(config, runner.device, runner.dtype, runner.shape)
        self.exact, _ = choose(config, runner.device, WIDER[runner.dtype], runner.shape)
        self.plain.block_size = self.exact.block_size = self.backend.block_size
        self.is_complete = True

    @classmethod
    def begin(cls, runner: Runner, kind: Device, stored: StoredResult) -> "SelfCheck":
        """Return the check of a runner, whose result is to be stored, and start its crash test."""
        return cls(runner, stored, start_crash_test(runner, kind))

    @contextmanager
    def reported(self, *passed: type[Exception]) -> Iterator[None]:
        """Turn an error within the context into a SelfCheckError, except for those of the classes `passed`.

        A kernel that crashes or computes wrongly is stored, so that the next start does not run it again.
        """
        try:
            with memory_errors():
                yield
        except (MemoryError, torch.OutOfMemoryError, HangError, LoadError):
            raise
        except SelfCheckError as error:
            self.stored.write(Result(False, str(error)))
            raise
        except passed:
            raise
        except Exception as error:
            raise SelfCheckError(f"{type(error).__name__}: {error}") from error

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Compare the layers after the context, in which fast versions replace them, with those before it."""
        compare: list[Callable[[], None]] = []
        with self.reported():
            self.crash_test.wait()
            if has_kernels(self.runner):
                with self.if_memory_suffices():
                    self.compare_attention()
                    compare = self.expect_layers()
            yield
            with self.if_memory_suffices():
                for one in compare:
                    one()

    @contextmanager
    def if_memory_suffices(self) -> Iterator[None]:
        """Leave out a comparison if it runs out of memory: the engine itself may need less."""
        try:
            with memory_errors():
                yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            logger.warning("a part of the self-check is left out, for which there is no memory: %s", error)
            self.is_complete = False

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Compare what the context has set up: CUDA graphs, and the function that draws tokens.

        Ranks would have to compute decodes together, so they only compare the draws, which are those of rank 0.
        """
        part = self.runner.part
        with self.reported(*((ValueError, TypeError) if part.num_ranks == 1 else (Exception,))):
            yield
            with self.if_memory_suffices():
                if part.rank == 0:
                    self.compare_draws()
                if part.num_ranks == 1 and has_kernels(self.runner):
                    self.compare_graphs()
        if self.is_complete:
            self.stored.write(Result(True))

    # ---- attention

    @torch.inference_mode()
    def compare_attention(self) -> None:
        """Compare only the attention backend, for each way in which layers attend."""
        shape = self.runner.shape
        if shape.latent_rank is not None:  # the comparison of the layers includes it
            return
        runner, block_size = self.runner, self.backend.block_size
        dtype, wider = runner.dtype, WIDER[runner.dtype]
        kinds_of_steps = (
            make_steps(block_size, runner.max_model_len, [0]),
            make_long_steps(block_size, runner.max_model_len),
        )
        ways = [*shape.attention_options, *map(with_short_window, shape.attention_options)]
        for options in dict.fromkeys(ways) or (None,):
            given = () if options is None else (options,)
            what = "attention" if options is None else f"attention with {options}"
            for steps in kinds_of_steps:
                fast = run_attention(self.backend, *steps, dtype, dtype, runner.device, given)
                plain = run_attention(self.plain, *steps, dtype, dtype, runner.device, given)
                exact = run_attention(self.exact, *steps, wider, dtype, runner.device, given)
                check_rows(what, fast, plain, exact, dtype, self.allowed_of_cache)

    @property
    def allowed_of_cache(self) -> float:
        """The error that the rounding of K and V explains, also if PyTorch rounds all numbers to the same side."""
        return OF_INT8_KV if self.runner.config.kv_cache_dtype == "int8" else 0.0

    # ---- the network

    def expect_layers(self) -> list[Callable[[], None]]:
        """Run groups of layers in PyTorch. Returns functions that compare the layers of that time with the results."""
        vocab_size, generator = self.runner.shape.vocab_size, torch.Generator().manual_seed(0)
        drawn = torch.randint(vocab_size, (NUM_USED - 1,), generator=generator).tolist()
        used, model = sorted({*drawn, vocab_size - 1}), self.runner.model
        return [self.expect_group(chosen, used) for chosen in choose_layers(model.model.layers)]

    @torch.inference_mode()
    def expect_group(self, chosen: list[int], used: list[int]) -> Callable[[], None]:
        """Run some layers, and the output layer, in PyTorch. Returns a function that compares the fast versions."""
        runner, dtype, wider = self.runner, self.runner.dtype, WIDER[self.runner.dtype]
        model = runner.model
        batches, num_blocks = make_steps(self.backend.block_size, runner.max_model_len, used)
        own_tokens, _ = make_steps(self.backend.block_size, runner.max_model_len, list(range(len(used))))
        exact_choices = Choices()
        plain_choices = Choices(exact_choices)
        with only_layers(model, chosen), unpacked(model, chosen, self.backend) as packed:
            self.compare_products(packed)
            self.need_memory_for(sum(num_weights(model.model.layers[i]) for i in chosen) * wider.itemsize)
            wide = in_wider_dtype(model, self.exact, used, wider)
            with exact_choices:
                exact = run_network(wide, own_tokens, self.exact, chosen, num_blocks, wider, runner.device)
            with attending_with(model, self.plain), plain_choices:
                plain = run_network(model, batches, self.plain, chosen, num_blocks, dtype, runner.device)
            hidden = plain[-NUM_LOGITS:]
            logits = model.compute_logits(hidden)[:, used], wide.compute_logits(hidden.to(wider))

        is_quantised = any(quantised_weight_of(module) is not None for module in wide.modules())
        allowed = OF_QUANTISED if is_quantised else self.allowed_of_cache

        @torch.inference_mode()
        def compare() -> None:
            with only_layers(model, chosen), Choices(exact_choices) as choices:
                fast = run_network(model, batches, self.backend, chosen, num_blocks, dtype, runner.device)
            for scores in zip(choices.scores, plain_choices.scores, exact_choices.scores, strict=True):
                check_rows("scores of experts", *scores, dtype, allowed)
            check_rows(f"layers {chosen}", fast, plain, exact, dtype, allowed)
            check_rows("logits", model.compute_logits(hidden)[:, used], *logits, dtype)

        return compare

    def compare_products(self, packed: list[tuple[Any, Any]]) -> None:
        """Compare quantised layers that are packed already, each with PyTorch's version. Their bits should be equal."""
        dtype = self.runner.dtype
        for fast, plain in packed:
            weight = plain.quantised
            for num_tokens in NUMS_OF_TOKENS:
                x = draw_vectors(num_tokens, num_tokens, weight.q.shape[1]).to(self.runner.device, dtype)
                is_table = hasattr(plain, "logits")
                found = [one.logits(x) if is_table else one(x) for one in (fast, plain)]
                fast_y, y = (torch.cat(one, -1) if isinstance(one, tuple) else one for one in found)
                check_rows(f"products with weights of {weight.bits} bits", fast_y, y, y.double(), dtype)

    def need_memory_for(self, num_bytes: int) -> None:
        """Raise MemoryError if a copy would take half of the free memory: Linux kills processes for lack of it."""
        free = free_bytes() if self.runner.device.type == "cpu" else None
        if free is not None and num_bytes > free // 2:
            raise MemoryError(f"a copy of layers takes {num_bytes} of {free} bytes")

    # ---- what follows the forward pass

    @torch.inference_mode()
    def compare_draws(self) -> None:
        """Compare the function that draws tokens with the core's, row by row."""
        if self.runner.draw is sample_tokens:
            return
        device, vocab_size = self.runner.device, self.runner.shape.vocab_size
        numbers = (5 * draw_vectors(1, NUM_DRAWS, vocab_size)).to(device)
        uniforms = torch.arange(1, NUM_DRAWS + 1, dtype=torch.float64, device=device) / (NUM_DRAWS + 2)
        rows = torch.arange(NUM_DRAWS, device=device)
        limited = {"top_k": rows % 7 * 5, "top_p": 1 - rows % 5 * 0.1, "min_p": rows % 3 * 0.01}
        temperatures = torch.where(rows % 4 == 0, 0.0, 0.8)
        kinds = {"greedy draws": SamplingBatch(torch.zeros(NUM_DRAWS, device=device))}
        if getattr(self.runner.draw, "func", None) is not sample_with:  # which has PyTorch draw by numbers
            kinds["draws"] = SamplingBatch(temperatures, uniforms)
            kinds["draws by top-k, top-p and min-p"] = SamplingBatch(temperatures, uniforms, **limited)
        for dtype in dict.fromkeys((torch.float32, self.runner.dtype)):
            logits = numbers.to(dtype)
            for what, sampling in kinds.items():
                arguments: Any = draw_arguments(sampling)
                fast = self.runner.draw(logits.clone(), *arguments)
                num_wrong = int((fast != sample_tokens(logits.clone(), *arguments)).sum())
                # where numbers decide at a border, the border may be rounded either way
                if num_wrong > (NUM_DRAWS // 16 if sampling.uniforms is not None else 0):
                    reason = f"{num_wrong} of {NUM_DRAWS} tokens differ from PyTorch's, for logits in {dtype}"
                    raise SelfCheckError(f"wrong result: {what}: {reason}")

    @torch.inference_mode()
    def compare_graphs(self) -> None:
        """Compare decodes by a CUDA graph with the same decodes without one, over blocks of the real cache.

        Three decodes after four, and one less than the largest graph has, leave a row of padding, where a graph may
        find what was there before.
        """
        runner = self.runner
        cache, num_used = runner.kv_cache.tensor, min(NUM_USED, runner.shape.vocab_size)
        batches, num_blocks = make_steps(self.backend.block_size, runner.max_model_len, list(range(num_used)))
        if num_blocks > cache.shape[2]:
            self.is_complete = False
            return
        largest = min(runner.max_rows, runner.max_num_batched_tokens)
        used = cache[:, :, 1:num_blocks]
        old = draw_vectors(2, num_blocks - 1, *cache.shape[3:]).to(cache)
        for num_decodes in dict.fromkeys((4, 3, max(1, largest - 1))):
            for added in (0, 7):  # a graph that reads its inputs from another place gives the first tokens again
                batch = self.complete(repeat_decodes(batches[-1], num_decodes, added, num_used))
                if runner.can_replay(batch):
                    used.copy_(old)
                    token_ids = torch.tensor(runner.run(batch).wait().token_ids)
                    written = used[:, ENDS].float()  # [parts, 2, num_blocks - 1, block_size, …]
                    used.copy_(old)
                    self.compare_decodes(batch, token_ids)
                    compare_slots(written, used[:, ENDS].float())
        used.zero_()

    def complete(self, batch: Batch) -> Batch:
        """Return decodes with all that the model needs beside blocks, which here is nothing."""
        return batch

    def compare_decodes(self, batch: Batch, token_ids: Tensor) -> None:
        """Compare the tokens of a graph, [num_decodes], with the logits of the same decodes without one."""
        network = self.runner.network
        sent = send(batch, self.runner.device)
        hidden = network(sent.input_ids, sent.positions, sent.metadata, self.runner.kv_cache.tensor)
        logits = network.compute_logits(hidden[:4]).float().cpu()  # of decodes that differ
        rows = torch.arange(len(token_ids)) % 4
        behind = logits.amax(1)[rows] - logits[rows, token_ids.clamp(min=0)]  # [num_decodes]
        is_wrong = (behind > NEARLY_BEST * logits.std(1)[rows]) | (token_ids == NO_TOKEN)
        is_wrong &= logits.isfinite().all(dim=1)[rows]
        if is_wrong.any():
            raise SelfCheckError(
                f"wrong result: decodes by a CUDA graph: {int(is_wrong.sum())} of {len(token_ids)} tokens differ "
                f"from those without one"
            )


def compare_slots(written: Tensor, expected: Tensor) -> None:
    """Compare what a graph has left in the cache with what the same decodes leave without one."""
    errors = (written - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)  # of each slot and head
    is_wrong = ~(errors <= NEARLY_EQUAL) & expected.isfinite().all(dim=-1)
    if is_wrong.any():
        raise SelfCheckError(
            f"wrong result: decodes by a CUDA graph: {int(is_wrong.sum())} of {is_wrong.numel()} keys and values in "
            f"the cache differ from those without one"
        )


def with_short_window(options: AttentionOptions) -> AttentionOptions:
    """Return options whose window, if they have one, is shorter than the sequences of a check."""
    return options if options.window is None else replace(options, window=min(options.window, SHORT_WINDOW))
