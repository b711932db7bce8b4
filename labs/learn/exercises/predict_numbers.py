"""Predict three numbers: bytes of a cached token, users that fit into memory, and tokens per second of a machine."""

import torch

from labs import one_file
from labs.learn.answers import load
from labs.learn.exercises import step_time
from labs.learn.predict import Predict, WrongNumber
from labs.learn.texts import Text
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention

BLOCK_SIZE = 16


def measure_kv_bytes() -> float:
    """Return the bytes that the engine's own cache allocates for a token of Qwen3-0.6B."""
    return block_bytes(num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128) / BLOCK_SIZE


def block_bytes(num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    backend = TorchAttention(num_heads, num_kv_heads, head_dim, block_size=BLOCK_SIZE)
    return KVCache(backend, num_layers, torch.bfloat16, torch.device("cpu")).bytes_per_block


def measure_users() -> float:
    """Admit users with 1,000 tokens to a block manager, until no blocks are left."""
    for_cache = int(0.9 * 40e9) - 2 * 13_000_000_000
    blocks = one_file.BlockManager(for_cache // block_bytes(40, 40, 40, 128), BLOCK_SIZE)
    num_users = 0
    while blocks.try_admit(one_file.Sequence([num_users] * 1000, 1000, 1)):
        num_users += 1
    return num_users


def measure_decode_rate() -> float:
    """Return tokens per second of 8 sequences, by the solution of the exercise `step_time`."""
    answer = load(step_time.SOLUTION, "step time")
    model = answer.Model(8_000_000_000, 32, 32, 8, 128, 2)
    machine = answer.Machine(1_555_000_000_000, 312_000_000_000_000)
    return float(8 / answer.least_seconds(model, machine, [16_000] * 8))


KV_BYTES = Predict(
    name="predict_kv_bytes",
    chapter="02_kv_cache",
    title=Text("Predict: bytes of a cached token", "预测：缓存一个 token 要多少字节"),
    task=Text(
        "Qwen3-0.6B has 28 layers, 16 query heads, 8 KV heads, and heads of 128 dimensions. Its KV cache is in\n"
        "bfloat16, 2 bytes a value. How many bytes does one token take in the cache, in all layers together?\n"
        "\n"
        "Chapter 2 has this number in a table: set ANSWER before you read on there. Your first prediction is kept.\n"
        "For a smaller model with 2 layers, 2 query heads, 1 KV head and 4 dimensions, the answer would be 32. Give\n"
        "bytes, not KiB.",
        "Qwen3-0.6B 有 28 层、16 个查询头、8 个 KV 头，每个头 128 维。KV cache 用 bfloat16，每个值 2 字节。\n"
        "一个 token 在所有层的缓存里一共占多少字节？\n"
        "\n"
        "第 2 章的一张表里有这个数：先写下 ANSWER，再接着读。第一次预测会保留下来。\n"
        "如果是一个小模型，2 层、2 个查询头、1 个 KV 头、4 维，答案就是 32。单位是字节，不是 KiB。",
    ),
    hints=(
        Text(
            "What is kept of a token in one layer? A key and a value for each KV head.",
            "一个 token 在一层里保留什么？每个 KV 头一个键、一个值。",
        ),
        Text(
            "Multiply: K and V, layers, KV heads, dimensions of a head, bytes of a value.",
            "把这些相乘：K 和 V、层数、KV 头数、每个头的维数、每个值的字节数。",
        ),
        Text("The factors are 2, 28, 8, 128 and 2.", "各个因子是 2、28、8、128 和 2。"),
    ),
    formula="ANSWER = 2 * 28 * 8 * 128 * 2\n",
    measure=measure_kv_bytes,
    unit=Text("bytes", "字节"),
    explain=lambda right: Text(
        f"2 (K and V) · 28 layers · 8 KV heads · 128 dimensions · 2 bytes = {right:,.0f} bytes, 112 KiB. The engine's "
        "cache for this model allocates the same.",
        f"2（K 和 V）· 28 层 · 8 个 KV 头 · 128 维 · 2 字节 = {right:,.0f} 字节，即 112 KiB。"
        "引擎为这个模型分配的缓存也是这么多。",
    ),
    mistakes=(
        WrongNumber(
            Text("Twice as many: query heads, or float32", "多了一倍：查询头，或 float32"),
            Text(
                "Queries are not kept: count the 8 KV heads, not the 16 query heads. And a value in bfloat16 takes 2 "
                "bytes, not 4.",
                "查询不保留：要算 8 个 KV 头，不是 16 个查询头。另外，bfloat16 的一个值占 2 字节，不是 4 字节。",
            ),
            2 * 28 * 16 * 128 * 2,
        ),
        WrongNumber(
            Text("A factor of 2 is missing", "少乘了一个 2"),
            Text(
                "Your number is 28 layers · 8 KV heads · 128 dimensions · 2. If your 2 is the bytes of a "
                "value, you have counted K only: a token also has V. If it is K and V, you have counted 1 "
                "byte for a value: bfloat16 takes 2.",
                "你的数是 28 层 · 8 个 KV 头 · 128 维 · 2。"
                "如果这个 2 是每个值的字节数，就只算了 K：每个 token 还有 V。"
                "如果这个 2 指 K 和 V，就把每个值算成了 1 字节：bfloat16 是 2 字节。",
            ),
            28 * 8 * 128 * 2,
        ),
        WrongNumber(
            Text("Both factors of 2 are missing", "两个 2 都没有乘"),
            Text(
                "A token has a key and a value, and each of their values takes 2 bytes.",
                "一个 token 有一个键和一个值，其中每个数占 2 字节。",
            ),
            28 * 8 * 128,
        ),
        WrongNumber(
            Text("One layer only", "只算了一层"),
            Text("Each of the 28 layers keeps its own K and V.", "28 层各有自己的 K 和 V。"),
            2 * 8 * 128 * 2,
        ),
        WrongNumber(
            Text("Bits instead of bytes", "算成了比特"),
            Text("A value takes 16 bits, which are 2 bytes.", "一个值是 16 比特，也就是 2 字节。"),
            2 * 28 * 8 * 128 * 16,
        ),
        WrongNumber(
            Text("KiB instead of bytes", "写成了 KiB"),
            Text("112 KiB is right; the question asks for bytes.", "112 KiB 是对的；但题目问的是字节数。"),
            112,
        ),
    ),
)

USERS = Predict(
    name="predict_users",
    chapter="02_kv_cache",
    title=Text("Predict: users that fit into memory", "预测：显存能容纳多少用户"),
    task=Text(
        "An A100 has 40 GB of memory (1 GB = 10⁹ bytes). The engine may use 90 % of it for weights and KV cache.\n"
        "The model has 13 billion weights, 40 layers, and 40 heads of 128 dimensions, each with its own K and V.\n"
        "Weights, K and V are in bfloat16, 2 bytes a value. Each user has 1,000 tokens in the cache, in blocks of 16\n"
        "tokens. How many users fit at the same time?",
        "一块 A100 有 40 GB 显存（1 GB = 10⁹ 字节），引擎最多用其中的 90% 存放权重和 KV cache。\n"
        "模型有 130 亿个权重，40 层，40 个 128 维的头，每个头都有自己的 K 和 V。权重、K 和 V 都是 bfloat16，\n"
        "每个值 2 字节。每个用户在缓存里有 1,000 个 token，每 16 个 token 一块。同时能容纳多少个用户？",
    ),
    hints=(
        Text("Memory for the cache = 90 % of the memory - weights.", "留给缓存的内存 = 90% 的显存 - 权重。"),
        Text(
            "The weights take 26 GB, so 10 GB are left. A token takes 2 · 40 · 40 · 128 · 2 bytes.",
            "权重占 26 GB，还剩 10 GB。一个 token 占 2 · 40 · 40 · 128 · 2 字节。",
        ),
        Text(
            "A user has 63 blocks of 16 · 819,200 bytes. How often do these fit into 10 · 10⁹ bytes?",
            "一个用户占 63 块，每块 16 · 819,200 字节。10 · 10⁹ 字节里能放几份？",
        ),
    ),
    formula=(
        "token_bytes = 2 * 40 * 40 * 128 * 2\nnum_blocks = (36 * 10**9 - 2 * 13 * 10**9) // (16 * token_bytes)\n"
        "ANSWER = num_blocks // 63  # 63 blocks hold 1,000 tokens\n"
    ),
    measure=measure_users,
    unit=Text("users", "个用户"),
    explain=lambda right: Text(
        "36 GB - 26 GB of weights leave 10 GB. A token takes 819,200 bytes, and a block 13.1 MB: 762 blocks. A user "
        f"has 63 blocks, so a block manager admits {right:.0f} users, and then refuses the next one.",
        "36 GB 减去 26 GB 权重，剩 10 GB。一个 token 占 819,200 字节，一块占 13.1 MB，共 762 块。一个用户要 63 块，"
        f"所以块管理器接纳了 {right:.0f} 个用户，拒绝了下一个。",
    ),
    mistakes=(
        WrongNumber(
            Text("The weights are forgotten", "忘了权重"),
            Text(
                "The weights take 26 of the 36 GB: 13 billion · 2 bytes.", "36 GB 里有 26 GB 是权重：130 亿 · 2 字节。"
            ),
            43,
        ),
        WrongNumber(
            Text("The weights take half", "权重少算了一半"),
            Text(
                "13 billion weights in bfloat16 are 26 GB, not 13 GB.", "130 亿个 bfloat16 权重是 26 GB，不是 13 GB。"
            ),
            27,
        ),
        WrongNumber(
            Text("Half of a token's bytes", "一个 token 的字节数少了一半"),
            Text(
                "A token has K and V, two values for each head, layer and dimension, and each takes 2 bytes.",
                "每个 token 有 K 和 V：每头、每层、每维两个值，每个值 2 字节。",
            ),
            24,
        ),
        WrongNumber(
            Text("All of the memory", "用了全部显存"),
            Text("The engine may use 90 % of 40 GB, which is 36 GB.", "引擎只能用 40 GB 的 90%，即 36 GB。"),
            16.5,  # 16 in blocks, 17 without
        ),
        WrongNumber(
            Text("One user only", "只够一个用户"),
            Text(
                "A user's 1,000 tokens take 0.8 GB, not 10 GB. Divide the memory for the cache by the bytes of a user.",
                "一个用户的 1,000 个 token 占 0.8 GB，不是 10 GB。用留给缓存的内存除以一个用户的字节数。",
            ),
            1,
        ),
        WrongNumber(
            Text("Tokens instead of users", "算成了 token 数"),
            Text(
                "This number of tokens fits. Divide by the tokens of a user.",
                "这是能容纳的 token 数，还要除以每个用户的 token 数。",
            ),
            762 * 16,
        ),
    ),
)

DECODE_RATE = Predict(
    name="predict_decode_rate",
    chapter="03_what_a_step_waits_for",
    title=Text("Predict: tokens per second at most", "预测：每秒最多多少个 token"),
    task=Text(
        "A GPU reads 1,555 GB/s (1 GB = 10⁹ bytes) and computes 312 TFLOP/s, both at the same time. The model has 8\n"
        "billion weights in bfloat16, 2 bytes each. A token of its KV cache takes 131,072 bytes. 8 sequences decode "
        "in\n"
        "each step, and each reads 16,000 cached tokens. How many tokens per second do all sequences together get at\n"
        "most? (The arithmetic of such a step takes 0.6 ms.)",
        "一块 GPU 每秒读 1,555 GB（1 GB = 10⁹ 字节），每秒算 312 TFLOP，两者同时进行。模型有 80 亿个 bfloat16 权重，\n"
        "每个 2 字节。KV cache 里一个 token 占 131,072 字节。每一步有 8 个序列解码，每个序列读 16,000 个缓存的 "
        "token。\n"
        "所有序列加起来，每秒最多得到多少个 token？（这样一步的运算要 0.6 ms。）",
    ),
    hints=(
        Text(
            "How many bytes does a step read, and how long does that take? Each step gives 8 tokens.",
            "一步读多少字节，要多久？每一步得到 8 个 token。",
        ),
        Text(
            "Weights: 16 GB. KV cache: 8 · 16,000 · 131,072 bytes = 16.8 GB.",
            "权重 16 GB。KV cache：8 · 16,000 · 131,072 字节 = 16.8 GB。",
        ),
        Text(
            "The step takes 32.8 GB / 1,555 GB/s = 21 ms, which is longer than the 0.6 ms of arithmetic.",
            "一步要 32.8 GB / 1,555 GB/s = 21 ms，比 0.6 ms 的运算长。",
        ),
    ),
    formula="seconds = (8e9 * 2 + 8 * 16_000 * 131_072) / 1555e9\nANSWER = 8 / seconds\n",
    measure=measure_decode_rate,
    unit=Text("tokens/s", "token/s"),
    explain=lambda right: Text(
        "A step reads 16 GB of weights and 8 · 16,000 · 131,072 bytes = 16.8 GB of K and V. That takes 32.8 / 1,555 "
        "s = "
        f"21.1 ms, and gives 8 tokens: 8 / 0.0211 s = {right:.0f} tokens per second.",
        "一步读 16 GB 权重和 8 · 16,000 · 131,072 字节 = 16.8 GB 的 K 和 V，要 32.8 / 1,555 秒 = 21.1 ms，得到 8 个 "
        "token："
        f"8 / 0.0211 秒 = 每秒 {right:.0f} 个 token。",
    ),
    mistakes=(
        WrongNumber(
            Text("The KV cache is forgotten", "忘了 KV cache"),
            Text(
                "The step also reads K and V of 8 · 16,000 tokens, which are more bytes than the weights.",
                "这一步还要读 8 · 16,000 个 token 的 K 和 V，比权重还多。",
            ),
            8 / (16e9 / 1555e9),
        ),
        WrongNumber(
            Text("The KV cache is counted once", "KV cache 只算了一次"),
            Text(
                "Each of the 8 sequences has its own KV cache, and reads it. Only the weights are shared.",
                "8 个序列各有自己的 KV cache，都要读。共用的只有权重。",
            ),
            8 / ((16e9 + 16_000 * 131_072) / 1555e9),
        ),
        WrongNumber(
            Text("Tokens of one sequence", "只算了一个序列的 token"),
            Text("A step gives one token to each of the 8 sequences.", "每一步，8 个序列各得到一个 token。"),
            1 / ((16e9 + 8 * 16_000 * 131_072) / 1555e9),
        ),
        WrongNumber(
            Text("The weights are read for each sequence", "每个序列都读了一遍权重"),
            Text(
                "A step reads the weights once for all sequences: 16 GB, not 128 GB.",
                "一步为所有序列只读一遍权重：16 GB，不是 128 GB。",
            ),
            8 / ((8 * 16e9 + 8 * 16_000 * 131_072) / 1555e9),
        ),
        WrongNumber(
            Text("One byte for a weight", "每个权重算成了一个字节"),
            Text("8 billion weights in bfloat16 are 16 GB.", "80 亿个 bfloat16 权重是 16 GB。"),
            8 / ((8e9 + 8 * 16_000 * 131_072) / 1555e9),
        ),
        WrongNumber(
            Text("Only the arithmetic", "只算了运算"),
            Text(
                "Reading takes 21 ms, and the arithmetic 0.6 ms at the same time. The longer one is the bound.",
                "读要 21 ms，同时进行的运算只要 0.6 ms。较长的那个才是界限。",
            ),
            8 / 0.6e-3,
        ),
        WrongNumber(
            Text("Milliseconds of a step", "算成了一步的毫秒数"),
            Text(
                "A step takes 21 ms. The question is how many tokens per second that gives.",
                "一步要 21 ms。问的是每秒得到多少个 token。",
            ),
            21.08,
        ),
    ),
    tolerance=0.03,
)

EXERCISES = (KV_BYTES, USERS, DECODE_RATE)
