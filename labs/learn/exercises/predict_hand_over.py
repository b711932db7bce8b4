"""Chapter 14: predict what a hand-over costs, compared with the computation of its prompt."""

import torch

from labs.learn.predict import Predict, WrongNumber
from labs.learn.texts import Text
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention

NUM_TOKENS = 2000
NUM_WEIGHTS = 0.6e9
BITS_PER_S = 25e9  # of the network
FLOPS = 100e12  # floating-point operations per second


def measure() -> float:
    """Return the time for sending divided by the time for computing, with the block size in bytes of a real cache."""
    backend = TorchAttention(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16)
    cache = KVCache(backend, num_layers=28, dtype=torch.bfloat16, device=torch.device("cpu"))
    num_bytes = NUM_TOKENS / 16 * cache.bytes_per_block
    return (8 * num_bytes / BITS_PER_S) / (2 * NUM_WEIGHTS * NUM_TOKENS / FLOPS)


RIGHT = 2 * 28 * 8 * 128 * 2 * 8 / BITS_PER_S / (2 * NUM_WEIGHTS / FLOPS)
EXERCISES = (
    Predict(
        name="predict_hand_over",
        chapter="14_kv_beyond_the_pool",
        title=Text("Predict: the cost of a hand-over", "预测：交接一个提示词的代价"),
        task=Text(
            "A prompt of 2,000 tokens is computed by one engine and decoded by another, so its K and V are sent\n"
            "over a network of 25 Gbit/s. How many times as long as the computation of the prompt does sending\n"
            "take?\n\n"
            "The model has the shape of Qwen3-0.6B: 28 layers, 16 query heads, 8 KV heads, head size 128; K and V\n"
            "are bfloat16. The computation takes 2 floating-point operations for each of 0.6 billion weights and\n"
            "each token (attention left out), and the device does 100 × 10¹² of them per second.\n\n"
            "Set ANSWER to sending time / computing time. If sending took 2 ms and computing 8 ms, it would be\n"
            "0.25. It may be wrong by 5 %.",
            "一个 2,000 个 token 的提示词，由一个引擎计算，由另一个引擎解码，所以它的 K 和 V 要经过 25 Gbit/s 的网\n"
            "络发送。发送所用的时间是计算提示词的多少倍？\n\n"
            "模型是 Qwen3-0.6B 的形状：28 层，16 个查询头，8 个 KV 头，head size 128；K 和 V 用 bfloat16。计算时，\n"
            "每个 token、6 亿个权重中的每一个需要 2 次浮点运算（注意力不计），设备每秒做 100 × 10¹² 次。\n\n"
            "把 ANSWER 设为 发送时间 / 计算时间。如果发送用 2 ms，计算用 8 ms，它就是 0.25。允许 5 % 的误差。",
        ),
        hints=(
            Text(
                "Both times grow with the number of tokens, so one token is enough for the ratio.",
                "两个时间都与 token 数成正比，所以算一个 token 就能得到比值。",
            ),
            Text(
                "Bytes of a token: 2 (K and V) × layers × KV heads × head size × 2 bytes. A byte has 8 bits.",
                "一个 token 的字节数：2（K 和 V）× 层数 × KV 头数 × head size × 2 字节。一个字节有 8 位。",
            ),
            Text(
                "A token has 114,688 bytes, and is computed in 2 × 0.6 × 10⁹ / (100 × 10¹²) s = 12 µs.",
                "一个 token 有 114,688 字节，计算它需要 2 × 0.6 × 10⁹ / (100 × 10¹²) s = 12 µs。",
            ),
        ),
        formula=(
            "num_tokens = 2000\n"
            "num_bytes = 2 * 28 * 8 * 128 * 2 * num_tokens  # K and V, layers, KV heads, head size, bytes\n"
            "sending_s = 8 * num_bytes / 25e9\n"
            "computing_s = 2 * 0.6e9 * num_tokens / 100e12\n"
            "ANSWER = sending_s / computing_s\n"
        ),
        measure=measure,
        unit=Text("times", "倍"),
        explain=lambda value: Text(
            f"114,688 bytes × 2,000 = 229 MB take 73.4 ms at 3.125 GB/s, and the computation 24 ms: {value:.2f} "
            f"times. A "
            "longer prompt does not change this: both times grow with it. Over 50 GB/s, sending takes 4.6 ms, and "
            "can be "
            "hidden: the blocks of one layer are sent while the next layer is computed.",
            f"114,688 字节 × 2,000 = 229 MB，以 3.125 GB/s 发送要 73.4 ms，计算要 24 ms：{value:.2f} 倍。"
            "提示词再长，比值也不变：两个时间一起增长。换成 50 GB/s 的网络，发送只要 4.6 ms，而且可以藏在计算里："
            "计算下一层的同时，发送这一层的块。",
        ),
        mistakes=(
            WrongNumber(
                Text("Bits taken for bytes", "把位当成了字节"),
                Text(
                    "25 Gbit/s are 3.125 GB/s: networks are measured in bits, memory in bytes.",
                    "25 Gbit/s 等于 3.125 GB/s：网络按位计，内存按字节计。",
                ),
                RIGHT / 8,
            ),
            WrongNumber(
                Text("Half of the bytes", "只算了一半的字节"),
                Text(
                    "Each token has K and V, and each of their values has 2 bytes in bfloat16. One of these two "
                    "factors "
                    "is missing.",
                    "每个 token 既有 K 又有 V，每个值在 bfloat16 里占 2 字节。这两个因数漏了一个。",
                ),
                RIGHT / 2,
            ),
            WrongNumber(
                Text("Query heads instead of KV heads", "用了查询头数而不是 KV 头数"),
                Text(
                    "Only K and V are kept and sent: 8 KV heads, not 16 query heads. (Or one operation was counted for "
                    "each weight; a multiplication and an addition are two.)",
                    "保存和发送的只有 K 和 V：8 个 KV 头，不是 16 个查询头。（也可能是每个权重只算了一次运算；"
                    "乘和加是两次。）",
                ),
                2 * RIGHT,
            ),
            WrongNumber(
                Text("Only one layer", "只算了一层"),
                Text(
                    "Each of the 28 layers has K and V of its own.",
                    "28 层中的每一层都有自己的 K 和 V。",
                ),
                RIGHT / 28,
            ),
            WrongNumber(
                Text("The ratio is turned round", "比值写反了"),
                Text(
                    "The question is sending time / computing time.",
                    "题目问的是 发送时间 / 计算时间。",
                ),
                1 / RIGHT,
            ),
            WrongNumber(
                Text("The time for one token against that for the prompt", "一个 token 的时间与整个提示词的时间相比"),
                Text(
                    "All 2,000 tokens are sent, and all 2,000 are computed.",
                    "发送的是全部 2,000 个 token，计算的也是全部 2,000 个。",
                ),
                RIGHT * NUM_TOKENS,
            ),
        ),
    ),
)
