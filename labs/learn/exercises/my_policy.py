"""Chapter 9: a scheduling policy of your own."""

from labs.learn.policy import MAX_SCORE, MAX_WAIT, WritePolicy
from labs.learn.texts import Text

ANSWER = '''
def my_policy(request):
    """Return a number for a request that arrives. Requests with smaller numbers go first."""
    return request.num_prompt_tokens + 8 * request.arrival + 60 * request.num_earlier
'''

EXERCISES = (
    WritePolicy(
        name="my_policy",
        chapter="09_when_memory_is_full",
        title=Text("Write a policy", "写一个调度策略"),
        task=Text(
            "Return a number for each request, when it arrives. The scheduler serves smaller numbers first, and "
            "earlier\n"
            "arrivals among equals. You know of the request:\n"
            "- `num_prompt_tokens` and `max_tokens`\n"
            "- `arrival`: how many requests have arrived before\n"
            "- `user`, and `num_earlier`: how many requests of this user have arrived before\n"
            "The scheduler of nanovllm serves three fixed traces: long prompts among short ones, one user with many\n"
            "requests, and a mixture. A request waits from its arrival to its first token. The score is the mean wait "
            "of\n"
            f"the users; first come, first served has 100. You pass with at most {MAX_SCORE:g}, if no request waits "
            f"more\n"
            f"than {MAX_WAIT} steps. No policy of the table that `check` prints does both.\n\n"
            "Example: `return request.num_prompt_tokens` serves the shortest prompt first. Then a long prompt waits "
            "as\n"
            "long as short ones keep coming.",
            "每个请求到达时，返回一个数。调度器先服务数小的；数相同，先到的在前。关于请求，你知道：\n"
            "- `num_prompt_tokens` 和 `max_tokens`\n"
            "- `arrival`：在它之前到达的请求数\n"
            "- `user`，以及 `num_earlier`：这个用户在它之前的请求数\n"
            "nanovllm 的调度器会处理三个固定的 trace（请求序列）：短提示词中夹着长的、一个用户请求很多、两者混合。\n"
            "请求的等待，是从到达到第一个 token 的步数。得分是各用户的平均等待，先来先服务为 100。\n"
            f"得分不超过 {MAX_SCORE:g}，并且没有请求等待超过 {MAX_WAIT} 步，就算通过。`check` 打印的表里，"
            f"没有一个策略能同时做到。\n\n"
            "例：`return request.num_prompt_tokens` 先服务最短的提示词。这样，只要短的不断到来，长的就要一直等。",
        ),
        hints=(
            Text(
                "A user with many requests should not make all others wait: which of the values says how much a user "
                "has "
                "had already?",
                "一个请求很多的用户，不该让所有人都等。哪个值说明这个用户已经得到了多少？",
            ),
            Text(
                "Add up several reasons to wait: a long prompt, a late arrival (so that no request starves), and "
                "earlier "
                "requests of the same user. Weigh them with factors.",
                "把几个应该靠后的理由加起来：提示词长、到得晚（这样没有请求会饿死）、同一用户已有请求。各乘一个系数。",
            ),
            Text(
                "Try `num_prompt_tokens + a * arrival + b * num_earlier`. With a = 8, a request that arrives 10 "
                "requests "
                "later must be 80 tokens shorter to go first. Try b between 20 and 100.",
                "试试 `num_prompt_tokens + a * arrival + b * num_earlier`。a = 8 时，晚到 10 个请求的，"
                "要短 80 个 token 才能排到前面。b 可以取 20 到 100。",
            ),
        ),
        answer=ANSWER,
    ),
)
