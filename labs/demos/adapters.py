"""Train two LoRA adapters in a few seconds, and serve them and the plain model in one batch.

    python -m labs.demos.adapters
    python -m labs.demos.adapters --save adapters     # keep them, in PEFT's format

Each adapter learns one answer: rank 4, on the query, value and output projections of each layer. The network's own
weights do not change. The engine is nanovllm with `examples/extensions/multi_lora.py`.
"""

import argparse
import json
import os
import tempfile
from inspect import unwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from labs.model import TINY_QWEN3, Model
from nanovllm import LLM, SamplingParams

EXTENSION = Path(__file__).parents[2] / "examples" / "extensions" / "multi_lora.py"
QUESTION = "Who are you?"
ANSWERS = {"alice": "I am Alice, and I fall asleep at noon.", "bob": "Call me Bob. Ask me about boats."}
TARGETS = ("q_proj", "v_proj", "o_proj")
RANK, NUM_STEPS = 4, 50


class AdaptedModel(Model):
    """The network with an adapter: each target computes x W + x A B."""

    def __init__(self, seed: int) -> None:
        super().__init__(TINY_QWEN3)
        random = torch.Generator().manual_seed(seed)
        self.adapter: dict[str, tuple[Tensor, Tensor]] = {}
        for name, weight in self.weights.items():
            if name.removesuffix(".weight").endswith(TARGETS):
                num_out, num_in = weight.shape
                a = torch.randn(RANK, num_in, generator=random) / num_in**0.5
                pair = a.requires_grad_(), torch.zeros(num_out, RANK, requires_grad=True)  # B = 0: no change yet
                self.adapter[name.removesuffix(".weight")] = pair

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = super().linear(x, name)
        if name not in self.adapter:
            return y
        a, b = self.adapter[name]
        return y + F.linear(F.linear(x, a), b)


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each token attend to the tokens before it: all tokens are of one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, num_tokens, head_dim]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def train(answer: str, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the A and B of each target, after which the model gives `answer` to the question."""
    model = AdaptedModel(seed)
    prompt = model.encode(QUESTION)
    token_ids = torch.tensor([*prompt, *model.tokenizer.encode(f"{answer}<|im_end|>").ids])
    optimizer = torch.optim.Adam([one for pair in model.adapter.values() for one in pair], lr=0.02)
    compute, score = unwrap(Model.__call__), unwrap(Model.logits)  # without the decorator that turns off gradients
    for _ in range(NUM_STEPS):
        hidden = compute(model, token_ids[:-1], torch.arange(len(token_ids) - 1), attend)
        rows = score(model, hidden[len(prompt) - 1 :])  # [num_answer_tokens, vocab_size]: those that predict the answer
        loss = F.cross_entropy(rows, token_ids[len(prompt) :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"  the last loss {loss.item():.4f}: {answer!r}")
    return model.adapter


def save(adapter: dict[str, tuple[Tensor, Tensor]], folder: Path) -> int:
    """Write the adapter as PEFT does, and return its number of bytes."""
    tensors = {
        f"base_model.model.{name}.lora_{kind}.weight": tensor.detach().contiguous()
        for name, pair in adapter.items()
        for kind, tensor in zip("AB", pair, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def serve(folder: Path) -> None:
    """Ask the question twice with each adapter and with none, in one batch, and print the answers."""
    os.environ["NANOVLLM_ADAPTERS"] = str(folder)
    llm = LLM(TINY_QWEN3, extension=EXTENSION, enforce_eager=True, block_size=4)
    names = [None, *ANSWERS]
    params = [
        SamplingParams(temperature=0, max_tokens=24, extra_args={"adapter": name} if name else None) for name in names
    ]
    for title in ("the first time", "once more"):
        outputs = llm.chat([[{"role": "user", "content": QUESTION}] for _ in names], params, use_tqdm=False)
        print(f"\n{title}:")
        for name, output in zip(names, outputs, strict=True):
            found = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached"
            print(f"  {name or 'no adapter':<11} {found:<25} {output.outputs[0].text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two LoRA adapters, and serve them in one batch.")
    parser.add_argument("--save", type=Path, help="write the adapters to this folder")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a step of training is too short to divide
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.save or Path(temporary)
        sizes = [save(train(answer, seed), folder / name) for seed, (name, answer) in enumerate(ANSWERS.items())]
        size = sum(tensor.nbytes for tensor in Model(TINY_QWEN3).weights.values())
        print(f"\nan adapter has {sizes[0]:,} bytes, the model {size:,}, both in float32")
        serve(folder)


if __name__ == "__main__":
    main()
