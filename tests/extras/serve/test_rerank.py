"""`/rerank`, `/score`, `/pooling` and `LLM.score`: scores and vectors are those of `transformers` in float32.

Seen to fail when broken: the two tokens exchanged; a template without its last line; documents that are cut together
with the template; vectors that are not normalised; results in the order of the documents.
"""

import base64

import numpy as np
import pytest
import torch
import transformers

from nanovllm_extras import LLM, TINY_QWEN3
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.serve_settings import make_parser, settings_of
from nanovllm_extras.serve.state import ServerOptions
from tests.extras.serve.conftest import Client
from tests.extras.serve.real_server import in_thread

RERANK, SCORE, POOLING = "/rerank", "/score", "/pooling"
QUERY = "What is a block table?"
DOCUMENTS = ["Paris is nice.", "A block table maps logical blocks to physical blocks.", "é☃ holds K and V", "x"]
WEB = "Given a web search query, retrieve relevant passages that answer the query"
OF_VLLM = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["No", "Yes"],
    "is_original_qwen3_reranker": True,
}
ROLES = (
    "{%- for m in messages if m.role == 'system' %}{{ m.content }}>{% endfor %}"
    "{{- (messages | selectattr('role', 'eq', 'query') | first).content }}~"
    "{{- (messages | selectattr('role', 'eq', 'document') | first).content }}?"
)


OF_DECODER = {
    "hf_overrides": {"classifier_from_token": ["n", "y"]},
    "chat_template": ROLES,
    "block_size": 4,
    "max_num_batched_tokens": 12,  # most prompts are computed in several steps
    "dtype": "float32",
    "num_kv_blocks": 512,
}


def qwens_prompt(query, document, instruction=WEB):
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    begin, end = "<|im_start|>", "<|im_end|>\n"
    return f"{begin}system\n{judge}{end}{begin}user\n{asked}{end}{begin}assistant\n<think>\n\n</think>\n\n"


def hf_difference(model, tokenizer, prompt, tokens):
    """The logit of yes less that of no after a prompt, by `transformers`."""
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])).logits[0, -1].double()
    no, yes = tokenizer.convert_tokens_to_ids(list(tokens))
    return float(logits[yes] - logits[no])


def hf_probability(*arguments):
    return 1 / (1 + np.exp(-hf_difference(*arguments)))


def hf_states(model, ids):
    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()  # [num_tokens, hidden_size]


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def client_of(llm):
    return Client(make_app(ServerOptions(("tiny",)), llm))


@pytest.fixture(scope="module")
def decoder(with_tokenizer):
    """A client of the random model, which answers `n` or `y`, with a template of its own."""
    with AsyncLLM(with_tokenizer, **OF_DECODER) as llm:
        yield client_of(llm)
        assert llm.get_stats().num_free_blocks == 512


