"""Show when each scheduling policy serves a long prompt, while a short prompt arrives before each step.

python -m labs.demos.policies
python -m labs.demos.policies --short-len 200 --budget 250
"""

import argparse
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
    parser = argparse.ArgumentParser(description="When each scheduling policy serves a long prompt.")
    parser.add_argument("--short-len", type=int, default=SHORT_LEN, help=f"tokens of a short prompt ({SHORT_LEN})")
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"tokens that a step computes ({BUDGET})")
    args = parser.parse_args()
    if not 1 <= args.short_len <= LONG_LEN or args.budget < 1:
        parser.error(f"--short-len must be from 1 to {LONG_LEN}, and --budget at least 1, got {vars(args)}")
    print(
        f"a prompt of {LONG_LEN} tokens, one of {args.short_len} before each of {NUM_SHORT} steps; one runs at a time\n"
    )
    print("policy             short ones before it   steps to its first token   to that of a short one (mean)")
    for name, policy in POLICIES.items():
        waits, order = serve(policy, args.short_len, args.budget)
        long_wait = waits.pop("long")
        print(f"{name:18} {order.index('long'):>20} {long_wait:>26} {mean(waits.values()):>32.1f}")


def serve(policy: Any, short_len: int, budget: int) -> tuple[dict[str, int], list[str]]:
    """Return each request's steps from arrival to its first token, and the requests in the order of these tokens."""
    engine = LLMEngine(
        Config(TINY_QWEN3, scheduling_policy=policy, max_num_seqs=1, max_num_batched_tokens=budget, **OPTIONS)
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("long", list(range(100, 100 + LONG_LEN)), params, priority=1)
    arrivals, waits, step = {"long": 0}, {}, 0
    while engine.has_unfinished_requests() or step < NUM_SHORT:
        if step < NUM_SHORT:
            name = f"short {step}"
            arrivals[name] = step
            engine.add_request(name, [2000 - step] * short_len, params)
        step += 1
        for output in engine.step().outputs:
            waits[output.request_id] = step - arrivals[output.request_id]
    return waits, list(waits)


if __name__ == "__main__":
    main()
