"""Follow the likeliest completions of a prompt with beam search: beams fork, share blocks and end.

python -m labs.demos.beam_search
python -m labs.demos.beam_search --trace run.jsonl && nanovllm view run.jsonl
"""

import argparse
import itertools
from typing import Any

from nanovllm_extras import LLM, TINY_QWEN3, BeamSearchParams, SamplingParams

OPTIONS: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 40, "dtype": "float32", "attention_backend": "torch"}
QUESTION, WIDTH, MAX_TOKENS = "Why use a copy?", 3, 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Beam search over shared blocks.")
    parser.add_argument("--trace", help="record the run to this file, and print nothing")
    args = parser.parse_args()
    with LLM(TINY_QWEN3, trace=args.trace, enforce_eager=True, **OPTIONS) as llm:
        [prompt] = llm.render_chat([[{"role": "user", "content": QUESTION}]])
        search(llm, prompt, is_shown=args.trace is None)
        if args.trace is None:
            compare_with_greedy(llm, prompt)


def search(llm: LLM, prompt: Any, is_shown: bool) -> None:
    """Run a beam search step by step, and print its beams after each step."""
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    engine.add_request("S", prompt, BeamSearchParams(beam_width=WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True))
    request: Any = engine.requests["S"]
    num_prompt_tokens = len(request.prompt_token_ids)
    for number in itertools.count(1):
        engine.step()
        if request.is_finished:
            break
        if not is_shown:
            continue
        print(f"step {number}")
        for beam in request.answer.beams:
            index = beam.seq.sample_index
            text = tokenizer.decode(beam.token_ids[num_prompt_tokens:])
            blocks = " ".join(map(str, beam.seq.block_table))
            print(f"  S.{index:<2} {beam.cum_logprob:6.2f}  {text!r:40} blocks {blocks}")
    if is_shown:
        print("\nfinished, best first")
        for one in request.make_output().sequences:
            print(f"  {one.cum_logprob:6.2f}  {one.text!r}")


def compare_with_greedy(llm: LLM, prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    print(f"greedy\n  {completion.cumulative_logprob:6.2f}  {completion.text!r}")


if __name__ == "__main__":
    main()