@pytest.fixture(scope="module")
def judge(tiny_checkpoint, with_tokenizer):
    """What `transformers` says of a prompt to `decoder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)
    return lambda prompt: hf_probability(tiny_checkpoint[1], tokenizer, prompt, "ny")


def scores_of(answer):
    return [one["score"] for one in answer["data"]]


def by_index(answer):
    return [one["relevance_score"] for one in sorted(answer["results"], key=lambda one: one["index"])]


# ---- by a decoder


def test_the_bundled_model_judges_as_transformers_does_and_documents_share_the_query():
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_QWEN3, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_QWEN3)

    def expected(query, documents, *instruction):
        prompts = [qwens_prompt(query, document, *instruction) for document in documents]
        return [hf_probability(model, tokenizer, prompt, ("No", "Yes")) for prompt in prompts]

    options = {"hf_overrides": OF_VLLM, "runner": "pooling", "num_kv_blocks": 256}
    with AsyncLLM(TINY_QWEN3, dtype="float32", **options) as llm:
        client = client_of(llm)
        answer = client.ask(RERANK, query=QUERY, documents=DOCUMENTS)
        np.testing.assert_allclose(by_index(answer), expected(QUERY, DOCUMENTS), atol=2e-6)
        ids = [tokenizer.encode(qwens_prompt(QUERY, one), add_special_tokens=False) for one in DOCUMENTS]
        num_shared = len(tokenizer.encode(qwens_prompt(QUERY, "").partition("<Document>")[0])) // 16 * 16
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 3 * num_shared > 0
        answer = client.ask(SCORE, text_1=QUERY, text_2=DOCUMENTS, instruction="Find it")
        np.testing.assert_allclose(scores_of(answer), expected(QUERY, DOCUMENTS, "Find it"), atol=2e-6)
        # only the document is cut, not the end of the template
        most = len(ids[3]) + 1
        answer = client.ask(SCORE, text_1=QUERY, text_2="x y z " * 2000, truncate_prompt_tokens=most)
        np.testing.assert_allclose(scores_of(answer), expected(QUERY, ["x y"]), atol=2e-6)
        assert answer["usage"]["prompt_tokens"] == most
        client.refuse(SCORE, {"text_1": QUERY, "text_2": "x", "truncate_prompt_tokens": 20}, "text_2", "at most 20")


def test_a_template_with_roles_of_its_own(decoder, judge):
    pairs = [("a query", "a document"), ("b", "☃" * 5), ("c", "")]
    expected = [judge(f"{query}~{document}?") for query, document in pairs]
    queries, documents = [list(side) for side in zip(*pairs, strict=True)]
    np.testing.assert_allclose(
        scores_of(decoder.ask("/v1/score", queries=queries, items=documents)), expected, atol=1e-6
    )
    answer = decoder.ask(SCORE, text_1="c", text_2={"text": "d"}, instruction="do")
    np.testing.assert_allclose(scores_of(answer), [judge("do>c~d?")], atol=1e-6)
    (difference,) = scores_of(decoder.ask(SCORE, data_1="c", data_2=["d"], use_activation=False))
    np.testing.assert_allclose(1 / (1 + np.exp(-difference)), judge("c~d?"), atol=1e-6)


def test_results_are_sorted_and_cut_and_have_the_documents(decoder, judge):
    documents = ["one", {"text": "two", "title": "ignored"}, "three", "four"]
    texts = ["one", "two", "three", "four"]
    expected = [judge(f"q~{text}?") for text in texts]
    order = np.argsort(expected)[::-1].tolist()
    body = {"query": {"text": "q"}, "documents": documents, "model": "tiny"}
    whole = decoder.ask("/v1/rerank", **body)
    assert [one["index"] for one in whole["results"]] == order
    np.testing.assert_allclose(by_index(whole), expected, atol=1e-6)
    assert [one["document"] for one in whole["results"]] == [{"text": texts[i]} for i in order]
    for top_n, num_results in ((0, 4), (1, 1), (3, 3), (9, 4)):
        results = decoder.ask(RERANK, top_n=top_n, return_documents=False, **body)["results"]
        assert [one["index"] for one in results] == order[:num_results]
        assert not any("document" in one for one in results)
    for returns, is_told in ((None, False), (True, True)):
        answer = decoder.ask("/v2/rerank", return_documents=returns, **body)
        assert ["document" in one for one in answer["results"]] == [is_told] * 4
        assert answer["meta"]["api_version"] == {"version": "2"}
    assert whole["usage"]["total_tokens"] == whole["meta"]["tokens"]["input_tokens"] == 4 * 3 + sum(map(len, texts))


def test_documents_are_cut_between_characters(decoder, judge):
    for most, kept in ((1, "a"), (2, "a"), (3, "a"), (4, "a☃"), (100, "a☃bcdef"), (0, "a☃bcdef")):
        answer = decoder.ask(RERANK, query="q", documents=["a☃bcdef"], max_tokens_per_doc=most)
        np.testing.assert_allclose(by_index(answer), [judge(f"q~{kept}?")], atol=1e-6)
        assert answer["results"][0]["document"] == {"text": "a☃bcdef"}
    longest = decoder.server.bounds.max_model_len - 1
    answer = decoder.ask(SCORE, text_1="q", text_2="b" * 5000, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == longest
    np.testing.assert_allclose(scores_of(answer), [judge("q~" + "b" * (longest - 3) + "?")], atol=1e-6)


# ---- by embeddings


def test_without_such_tokens_scores_are_cosines(client, llm, tiny_checkpoint):
    def vectors(texts, pooling):
        states = [hf_states(tiny_checkpoint[1], llm.engine.tokenizer.encode(text)) for text in texts]
        return unit(np.array([one[-1] if pooling == "last" else one.mean(axis=0) for one in states]))

    first, second = ["a query", "another", "☃"], ["it", "that", "a query"]
    for pooling in ("last", "mean"):
        ours, theirs = vectors(first, pooling), vectors(second, pooling)
        answer = client.ask(SCORE, text_1=first, text_2=second, pooling=pooling)
        np.testing.assert_allclose(scores_of(answer), (ours * theirs).sum(axis=1), atol=1e-5)
        answer = client.ask(RERANK, query=first[0], documents=second, pooling=pooling)
        np.testing.assert_allclose(by_index(answer), theirs @ ours[0], atol=1e-5)
        assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6), "the same text"
        assert answer["results"][0]["relevance_score"] <= 1
    assert answer["usage"]["prompt_tokens"] == len(first[0]) + sum(map(len, second))
    answer = client.ask(SCORE, queries="ab", documents=["abcd" * 999], truncate_prompt_tokens=2)
    assert scores_of(answer) == [pytest.approx(1, abs=1e-6)]


def test_vectors_of_tokens_and_of_prompts(client, decoder, llm, tiny_checkpoint):
    texts = ["Paged attention", "é☃"]
    ids = [llm.engine.tokenizer.encode(text) for text in texts]
    expected = [hf_states(tiny_checkpoint[1], one) for one in ids]  # each [num_tokens, hidden_size]
    for asked, given in ((client, texts), (client, ids), (decoder, texts)):
        answer = asked.ask(POOLING, input=given, task="token_embed")
        assert [(one["object"], one["index"]) for one in answer["data"]] == [("pooling", 0), ("pooling", 1)]
        for one, states in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(one["data"], unit(states), atol=1e-5)
    raw = {"input": texts[0], "task": "token_embed", "use_activation": False, "encoding_format": "base64"}
    (one,) = client.ask(POOLING, **raw)["data"]
    decoded = np.frombuffer(base64.b64decode(one["data"]), dtype="<f4").reshape(expected[0].shape)
    np.testing.assert_allclose(decoded, expected[0], rtol=1e-4, atol=2e-5)
    for task in ("embed", None):
        (one,) = client.ask(POOLING, input=texts[0], task=task, normalize=False)["data"]
        np.testing.assert_allclose(one["data"], expected[0][-1], rtol=1e-4, atol=2e-5)
    for given in (texts[0], ids[0]):
        answer = client.ask(POOLING, input=given, task="token_embed", truncate_prompt_tokens=4)
        np.testing.assert_allclose(answer["data"][0]["data"], unit(expected[0])[:4], atol=1e-5)


# ---- offline


FORMS = [("a query", "it"), ("a query", ["it", "☃", "that"]), (["a", "☃"], ["it", "that"]), (["a"], ["b" * 70])]


def test_offline_a_decoder_judges_as_over_http(decoder, judge, with_tokenizer):
    fields = [{}, {"instruction": "do"}, {"use_activation": False}, {"truncate_prompt_tokens": 14}]
    fields += [{"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 2}]
    with LLM(with_tokenizer, **OF_DECODER) as llm:
        for first, second in FORMS:
            for one in fields:
                answer = decoder.ask(SCORE, text_1=first, text_2=second, **one)
                outputs = llm.score(first, second, use_tqdm=False, **one)
                np.testing.assert_allclose([one.outputs.score for one in outputs], scores_of(answer), atol=1e-6)
                assert sum(len(one.prompt_token_ids) for one in outputs) == answer["usage"]["prompt_tokens"]
        outputs = llm.score("a query", ["it", "that"], instruction="do", use_tqdm=False)
        expected = [judge(f"do>a query~{document}?") for document in ("it", "that")]
        np.testing.assert_allclose([one.outputs.score for one in outputs], expected, atol=1e-6)
        assert outputs[1].num_cached_tokens >= 8
        assert all(one.finished for one in outputs)


def test_offline_scores_are_cosines_as_over_http(client, tiny_checkpoint, with_tokenizer):
    with LLM(with_tokenizer, dtype="float32", num_kv_blocks=512) as llm:
        encode = llm.engine.tokenizer.encode
        for pooling in (None, "mean"):
            for first, second in FORMS:
                outputs = llm.score(first, second, pooling=pooling, use_tqdm=False)
                answer = client.ask(SCORE, text_1=first, text_2=second, pooling=pooling)
                found = [one.outputs.score for one in outputs]
                ids = [encode(a) + encode(b) for a, b in pairs_of(first, second)]
                assert [one.prompt_token_ids for one in outputs] == ids
                np.testing.assert_allclose(found, scores_of(answer), atol=1e-5)
                for one, (a, b) in zip(found, pairs_of(first, second), strict=True):
                    states = [hf_states(tiny_checkpoint[1], encode(text)) for text in (a, b)]
                    vectors = unit(np.array([s[-1] if pooling is None else s.mean(axis=0) for s in states]))
                    assert one == pytest.approx(vectors[0] @ vectors[1], abs=1e-5)
        bad = [
            (("a", 3), {}, TypeError, "data_2 must be a str or a list of str"),
            (("a", []), {}, ValueError, "data_2 must have at least one text"),
            ((["a", "b"], ["c"]), {}, ValueError, "data_2 must have as many texts as data_1.*got 1 and 2"),
            (("a", "\ud800"), {}, ValueError, "data_2 must not hold half"),
            (("a", ["b", "c" * 9999]), {}, ValueError, "at most"),
            (("a", "b"), {"instruction": "x"}, ValueError, "instruction needs hf_overrides classifier_from_token"),
            (("a", "b"), {"pooling": "max"}, ValueError, "pooling must be one of"),
            (("a", "b"), {"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens must be -1"),
            (("a", "b"), {"pooling_params": 1}, ValueError, "pooling_params"),
            (("a", "b"), {"no": 1}, TypeError, "unknown argument no"),
        ]
        for texts, fields, kind, message in bad:
            with pytest.raises(kind, match=message):
                llm.score(*texts, use_tqdm=False, **fields)
        assert not llm.engine.has_unfinished_requests()
        assert llm.score("a", "b", lora_request=None, use_tqdm=False)[0].finished


def pairs_of(first, second):
    first, second = [[one] if isinstance(one, str) else one for one in (first, second)]
    return list(zip(first if len(first) > 1 else first * len(second), second, strict=True))


# ---- refusals

PAIR = {"text_1": "a", "text_2": "b"}
DOCS = {"query": "a", "documents": ["b"]}
BAD = [
    (RERANK, {"query": "a"}, "documents", ""),
    (RERANK, {**DOCS, "documents": []}, "documents", "at least 1"),
    (RERANK, {**DOCS, "documents": "b"}, "documents", ""),
    (RERANK, {**DOCS, "documents": ["b", 3]}, "documents", ""),
    (RERANK, {**DOCS, "documents": ["b", {"image": "http://x"}]}, "documents", "images are not supported"),
    (RERANK, {**DOCS, "documents": ["b", {"text": None}]}, "documents", "images are not supported"),
    (RERANK, {**DOCS, "documents": ["\ud800"]}, "documents", ""),
    (RERANK, {**DOCS, "documents": ["b"] * 2049}, "documents", "2048"),
    (RERANK, {**DOCS, "documents": ["b", "c" * 9999]}, "documents", "at most"),
    (RERANK, {**DOCS, "query": "c" * 9999}, "query", "at most"),
    (RERANK, {**DOCS, "query": {"image": "x"}}, "query", "images are not supported"),
    (RERANK, {**DOCS, "top_n": -1}, "top_n", ""),
    (RERANK, {**DOCS, "max_tokens_per_doc": -1}, "max_tokens_per_doc", ""),
    (RERANK, {**DOCS, "rank_fields": ["title"]}, "rank_fields", "text"),
    (SCORE, {**PAIR, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
    (SCORE, {}, "text_1", "text_1 and text_2"),
    (SCORE, {"queries": "a"}, "documents", "got queries"),
    (SCORE, {**PAIR, "items": "c"}, "items", "got text_1 and text_2 and items"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", "got 1 and 2"),
    (SCORE, {"queries": ["a", "b"], "documents": ["c"] * 3}, "documents", "got 3 and 2"),
    (SCORE, {**PAIR, "pooling": "max"}, "pooling", ""),
    (POOLING, {}, "input", ""),
    (POOLING, {"input": []}, "input", "empty"),
    (POOLING, {"input": "a", "task": "classify"}, "task", "token_embed"),
    (POOLING, {"input": "a", "task": "token_embed", "pooling": "mean"}, "pooling", "embed"),
    (POOLING, {"input": [[1] * 400] * 100, "task": "token_embed"}, "input", "several requests"),
    (POOLING, {"input": "a", "normalize": True, "use_activation": False}, "normalize", "older"),
    (POOLING, {"input": "a", "dimensions": 8}, "dimensions", ""),
]


def test_bad_requests_are_named(client, decoder):
    for path, body, param, word in BAD:
        client.refuse(path, body, param, word)
        decoder.refuse(path, body, param, word)
    for path, body in ((RERANK, DOCS), (SCORE, PAIR)):
        client.refuse(path, {**body, "instruction": "x"}, "instruction", "classifier_from_token")
        decoder.refuse(path, {**body, "instruction": "x" * 9999}, "instruction", "at most")
        decoder.refuse(path, {**body, "pooling": "mean"}, "pooling", "classifier_from_token")
        assert client.post(path, {**body, "model": "gpt"}).status_code == 404


def test_models_that_cannot_judge_are_refused_at_the_start(with_tokenizer):
    cross = {"architectures": ["Qwen3ForSequenceClassification"]}
    for overrides, message in (
        (cross, "Qwen3ForSequenceClassification.*cross-encoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "cross-encoder"),
        ({**cross, "classifier_from_token": ["n"]}, "two different tokens"),
        ({**cross, "classifier_from_token": "ny"}, "must be a list"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(with_tokenizer, hf_overrides=overrides, num_kv_blocks=8)
    options = {"hf_overrides": {"classifier_from_token": ["no", "y"]}, "num_kv_blocks": 8}
    with AsyncLLM(with_tokenizer, **options) as llm, pytest.raises(ValueError, match="got 'no', which is none"):
        client_of(llm)


def test_the_command_of_vllm_is_taken():
    command = ["m", "--runner", "pooling", "--hf-overrides", '{"classifier_from_token": ["no", "yes"]}']
    args = make_parser().parse_args(command)
    args.server_model = str(TINY_QWEN3)
    assert settings_of(args).engine_args.hf_overrides == {"classifier_from_token": ["no", "yes"]}


@pytest.mark.slow
def test_the_clients_of_cohere(decoder):
    """Its package (extra: sweep), whose two clients use `/v1/rerank` and `/v2/rerank`."""
    cohere = pytest.importorskip("cohere")
    expected = [
        (one["index"], one["relevance_score"]) for one in decoder.ask(RERANK, query="q", documents=DOCUMENTS)["results"]
    ]
    with in_thread(decoder.server.llm, api_keys=("key",)) as server:
        for kind in (cohere.Client, cohere.ClientV2):
            client = kind(base_url=server.url, api_key="key")
            answer = client.rerank(model="tiny-qwen3", query="q", documents=DOCUMENTS, top_n=3)
            found = [(one.index, one.relevance_score) for one in answer.results]
            assert found == [(index, pytest.approx(score, abs=1e-6)) for index, score in expected[:3]]
            assert answer.meta.tokens.input_tokens > 0
            with pytest.raises(cohere.errors.BadRequestError):
                client.rerank(model="tiny-qwen3", query="q", documents=[])
            with pytest.raises(cohere.errors.UnauthorizedError):
                kind(base_url=server.url, api_key="no").rerank(model="tiny-qwen3", query="q", documents=["a"])
        v1 = cohere.Client(base_url=server.url, api_key="key")
        answer = v1.rerank(model="tiny-qwen3", query="q", documents=[{"text": "a"}], return_documents=True)
        assert answer.results[0].document.text == "a"
