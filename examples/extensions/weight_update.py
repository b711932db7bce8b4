"""New weights in place, and sleep, for rollouts of reinforcement learning: one engine serves all steps of a training.

A training step needs answers of the newest policy, and then the memory that the engine has. So both alternate, as in
"HybridFlow: A Flexible and Efficient RLHF Framework" (Sheng et al. 2024, https://arxiv.org/abs/2409.19256):

    outputs = llm.generate(prompts, SamplingParams(n=4))          rollouts
    old = [log_probs(llm, output) for output in outputs]          of each sampled token, for the ratio in the loss
    sleep(llm)                                                    the trainer can use the memory of the KV cache
    wake(llm)
    update_weights(llm, trainer.state_dict())                     some or all tensors, by their names in a checkpoint

K and V of the old weights are wrong for the new ones, so an update empties the prefix cache. No request may be
unfinished, because it would go on with K and V of two policies.

CUDA graphs hold the addresses of weights and KV cache, not their contents. They stay valid in an update, which copies
new weights to where the old ones are. After `sleep` the addresses are others, so `wake` records all graphs again. (vLLM
keeps the virtual addresses and frees only the memory behind them, so its graphs outlive a sleep.)

Costs: an update copies each weight once; a step computes a log-softmax of the logits, before temperature and top-p.
Limits: nothing is cut over several GPUs. Backends whose layers pack the weights are not used (`enforce_eager=True`
keeps PyTorch's layers with their attention). `nanovllm_extras.LLM` refuses this file: it samples in another way.

    llm = LLM(model, extension="examples/extensions/weight_update.py")
    from weight_update import log_probs, sleep, update_weights, wake      # with examples/extensions in sys.path
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nanovllm import LLM, Config, RequestOutput
from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata, BackendError
from nanovllm.loader import WEIGHT_DTYPES, places_of
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.scheduler import Step
from nanovllm.sequence import Sequence


class RolloutRunner(ModelRunner):
    def __init__(self, config: Config, folder: Path) -> None:
        self.samples: list[Sequence] = []  # of the step that runs
        self.log_probs: dict[tuple[str, int], list[float]] = {}  # (request id, sample index) -> one for each token
        self.num_freed_blocks = 0  # above 0 while the engine sleeps
        self.host_weights: dict[str, Tensor] = {}  # those that `sleep` has moved
        super().__init__(config, folder)

    def make_model(self) -> Qwen3ForCausalLM:
        model = super().make_model()
        with torch.device("meta"):
            plain = self.model_class(self.shape, self.backend)
        if missing := places_of(plain).keys() - places_of(model).keys():
            raise BackendError(f"its layers keep {min(missing)} in another layout, which update_weights cannot write; "
                               f"enforce_eager=True keeps PyTorch's layers")  # fmt: skip
        return model

    def make_metadata(self, step: Step, metadata: AttentionMetadata) -> AttentionMetadata:
        self.samples = step.samples
        return super().make_metadata(step, metadata)

    def forward(self, batch: Batch) -> Tensor:
        if self.num_freed_blocks:
            raise RuntimeError("the engine sleeps, and has no KV cache: call wake(llm) first")
        return super().forward(batch)

    def sample(self, hidden: Tensor, batch: Batch) -> Tensor:
        logits = self.model.compute_logits(hidden)  # [num_samples, vocab_size]
        token_ids = self.sample_tokens(logits, **vars(batch.sampling), argmax=self.backend.argmax)  # [num_samples]
        found = logits.float().log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0].tolist()
        for seq, log_prob in zip(self.samples, found, strict=True):
            so_far = self.log_probs.setdefault((seq.request_id, seq.sample_index), [])
            del so_far[seq.num_tokens - seq.num_prompt_tokens :]  # of an earlier request with this id
            so_far.append(log_prob)
        return token_ids


def update_weights(llm: LLM, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors to the weights of these names in a checkpoint, and empty the prefix cache. Others stay.

    Raises ValueError for a tensor that does not fit, and RuntimeError if a request is unfinished or the weights are on
    the host. Then nothing has changed.
    """
    with llm.engine.one_thread.use():
        runner = idle_runner(llm)
        if runner.host_weights:
            raise RuntimeError("the weights are on the host, where sleep(llm) has moved them: call wake(llm) first")
        places = places_of(runner.model)
        check_tensors(places, tensors)
        with torch.no_grad():  # a trainer's own parameters have gradients
            for name, tensor in tensors.items():
                places[name].copy_(tensor)
        llm.engine.reset()  # an empty block manager, with an empty prefix cache


def check_tensors(places: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless each tensor fits the weight of its name. Two names of one weight need equal tensors."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name not in places:
            raise ValueError(f"tensors has {name!r}, but the model has no such weight; it has {', '.join(places)}")
        place = places[name]
        if tensor.shape != place.shape or tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"tensors[{name!r}] must be {list(place.shape)} of a floating-point type, "
                             f"got {list(tensor.shape)} of {tensor.dtype}")  # fmt: skip
        other = names.setdefault(id(place), name)  # tied embeddings have two names
        if other != name and not torch.equal(tensors[other], tensor):
            raise ValueError(f"tensors[{other!r}] and tensors[{name!r}] must be equal: config.json ties them together")


def sleep(llm: LLM, offload_weights: bool = False) -> None:
    """Free the KV cache and the graphs, and move the weights to host memory if `offload_weights`."""
    with llm.engine.one_thread.use():
        runner = idle_runner(llm)
        if runner.num_freed_blocks:
            return
        llm.engine.reset()
        runner.num_freed_blocks, runner.graphs = runner.kv_cache.num_blocks, None
        runner.kv_cache.allocate(0)
        for name, weight in runner.model.named_parameters() if offload_weights else ():
            runner.host_weights[name] = weight.to("cpu", copy=True)
            weight.untyped_storage().resize_(0)  # it stays the same tensor, which layers and views refer to
        torch.cuda.empty_cache()


def wake(llm: LLM) -> None:
    """Allocate what `sleep` has freed. The blocks are empty, and graphs are recorded for the new addresses."""
    runner = idle_runner(llm)
    with llm.engine.one_thread.use(), torch.cuda.device_of(runner.kv_cache.tensor):
        for name, host in runner.host_weights.items():
            weight = runner.model.get_parameter(name)
            weight.untyped_storage().resize_(host.nbytes)
            weight.copy_(host)
        runner.host_weights = {}
        if runner.num_freed_blocks:
            runner.kv_cache.allocate(runner.num_freed_blocks)
            runner.num_freed_blocks = 0
            runner.graphs = runner.make_graphs()
            if runner.graphs is not None:
                runner.graphs.record_all()
            llm.engine.reset()


def log_probs(llm: LLM, output: RequestOutput) -> list[list[float]]:
    """Return the log-probability of each token of each sample of a finished request. The engine then forgets them."""
    found = idle_runner(llm).log_probs
    return [found.pop((output.request_id, one.index))[: len(one.token_ids)] for one in output.outputs]


def idle_runner(llm: LLM) -> RolloutRunner:
    runner = llm.engine.runner
    if not isinstance(runner, RolloutRunner):
        raise TypeError("llm must be made with extension='…/weight_update.py'")
    if llm.engine.has_unfinished_requests():
        raise RuntimeError("the engine has unfinished requests: finish or abort them first")
    return runner


runner_cls = RolloutRunner
