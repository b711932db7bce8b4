"""Chapter 13: predict how many tokens a step with drafts finds."""

from itertools import product

from labs import one_file
from labs.learn.answers import load
from labs.learn.exercises.verify_draft import SOLUTION
from labs.learn.predict import Predict, WrongNumber
from labs.learn.texts import Text

NUM_DRAFTS = 4
ACCEPTANCE = 0.6


def measure() -> float:
    """Verify drafts that are right or wrong in all 16 ways, and add up the tokens, each way with its probability."""
    verify = load(SOLUTION, "verify draft").verify
    blocks = one_file.BlockManager(1, 16)
    expected = 0.0
    for are_right in product((True, False), repeat=NUM_DRAFTS):
        seq = one_file.Sequence([7], 1, 99)
        verify(seq, [1 if is_right else 2 for is_right in are_right], [1] * (NUM_DRAFTS + 1), blocks)
        probability = 1.0
        for is_right in are_right:
            probability *= ACCEPTANCE if is_right else 1 - ACCEPTANCE
        expected += probability * (len(seq.token_ids) - 1)
    return expected


EXERCISES = (
    Predict(
        name="predict_speculation",
        chapter="13_speculation",
        title=Text("Predict: tokens of a step with drafts", "预测：带草稿的一步得到几个 token"),
        task=Text(
            "Each step of speculative decoding verifies 4 drafts. Each draft is right with probability 0.6,\n"
            "whatever the others are. How many tokens does a step add to the sequence on average? Set ANSWER to a\n"
            "number or an expression; it may be wrong by 1 %.\n\n"
            "A smaller example: with 1 draft, a step adds 2 tokens if it is right and 1 if not: 0.6 × 2 + 0.4 × 1\n"
            "= 1.6.",
            "投机解码的每一步验证 4 个草稿。每个草稿正确的概率都是 0.6，与其他草稿无关。平均每一步给序列增加几个\n"
            "token？把 ANSWER 设为一个数字或表达式，允许 1 % 的误差。\n\n"
            "一个更小的例子：只有 1 个草稿时，它正确则增加 2 个 token，否则 1 个：0.6 × 2 + 0.4 × 1 = 1.6。",
        ),
        hints=(
            Text(
                "A draft counts only if all drafts before it are right too.",
                "只有前面的草稿全都正确，一个草稿才算数。",
            ),
            Text(
                "The second draft is kept with probability 0.6 × 0.6. And one token comes in any case: the model's "
                "own.",
                "第二个草稿被留下的概率是 0.6 × 0.6。另外，模型自己的那个 token 无论如何都有。",
            ),
            Text("1 + 0.6 + 0.6² + …: where does it end?", "1 + 0.6 + 0.6² + ……：加到哪里为止？"),
        ),
        formula="a, k = 0.6, 4\nANSWER = (1 - a ** (k + 1)) / (1 - a)  # 1 + a + a² + … + a^k\n",
        measure=measure,
        unit=Text("tokens", "个 token"),
        explain=lambda value: Text(
            f"1 + 0.6 + 0.6² + 0.6³ + 0.6⁴ = {value:.3f}: the model's own token, and draft i if the first i are right. "
            "Measured with the solution of `verify_draft`, in all 16 cases of right and wrong drafts.",
            f"1 + 0.6 + 0.6² + 0.6³ + 0.6⁴ = {value:.3f}：模型自己的 token，加上前 i 个草稿都正确时的第 i 个草稿。"
            "这是用 `verify_draft` 的参考答案，对草稿对错的全部 16 种情况算出来的。",
        ),
        tolerance=0.01,
        mistakes=(
            WrongNumber(
                Text("Drafts behind a wrong one are counted", "把错误草稿后面的也算上了"),
                Text(
                    "4 × 0.6 drafts are right on average, but those behind the first wrong one are not kept.",
                    "平均有 4 × 0.6 个草稿正确，但第一个错误的草稿后面的都不会留下。",
                ),
                1 + NUM_DRAFTS * ACCEPTANCE,
            ),
            WrongNumber(
                Text("Two things are forgotten", "漏了两点"),
                Text(
                    "4 × 0.6 counts right drafts behind a wrong one, and leaves out the token that the model itself "
                    "samples in each step.",
                    "4 × 0.6 既算上了错误草稿后面的草稿，又漏掉了每一步模型自己采样出的 token。",
                ),
                NUM_DRAFTS * ACCEPTANCE,
            ),
            WrongNumber(
                Text("The model's own token is missing", "漏了模型自己的 token"),
                Text(
                    "Each step also adds the token that the model samples after the last right draft.",
                    "每一步还会增加模型在最后一个正确的草稿之后采样出的那个 token。",
                ),
                sum(ACCEPTANCE**i for i in range(1, NUM_DRAFTS + 1)),
            ),
            WrongNumber(
                Text("The last draft is missing", "漏了最后一个草稿"),
                Text(
                    "The sum ends with a^k, the probability that all k drafts are right; the exponent in the formula "
                    "is "
                    "k + 1.",
                    "求和到 a^k 为止，它是 k 个草稿全对的概率；公式里的指数是 k + 1。",
                ),
                sum(ACCEPTANCE**i for i in range(NUM_DRAFTS)),
            ),
            WrongNumber(
                Text("Any number of drafts", "没有限制草稿的个数"),
                Text(
                    "1 / (1 - a) is the sum without an end. A step has only 4 drafts.",
                    "1 / (1 - a) 是无穷级数的和。一步只有 4 个草稿。",
                ),
                1 / (1 - ACCEPTANCE),
            ),
            WrongNumber(
                Text("All drafts are right", "当作草稿全对"),
                Text(
                    "5 tokens are added only if all 4 drafts are right: with probability 0.6⁴ = 0.13.",
                    "只有 4 个草稿全对才会增加 5 个 token，概率是 0.6⁴ = 0.13。",
                ),
                NUM_DRAFTS + 1,
            ),
        ),
    ),
)
