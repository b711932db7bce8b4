"""Measure what LoRA adapters cost: decodes of 8 rows with none, one or 8 adapters, and a prompt with and without one.

    python -m benchmarks.lora

The model has the shape of Qwen3-0.6B and random weights. The adapters are random too, of rank 16, once for all seven
projections of each layer and once for q and v only. An engine without `enable_lora` and one with it take turns, and the
least time of each case counts. On a machine that others use, take one thread and its processor time:

    OMP_NUM_THREADS=1 python -m benchmarks.lora --processor-time
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common import QWEN3_06B, describe_machine
from nanovllm_extras import Config, LLMEngine, LoRARequest, SamplingParams

NUM_ROWS = 8
TARGETS = {
    "all seven": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "q and v": ["q_proj", "v_proj"],
}

Cases = dict[str, tuple[LLMEngine, list[LoRARequest | None]]]
"""What is measured -> the engine, and the adapter of each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of LoRA adapters.")
    parser.add_argument("--model", type=Path, default=QWEN3_06B, help="folder (default: Qwen3-0.6B's shape)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="decode steps of each measurement")
    parser.add_argument("--processor-time", action="store_true", help="of all threads, instead of the time that passes")
    parser.add_argument("--json", type=Path, help="write the figures and the machine to this file")
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    options = {"model": args.model, "load_format": "dummy", "dtype": args.dtype, "skip_tokenizer_init": True}
    options |= {"max_model_len": 2 * args.prompt_len, "max_num_seqs": NUM_ROWS, "enable_prefix_caching": False}
    plain = LLMEngine(Config(**options))
    machine, figures = describe_machine(str(plain.runner.device)), []
    print(machine)
    engine = LLMEngine(Config(**options, enable_lora=True, max_loras=NUM_ROWS, max_lora_rank=args.rank))
    with tempfile.TemporaryDirectory() as root:
        for name, targets in TARGETS.items():
            adapters: list[LoRARequest | None] = list(make_adapters(engine, Path(root) / name, args.rank, targets))
            cases: Cases = {
                "8 rows, none": (engine, [None] * NUM_ROWS),
                "8 rows, one adapter": (engine, adapters[:1] * NUM_ROWS),
                "8 rows, 8 adapters": (engine, adapters),
            }
            figures += report(name, cases, plain, 16, args.steps, args.rounds, clock)
            cases = {"a prompt, none": (engine, [None]), "a prompt, one adapter": (engine, adapters[:1])}
            figures += report(name, cases, plain, args.prompt_len, 0, args.rounds, clock)
            for adapter in adapters:
                assert adapter is not None
                engine.remove_lora(adapter.lora_int_id)
    if args.json is not None:
        asked = {**vars(args), "model": args.model.name}
        del asked["json"]
        args.json.write_text(json.dumps({"machine": machine, "options": asked, "figures": figures}, indent=1) + "\n")


def report(
    name: str,
    cases: Cases,
    plain: LLMEngine,
    prompt_len: int,
    num_steps: int,
    num_rounds: int,
    clock: Callable[[], float],
) -> list[dict[str, object]]:
    """Print and return the time of each case, and its share of the time of an engine without `enable_lora`."""
    without: list[LoRARequest | None] = [None] * len(next(iter(cases.values()))[1])
    times: dict[str, list[float]] = {case: [] for case in ("without", *cases)}
    for _ in range(num_rounds):
        for case, (engine, adapters) in {"without": (plain, without), **cases}.items():
            times[case] += measure(engine, adapters, prompt_len, num_steps, clock)
    base = min(times.pop("without"))
    rows: list[dict[str, object]] = []
    for case, found in times.items():
        rows.append({"adapters of": name, "case": case, "ratio": min(found) / base, "without_ms": 1e3 * base})
        print(f"{name:>9}: {case:<22} {min(found) / base:.3f} of {1e3 * base:.1f} ms without", flush=True)
    return rows


def measure(
    engine: LLMEngine, adapters: list[LoRARequest | None], prompt_len: int, num_steps: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of each decode step, or of the prompt if there are no steps."""
    params = SamplingParams(temperature=0, max_tokens=prompt_len, ignore_eos=True)
    for i, adapter in enumerate(adapters):
        prompt = [(7 * i + j) % 1000 for j in range(prompt_len)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params, lora_request=adapter)
    seconds = []
    for _ in range(1 + num_steps):
        start = clock()
        engine.step()
        seconds.append(clock() - start)
    for i in range(len(adapters)):
        engine.abort_request(str(i))
    return seconds[1:] or seconds


def make_adapters(engine: LLMEngine, root: Path, rank: int, targets: list[str]) -> Iterator[LoRARequest]:
    """Write random adapters, load them, and yield the requests for them."""
    shape = engine.runner.shape
    q_size, kv_size = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, q_size), "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size), "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    for number in range(1, NUM_ROWS + 1):
        folder = root / str(number)
        folder.mkdir(parents=True)
        tensors = {}
        for layer in range(shape.num_hidden_layers):
            for module, (num_inputs, num_outputs) in sizes.items():
                if module.partition(".")[2] in targets:
                    path = f"base_model.model.model.layers.{layer}.{module}.lora_"
                    tensors[f"{path}A.weight"] = torch.randn(rank, num_inputs, dtype=torch.bfloat16) / num_inputs**0.5
                    tensors[f"{path}B.weight"] = torch.randn(num_outputs, rank, dtype=torch.bfloat16) / rank**0.5
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        adapter = LoRARequest(f"{root.name} {number}", number, folder)
        engine.add_lora(adapter)
        yield adapter


if __name__ == "__main__":
    main()
