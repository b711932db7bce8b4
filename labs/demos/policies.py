"""Show when each scheduling policy serves a long prompt, while a short prompt arrives before each step.

python -m labs.demos.policies
"""

from statistics import mean
from typing import Any

from nanovllm_extras import TINY_QWEN3, Config, LLMEngine, SamplingParams
from nanovllm_extras.scheduling.policies import sjf

NUM_SHORT, SHORT_LEN, LONG_LEN, BUDGET = 16, 20, 1000, 500
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch",
    "enforce_eager": True,
    "num_kv_blocks": 128,
}
POLICIES: dict[str, Any] = {
    "fcfs": "fcfs",
    "priority": "priority",  # 1 for the long prompt, 0 for the short ones: smaller goes first
    "shortest first": lambda seq: seq.num_prompt_tokens,
    "sjf (with aging)": sjf,
}


def main() -> None:
    print(f"a prompt of {LONG_LEN} tokens, one of {SHORT_LEN} before each of {NUM_SHORT} steps; one runs at a time\n")
    print("policy             short ones before it   steps to its first token   to that of a short one (mean)")
    for name, policy in POLICIES.items():
        waits, order = serve(policy)
        long_wait = waits.pop("long")
        print(f"{name:18} {order.index('long'):>20} {long_wait:>26} {mean(waits.values()):>32.1f}")


def serve(policy: Any) -> tuple[dict[str, int], list[str]]:
    """Return each request's steps from arrival to its first token, and the requests in the order of these tokens."""
    engine = LLMEngine(
        Config(TINY_QWEN3, scheduling_policy=policy, max_num_seqs=1, max_num_batched_tokens=BUDGET, **OPTIONS)
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("long", list(range(100, 100 + LONG_LEN)), params, priority=1)
    arrivals, waits, step = {"long": 0}, {}, 0
    while engine.has_unfinished_requests() or step < NUM_SHORT:
        if step < NUM_SHORT:
            name = f"short {step}"
            arrivals[name] = step
            engine.add_request(name, [2000 - step] * SHORT_LEN, params)
        step += 1
        for output in engine.step().outputs:
            waits[output.request_id] = step - arrivals[output.request_id]
    return waits, list(waits)


if __name__ == "__main__":
    main()
