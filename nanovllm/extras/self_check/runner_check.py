"""`SelfCheck`: the kernels are compared with PyTorch's layers, on the engine's own weights, before the first request.

`ModelRunner.start` calls it: `layers()` around the replacement of the layers, `steps()` when CUDA graphs are recorded.

    attention    random queries, keys and values through the attention backend: its store and its attend
    layers       some layers of the network, and the logits of some tokens
    draws        the sampler's fast version, over random logits
    graphs       (on CUDA) decodes by a graph, twice with different inputs, against the same decodes without one
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.batch import SamplingBatch
from nanovllm.extras.device_setup import Unchecked
from nanovllm.extras.kernels.backend import AttentionBackend
from nanovllm.extras.kernels.choices import choose
from nanovllm.extras.runner_hooks import NO_TOKEN, draw_arguments
from nanovllm.extras.self_check.comparison import WIDER, HangError, SelfCheckError, check_rows
from nanovllm.extras.self_check.crash_test import CrashTest, start_crash_test
from nanovllm.extras.self_check.networks import (
    attending_with,
    choose_layers,
    in_wider_dtype,
    only_layers,
    run_attention,
    run_network,
    send,
)
from nanovllm.extras.self_check.steps import draw_vectors, make_long_steps, make_steps
from nanovllm.extras.self_check.stored_results import Result, StoredResult
from nanovllm.sampler import sample_tokens

if TYPE_CHECKING:
    from nanovllm.extras.full_runner import ModelRunner

logger = logging.getLogger(__name__)

NUM_USED = 64  # tokens of the vocabulary that the steps have in their prompts
NUM_DRAWS = 32
SHORT_WINDOW = 5  # tokens
NEARLY_BEST = 0.2  # in standard deviations of the logits; another batch size may decide between almost equal ones


def begin(runner: "ModelRunner", stored: StoredResult) -> Unchecked:
    """Return the check of a runner, whose result is to be stored. The crash test has started."""
    return SelfCheck(runner, stored, start_crash_test(runner))


class SelfCheck(Unchecked):
    def __init__(self, runner: "ModelRunner", stored: StoredResult, crash_test: CrashTest) -> None:
        self.runner, self.stored, self.crash_test = runner, stored, crash_test
        self.backend: Any = runner.backend
        config = replace(runner.config, attention_backend="torch")
        self.plain, _ = choose(config, runner.device, runner.dtype, runner.shape)
        self.exact, _ = choose(config, runner.device, WIDER[runner.dtype], runner.shape)
        self.plain.block_size = self.exact.block_size = self.backend.block_size
        self.is_complete = True

    @contextmanager
    def reported(self, *passed: Any) -> Iterator[None]:
        """Turn an error within the context into a SelfCheckError, except for those of the classes `passed`.

        A kernel that crashes or computes wrongly is stored, so that the next start does not run it again.
        """
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError, HangError, *passed):
            raise
        except SelfCheckError as error:
            self.stored.write(Result(False, str(error)))
            raise
        except Exception as error:
            raise SelfCheckError(f"{type(error).__name__}: {error}") from error

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Compare the layers after the context, in which fast versions replace them, with those before it."""
        compare: Callable[[], None] | None = None
        with self.reported():
            self.crash_test.wait()
            with self.if_memory_suffices():
                self.compare_attention()
                compare = None if is_packed(self.runner) else self.expect_layers()
            yield
            with self.if_memory_suffices():
                if compare is not None:
                    compare()

    @contextmanager
    def if_memory_suffices(self) -> Iterator[None]:
        """Leave out a comparison if it runs out of memory: the engine itself may need less."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            logger.warning("a part of the self-check is left out, for which there is no memory: %s", error)
            self.is_complete = False

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Compare what the context has set up: CUDA graphs, and the function that draws tokens."""
        is_rank = hasattr(self.runner, "communicator")  # then the ranks would have to compute these steps together
        with self.reported(*((Exception,) if is_rank else (ValueError, TypeError))):
            yield
            with self.if_memory_suffices():
                if not is_rank:
                    self.compare_draws()
                    if self.runner.device.type == "cuda" or self.runner.graphs is not None:
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
                check_rows(what, fast, plain, exact, dtype)

    # ---- the network

    def expect_layers(self) -> Callable[[], None]:
        """Run some layers in PyTorch. Returns a function that compares the layers of that time with these results."""
        runner, block_size = self.runner, self.backend.block_size
        model: Any = runner.model
        generator = torch.Generator().manual_seed(0)
        used = sorted({*torch.randint(runner.shape.vocab_size, (NUM_USED - 1,), generator=generator).tolist(),
                       runner.shape.vocab_size - 1})  # fmt: skip
        batches, num_blocks = make_steps(block_size, runner.max_model_len, used)
        chosen = choose_layers(model.model.layers)

        def run(network: Any, backend: Any, dtype: torch.dtype, batches: Any = batches) -> tuple[Tensor, Tensor]:
            return run_network(network, batches, backend, chosen, num_blocks, dtype, runner.device)

        with only_layers(model, chosen):
            with attending_with(model, self.plain):
                hidden, logits = run(model, self.plain, runner.dtype)
            plain = hidden, logits[:, used]
            wide = in_wider_dtype(model, self.exact, used, WIDER[runner.dtype])
        own_tokens = make_steps(block_size, runner.max_model_len, list(range(len(used))))[0]
        exact = run(wide, self.exact, WIDER[runner.dtype], own_tokens)

        def compare() -> None:
            with only_layers(model, chosen):
                hidden, logits = run(model, self.backend, runner.dtype)
            may_flip = runner.shape.num_experts > 0
            check_rows("layers", hidden, plain[0], exact[0], runner.dtype, may_flip)
            check_rows("logits", logits[:, used], plain[1], exact[1], runner.dtype, may_flip)

        return compare

    # ---- what follows the forward pass

    @torch.inference_mode()
    def compare_draws(self) -> None:
        """Compare the function that draws tokens with the core's, row by row."""
        device, vocab_size = self.runner.device, self.runner.shape.vocab_size
        numbers = (5 * draw_vectors(1, NUM_DRAWS, vocab_size)).to(device)
        uniforms = torch.arange(1, NUM_DRAWS + 1, dtype=torch.float64, device=device) / (NUM_DRAWS + 2)
        rows = torch.arange(NUM_DRAWS, device=device)
        limited = {"top_k": rows % 7 * 5, "top_p": 1 - rows % 5 * 0.1, "min_p": rows % 3 * 0.01}
        temperatures = torch.where(rows % 4 == 0, 0.0, 0.8)
        kinds = {
            "greedy draws": SamplingBatch(torch.zeros(NUM_DRAWS, device=device)),
            "draws": SamplingBatch(temperatures, uniforms),
            "draws by top-k, top-p and min-p": SamplingBatch(temperatures, uniforms, **limited),
        }
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
        """Compare decodes by a CUDA graph with the same decodes without one, twice, over blocks of the real cache."""
        runner = self.runner
        cache, num_used = runner.kv_cache.tensor, min(NUM_USED, runner.shape.vocab_size)
        batches, num_blocks = make_steps(self.backend.block_size, runner.max_model_len, list(range(num_used)))
        if num_blocks > cache.shape[2]:
            self.is_complete = False
            return
        cache[:, :, 1:num_blocks] = draw_vectors(2, num_blocks - 1, *cache.shape[3:]).to(cache)
        model: Any = runner.model
        for added in (0, 7):  # a graph that reads its inputs from another place gives the first tokens again
            batch = replace(batches[-1], input_ids=(batches[-1].input_ids + added) % num_used)
            token_ids = torch.tensor(runner.run(batch).wait().token_ids)
            sent = send(batch, runner.device)
            hidden = model(sent.input_ids, sent.positions, sent.metadata, cache)
            logits = model.compute_logits(hidden[sent.logits_indices]).float().cpu()
            is_finite = logits.isfinite().all(dim=1)
            drawn = logits.gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
            is_wrong = logits.amax(1) - drawn > NEARLY_BEST * logits.std(1)
            is_wrong = (is_wrong | (token_ids == NO_TOKEN)) & is_finite
            if is_wrong.any():
                raise SelfCheckError(
                    f"wrong result: decodes by a CUDA graph: {int(is_wrong.sum())} of {len(token_ids)} tokens differ "
                    f"from those without one"
                )
        cache[:, :, 1:num_blocks] = 0


def with_short_window(options: Any) -> Any:
    """Return options whose window, if they have one, is shorter than the sequences of a check."""
    return options if options.window is None else replace(options, window=min(options.window, SHORT_WINDOW))


def is_packed(runner: "ModelRunner") -> bool:
    """Return whether layers were packed while they were loaded, so that PyTorch's layers are not there any more."""
    config, backend_class = runner.config, type(runner.backend)
    is_quantised = config.quantization is not None or runner.shape.quantization_config is not None
    pack = getattr(backend_class, "pack_quantised", AttentionBackend.pack_quantised)
    can_pack = pack is not AttentionBackend.pack_quantised and not config.enforce_eager
    return can_pack and (is_quantised or config.load_format == "gguf")
