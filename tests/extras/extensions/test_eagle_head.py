"""`examples/extensions/eagle_head.py`: outputs are those without drafts, whatever the head proposes.

Three heads: a random one; one that returns the feature that it gets, whose first draft is the newest token, because
that token was sampled from this feature; and one that knows a text, since it was fitted to the features that
transformers computes for it.
"""

import random
from pathlib import Path

import torch

from nanovllm.extension import import_extension
from nanovllm_extras import LLM, SamplingParams
from tests.conftest import hf_greedy

EXTENSION = Path(__file__).parents[3] / "examples" / "extensions" / "eagle_head.py"
EagleHead = import_extension(EXTENSION).EagleHead
OPTIONS = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "block_size": 4, "num_kv_blocks": 36}
SPECULATION = {"num_speculative_tokens": 3, "disable_by_batch_size": 256}


def serve(folder, requests, **more):
    """Return the tokens of each sample, and the engine's counters."""
    with LLM(folder, **OPTIONS, **more) as llm:
        outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
        return [one.token_ids for output in outputs for one in output.outputs], llm.get_stats()


def random_requests(greedy_only=False):
    """Prompts that share prefixes. Some requests have two samples, whose first blocks are shared and copied."""
    rng = random.Random(2)
    shared = [rng.randrange(300) for _ in range(10)]
    for i in range(8):
        num_samples = 1 if greedy_only else 1 + i % 2
        temperature = 0.0 if num_samples == 1 else 0.8
        prompt = shared[: rng.randrange(11)] + [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
        yield prompt, SamplingParams(n=num_samples, temperature=temperature, seed=i, max_tokens=20, ignore_eos=True)


def test_a_random_head_changes_no_output(tiny_checkpoint):
    requests = list(random_requests())
    expected, _ = serve(tiny_checkpoint[0], requests)
    found, stats = serve(tiny_checkpoint[0], requests, extension=EXTENSION, speculative_config=SPECULATION)
    assert found == expected
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 30


class Repeating(EagleHead):
    """Returns the feature that it gets, and notes whether the first draft is the newest token."""

    def __init__(self, runner):
        super().__init__(runner)
        size = runner.shape.hidden_size
        self.linear.weight.data = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
        self.are_equal = []

    def propose(self, wanted):
        proposed = super().propose(wanted)
        assert [len(drafts) for drafts in proposed] == [count for _, count in wanted]
        self.are_equal += [drafts[0] == seq.token_ids[-1] for drafts, (seq, _) in zip(proposed, wanted, strict=True)]
        return proposed


def test_the_head_reads_the_feature_that_the_newest_token_was_sampled_from(tiny_checkpoint):
    """Of greedy requests, with preemption and prefix hits."""
    requests = list(random_requests(greedy_only=True))
    with LLM(tiny_checkpoint[0], **OPTIONS, proposer_cls=Repeating, speculative_config=SPECULATION) as llm:
        (head,) = llm.engine.runner.followers
        for _ in range(2):
            outputs = llm.generate([prompt for prompt, _ in requests], requests[0][1], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [
            hf_greedy(tiny_checkpoint[1], prompt, 20) for prompt, _ in requests
        ]
        assert llm.get_stats().num_preemptions > 0
    assert len(head.are_equal) > 50
    assert all(head.are_equal)


def test_a_head_that_knows_the_text_has_its_drafts_accepted(tiny_checkpoint):
    """Fitted by least squares: 2 * 64 inputs, of which each of 60 tokens has one, so that it can be exact."""
    folder, model = tiny_checkpoint
    prompt = [11, 12, 13]
    text = [*prompt, *hf_greedy(model, prompt, 60)]
    with torch.no_grad():
        features = model.model(torch.tensor([text])).last_hidden_state[0]  # [63, hidden_size]
        embeddings = model.model.embed_tokens(torch.tensor(text))
    inputs = torch.cat((features[:-1], embeddings[1:]), dim=1)  # [62, 2 * hidden_size]
    solution = torch.linalg.lstsq(inputs.double(), features[1:].double(), driver="gelsd").solution

    class Fitted(EagleHead):
        def __init__(self, runner):
            super().__init__(runner)
            self.linear.weight.data = solution.T.float()

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    ((found,), stats) = serve(folder, [(prompt, params)], proposer_cls=Fitted, speculative_config=SPECULATION)
    assert found == text[3:]
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 30
