"""Chapter 15: predict from which length on a state takes less memory than K and V."""

import torch

from labs.learn.predict import Predict, WrongNumber
from labs.learn.texts import Text
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.layer_inputs import StateShape

STATE = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)  # bytes
KV, KV_OF_HYBRID = 28 * 2 * 8 * 128 * 2, 6 * 2 * 2 * 256 * 2  # bytes of a token


def bytes_of_token(num_layers: int, num_kv_heads: int, head_dim: int) -> float:
    """Return the bytes of a token in a real cache, bfloat16."""
    backend = TorchAttention(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)
    return KVCache(backend, num_layers, torch.bfloat16, torch.device("cpu")).bytes_per_block / 16


def measure() -> float:
    """Return the length at which both take the same memory, with the sizes of the engine's own caches."""
    state = StateShape(num_layers=18, conv=(3, 6144), recurrent=(16, 128, 128)).bytes_per_slot(torch.bfloat16)
    return state / (bytes_of_token(28, 8, 128) - bytes_of_token(6, 2, 256))


EXERCISES = (
    Predict(
        name="predict_states",
        chapter="15_state_beside_pages",
        title=Text("Predict: from which length a state is smaller", "预测：从多长起，状态更省内存"),
        task=Text(
            "A sequence of Qwen3.5-0.8B has a state in 18 layers, and K and V in the other 6. A state has 16 heads of\n"
            "128 × 128 numbers in float32, and 3 × 6,144 numbers in bfloat16. K and V have 2 KV heads of 256 numbers\n"
            "in bfloat16 for each token.\n\n"
            "A sequence of Qwen3-0.6B has only K and V, in 28 layers with 8 KV heads of 128 numbers in bfloat16.\n\n"
            "At which number of tokens do both sequences take the same memory? Set ANSWER to a number or an\n"
            "expression. It may be wrong by 5 %. Example: a state of 1,000 bytes, and 10 bytes for each token instead\n"
            "of 60, give 1,000 / (60 - 10) = 20.",
            "Qwen3.5-0.8B 的一个序列，在 18 层里各有一个状态，在其余 6 层里有 K 和 V。一个状态是 16 个头，每个头\n"
            "128 × 128 个 float32 数，另加 3 × 6,144 个 bfloat16 数。K 和 V 用 bfloat16，每个 token 有 2 个 KV 头，\n"
            "每个头 256 个数。\n\n"
            "Qwen3-0.6B 的一个序列只有 K 和 V：28 层，8 个 KV 头，每个头 128 个数，bfloat16。\n\n"
            "到多少个 token 时，两个序列占用的内存一样多？把 ANSWER 设为一个数字或表达式，允许 5 % 的误差。例子：\n"
            "状态 1,000 字节，每个 token 从 60 字节变成 10 字节，则是 1,000 / (60 - 10) = 20。",
        ),
        hints=(
            Text(
                "Write both sizes as formulas of the number of tokens. One begins high and rises slowly.",
                "把两边的大小都写成 token 数的式子：一边起点高，但涨得慢。",
            ),
            Text(
                "A token of Qwen3-0.6B has 112 KiB, and one of Qwen3.5-0.8B has 12 KiB.",
                "Qwen3-0.6B 的一个 token 是 112 KiB，Qwen3.5-0.8B 是 12 KiB。",
            ),
            Text(
                "The states of all 18 layers are 18.6 MiB. Divide them by the 100 KiB that each token saves.",
                "18 层的状态一共 18.6 MiB。用它除以每个 token 省下的 100 KiB。",
            ),
        ),
        formula=(
            "state = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)  # layers, numbers of both parts, bytes\n"
            "hybrid = 6 * 2 * 2 * 256 * 2  # layers, K and V, KV heads, head size, bytes\n"
            "attention = 28 * 2 * 8 * 128 * 2\n"
            "ANSWER = state / (attention - hybrid)\n"
        ),
        measure=measure,
        unit=Text("tokens", "个 token"),
        explain=lambda value: Text(
            f"19,537,920 bytes / (114,688 - 12,288) bytes = {value:.0f} tokens. A conversation is soon longer, and "
            "from there on each token saves 100 KiB. For many short requests the states are the larger part.",
            f"19,537,920 字节 /（114,688 - 12,288）字节 = {value:.0f} 个 token。一次对话很快就超过这个长度，此后每个 "
            "token 省 100 KiB。请求多而短时，占内存的主要是状态。",
        ),
        mistakes=(
            WrongNumber(
                Text("K and V of the hybrid are forgotten", "漏了混合模型自己的 K 和 V"),
                Text(
                    "Six layers of the hybrid keep K and V too: 12 KiB for each token. So a token saves 100 KiB, not "
                    "112.",
                    "混合模型有六层也保留 K 和 V：每个 token 12 KiB。所以每个 token 省 100 KiB，不是 112 KiB。",
                ),
                STATE / KV,
            ),
            WrongNumber(
                Text("All numbers of a state in two bytes", "状态的数都按两字节算"),
                Text(
                    "The matrices are float32, 4 bytes for each number: small changes add up over many tokens.",
                    "矩阵是 float32，每个数 4 字节：很小的改动要在许多 token 上累积。",
                ),
                18 * (16 * 128 * 128 * 2 + 3 * 6144 * 2) / (KV - KV_OF_HYBRID),
            ),
            WrongNumber(
                Text("A state in all 24 layers", "24 层都算上了状态"),
                Text(
                    "Only 18 of the 24 layers have a state. The other 6 have K and V instead.",
                    "24 层里只有 18 层有状态，其余 6 层有的是 K 和 V。",
                ),
                STATE / 18 * 24 / (KV - KV_OF_HYBRID),
            ),
            WrongNumber(
                Text("One layer only", "只算了一层的状态"),
                Text("Each of the 18 layers has a state of its own.", "18 层各有自己的状态。"),
                STATE / 18 / (KV - KV_OF_HYBRID),
            ),
            WrongNumber(
                Text("K without V", "只算了 K"),
                Text(
                    "A token has K and V, in both models: twice the bytes.",
                    "两个模型的每个 token 都既有 K 又有 V：字节数要乘以 2。",
                ),
                2 * STATE / (KV - KV_OF_HYBRID),
            ),
            WrongNumber(
                Text("One head only", "只算了一个头的状态"),
                Text(
                    "A layer has 16 heads, and each keeps a matrix of 128 × 128 numbers.",
                    "一层有 16 个头，每个头都有一个 128 × 128 的矩阵。",
                ),
                18 * (128 * 128 * 4 + 3 * 6144 * 2) / (KV - KV_OF_HYBRID),
            ),
        ),
    ),
)
