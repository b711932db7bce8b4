"""Compare sending the K and V of a prompt over a network with computing the prompt.

    python -m labs.calculators.kv_transfer                                    # 100 and 400 Gb/s, 400 TFLOP/s
    python -m labs.calculators.kv_transfer --tokens 32768 --gbits 25 100 --tflops 800

    bytes of a token  =  those of `labs.calculators.kv_bytes`, in bfloat16
    sending           =  tokens · bytes of a token · 8 / (Gb/s · 10⁹)
    FLOP of a token   =  2 · weights  +  tokens · layers · heads · (head size of K + head size of V)
    computing         =  tokens · FLOP of a token / (TFLOP/s · 10¹²)
    break-even        =  the Gb/s at which both take the same time

The second term of the FLOP is attention: a token at position p multiplies with p keys and p values, 2 FLOP for each
value, and p is half of the prompt on average. `weights` are those that a token uses in the layers, without embeddings.
The rates are assumptions: 100 Gb/s is one network port, and 400 TFLOP/s is about 40 % of an H100's peak for bfloat16.
Latencies are left out. No model runs.
"""

import argparse
from dataclasses import dataclass

from labs.calculators.common import print_table
from labs.calculators.kv_bytes import PUBLISHED, CacheShape

BYTES_PER_VALUE = 2  # bfloat16
LLAMA_3_70B = CacheShape("Llama 3 70B", 80, 64, 8, 256)
SHAPES = {shape.name: shape for shape in (*PUBLISHED, LLAMA_3_70B)}


@dataclass(frozen=True)
class PromptCost:
    """What a prompt costs a model: bytes to send, and arithmetic."""

    cache: CacheShape
    num_weights: float
    """Weights that one token uses, without embeddings."""

    @property
    def bytes_per_token(self) -> int:
        return self.cache.values_per_token * BYTES_PER_VALUE

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the floating-point operations for each token of a prompt, on average."""
        cache = self.cache
        return 2 * self.num_weights + num_tokens * cache.num_layers * cache.num_heads * cache.head_values

    def sending_ms(self, num_tokens: int, gbits: float) -> float:
        return 1000 * num_tokens * self.bytes_per_token * 8 / (gbits * 1e9)

    def computing_ms(self, num_tokens: int, tflops: float) -> float:
        return 1000 * num_tokens * self.flops_per_token(num_tokens) / (tflops * 1e12)

    def break_even_gbits(self, num_tokens: int, tflops: float) -> float:
        return self.sending_ms(num_tokens, 1) / self.computing_ms(num_tokens, tflops)


MODELS = [
    PromptCost(SHAPES["Qwen3-0.6B"], 0.44e9),
    PromptCost(SHAPES["Llama 3 70B"], 68.5e9),
    PromptCost(SHAPES["DeepSeek-V3"], 37e9),  # of 671 billion: each token uses some of the experts
]


def rows_of(num_tokens: int, gbits: list[float], tflops: float) -> list[list[str]]:
    """Return a row for each model: bytes and FLOP of a token, milliseconds of a prompt, and the break-even."""
    return [
        [
            model.cache.name,
            f"{model.bytes_per_token:,}",
            f"{model.flops_per_token(num_tokens) / 1e9:,.1f}",
            *[f"{model.sending_ms(num_tokens, rate):,.1f}" for rate in gbits],
            f"{model.computing_ms(num_tokens, tflops):,.1f}",
            f"{model.break_even_gbits(num_tokens, tflops):,.1f} Gb/s",
        ]
        for model in MODELS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Sending K and V of a prompt against computing it.")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--gbits", type=float, nargs="+", default=[100, 400], help="of the network, in Gb/s")
    parser.add_argument("--tflops", type=float, default=400, help="of the device that computes, in TFLOP/s")
    args = parser.parse_args()
    if min(args.tokens, args.tflops, *args.gbits) <= 0:
        parser.error("--tokens, --gbits and --tflops must be above 0")
    header = [
        "model",
        "bytes/token",
        "GFLOP/token",
        *[f"{rate:g} Gb/s" for rate in args.gbits],
        "computed",
        "break-even",
    ]
    print(f"a prompt of {args.tokens:,} tokens, in milliseconds; computed at {args.tflops:g} TFLOP/s\n")
    print_table(header, rows_of(args.tokens, args.gbits, args.tflops))


if __name__ == "__main__":
    main()
