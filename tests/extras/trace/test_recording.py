"""`LLM(…, trace=…)`: what is written, how large it may grow, and what reads it: replay, page, Perfetto, command."""

import json
from pathlib import Path

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, BeamSearchParams, LoRARequest, SamplingParams
from nanovllm_extras.engine.prefix_misses import CAUSES
from nanovllm_extras.trace import view
from nanovllm_extras.trace.asked_params import describe_params, read_params
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.page import read_sources
from nanovllm_extras.trace.perfetto import to_perfetto
from nanovllm_extras.trace.recording import TraceFile, read_recording
from nanovllm_extras.trace.replay import EVENTS, Replay
from tests.extras.lora.peft_adapters import make_adapter
from tests.extras.trace_traffic import loaded_run
from tools import story_recording

PACKAGES = Path(view.__file__).parents[2]
OPTIONS = {"num_kv_blocks": 12, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
OPTIONS |= {"attention_backend": "torch", "device": "cpu", "load_format": "safetensors"}


def replay_of(lines):
    replay = Replay(lines[0])
    for line in lines[1:]:
        for event in line["events"]:
            replay.apply(event)
    return replay


@pytest.fixture(scope="module")
def recorded(with_tokenizer, tmp_path_factory):
    """(path, outputs, stats) of a run with samples, a beam search, preemption and a prefix hit."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with LLM(with_tokenizer, trace=path, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(["abcdefgh", "abcdefghi", "xyz", "1234567"], params, use_tqdm=False)
        outputs += llm.generate("abcd", SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True), use_tqdm=False)
        llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=4))
        stats = llm.get_stats()
    return path, outputs, stats


def test_replayed_tokens_and_counts_are_those_of_the_run(recorded):
    path, outputs, stats = recorded
    replay = replay_of(read_recording(path))
    found = {(seq.request, seq.sample): seq.tokens[seq.num_prompt_tokens :] for seq in replay.seqs.values()}
    for output in outputs:
        for completion in output.outputs:
            assert found[output.request_id, completion.index] == completion.token_ids
    assert replay.step == stats.steps
    assert stats.num_preemptions > 0
    assert replay.num_used == 0


def test_loads_name_the_tiers_and_their_blocks(tmp_path):
    lines = loaded_run(tmp_path)
    check_recording(tmp_path / "run.jsonl", lines)
    events = [event for line in lines[1:] for event in line["events"]]
    loads = [event[2:] for event in events if event[0] == "load"]
    counts = [(num_tokens, {tier: len(blocks) for tier, blocks in by_tier.items()}) for num_tokens, by_tier in loads]
    assert counts == [(8, {"disk": 2}), (4, {"memory": 1}), (20, {"memory": 1, "disk": 4})]
    taken = [event[2] for event in events if event[0] == "take" and event[1] == 3]
    assert [block for blocks in loads[-1][1].values() for block in blocks] == taken[:5]
    assert [event[3] for event in events if event[0] == "admit"] == [8, 4, 24]


def test_header_and_lines_say_what_the_page_needs(recorded):
    path, _, stats = recorded
    header, *lines = read_recording(path)
    assert (header["num_blocks"], header["block_size"], header["state"]) == (12, 4, None)
    assert header["config"]["max_num_batched_tokens"] == 16
    assert str(path.parent) not in json.dumps(header), "no path of this machine"
    timed = [line["times"] for line in lines if "times" in line]
    assert len(timed) == stats.steps
    assert all(set(times) == {"schedule", "build", "run", "update", "output"} for times in timed)
    texts = {}
    for line in lines:
        texts |= line.get("texts", {})
    ids = {i for seq in replay_of([header, *lines]).seqs.values() for i in seq.tokens}
    assert ids <= {int(i) for i in texts}, "each token has a text"


PARAMS = {  # each field that decides which tokens a request gets, and how many
    "n": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 12,
    "min_p": 0.1,
    "seed": 2**64 - 1,
    "max_tokens": None,
    "stop": ["ab", "é"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "bad_words": ["b"],
    "min_tokens": 2,
    "thinking_token_budget": 4,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 3,
    "logit_bias": {7: -3.5, 8: 2.0},
    "allowed_token_ids": [5, 6],
    "structured_outputs": {"regex": "a+"},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "detokenize": False,
    "extra_args": {"tenant": "a", "deadline": 0.5},
}
NOT_DESCRIBED = {"output_kind", "logits_processors"}  # how outputs are delivered; functions


def test_described_params_are_read_back():
    assert PARAMS.keys() | NOT_DESCRIBED == vars(SamplingParams()).keys()
    for name, value in PARAMS.items():
        params = SamplingParams(**{name: value}).clone()
        assert read_params(json.loads(json.dumps(describe_params(params)))).clone() == params
    params = SamplingParams(max_tokens=5, logits_processors=[lambda tokens, logits: logits])
    assert describe_params(params) == {"n": 1, "max_tokens": 5}, "JSON has no functions"


def test_requests_can_be_repeated_with_other_options(with_tokenizer, tmp_path):
    """The requests of a recording, served by an engine with more blocks and other limits, get the recorded tokens."""
    asked = {
        "A": ("abcdefgh", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), 0),
        "B": ("abcdefgh", SamplingParams(n=3, seed=1, max_tokens=9, min_tokens=3), 2),
        "C": ({"prompt": "xyz", "cache_salt": "salt"}, SamplingParams(temperature=0, max_tokens=60), 1),
        "D": ("12345", SamplingParams(temperature=0.5, seed=3, max_tokens=7, logit_bias={9: 4.0}), 0),
    }

    def serve(llm, requests):
        for request_id, arguments in requests.items():
            llm.engine.add_request(request_id, *arguments)
        found = {}
        while llm.engine.has_unfinished_requests():
            found |= {one.request_id: one for one in llm.engine.step().outputs}
        return {name: [list(sample.token_ids) for sample in one.outputs] for name, one in found.items()}

    small = {"scheduling_policy": "priority", "max_model_len": 64, **OPTIONS}
    with LLM(with_tokenizer, trace=tmp_path / "run.jsonl", **small) as llm:
        expected = serve(llm, asked)
        assert llm.get_stats().num_preemptions > 0
    lines = read_recording(tmp_path / "run.jsonl")
    check_recording(tmp_path / "run.jsonl", lines)
    replay = replay_of(lines)
    arrivals = [event for line in lines[1:] for event in line["events"] if event[0] == "add"]
    requests = {}
    for _, number, time, about in arrivals:
        seq = replay.seqs[number]
        assert (seq.arrived, seq.params) == (time, about["params"])
        prompt = {"prompt_token_ids": seq.tokens[: seq.num_prompt_tokens]}
        if seq.cache_salt is not None:
            prompt["cache_salt"] = seq.cache_salt
        requests[seq.request] = prompt, read_params(seq.params), seq.priority
    assert [time for _, _, time, _ in arrivals] == sorted(time for _, _, time, _ in arrivals)
    assert {name: one[1:] for name, one in requests.items()} == {name: one[1:] for name, one in asked.items()}
    assert requests["C"][0]["cache_salt"] == "salt 1"
    other = {"num_kv_blocks": 64, "block_size": 2, "max_num_batched_tokens": 7, "enable_prefix_caching": False}
    with LLM(with_tokenizer, max_model_len=64, **OPTIONS | other) as llm:
        found = serve(llm, requests)
        assert llm.get_stats().num_preemptions == 0
    [short], [long] = expected.pop("C"), found.pop("C")
    assert found == expected
    assert long[: len(short)] == short
    assert (len(short), len(long)) == (46, 60), "the small pool had no room for all that the request asked for"


def test_file_that_begins_later_has_what_unfinished_requests_ask_for():
    from tests.extras.trace_traffic import Lines, RecordedRun

    run = RecordedRun(Lines(limit=3), num_blocks=12, block_size=2, policy=lambda seq: seq.priority)
    run.add([1, 2, 1], n=2, max_tokens=9, priority=1)
    run.add([2, 1], max_tokens=12)
    run.finish()
    first, second = run.lines.segments[:2]
    known, later = replay_of(first).seqs, second[0]["state"]["seqs"]
    assert [seq["number"] for seq in later] == [*known] == [1, 2, 3]
    for about in later:
        seq = known[about["number"]]
        asked = about["params"], about.get("priority", 0), about["arrived"]
        assert asked == (seq.params, seq.priority, seq.arrived)
        assert replay_of(second[:1]).seqs[seq.number].arrived == seq.arrived
    assert sorted((seq.params["n"], seq.params["max_tokens"], seq.priority) for seq in known.values()) == [
        (1, 12, 0), (2, 9, 1), (2, 9, 1)
    ]  # fmt: skip


def test_causes_are_those_of_the_metrics(tmp_path):
    from tests.extras.trace_traffic import explained_run

    outputs = explained_run(tmp_path / "run.jsonl")
    lines = read_recording(tmp_path / "run.jsonl")
    events = [event for line in lines[1:] for event in line["events"]]
    requests = {event[1]: event[3]["request"] for event in events if event[0] == "add"}
    found = {requests[event[1]]: event[2] for event in events if event[0] == "miss"}
    for output in outputs:
        metrics = [
            {"start": one.start, "end": one.end, "cause": one.cause, "cached": list(one.cached_token_ids),
             "prompt": list(one.prompt_token_ids), "step": one.step, "request": one.request_id}
            for one in output.metrics.prefix_misses
        ]  # fmt: skip
        empty = {"cached": [], "prompt": [], "step": None, "request": None}
        assert [empty | one for one in found[output.request_id]] == metrics
    causes = {one["cause"] for misses in found.values() for one in misses}
    assert causes == set(CAUSES) - {"no_snapshot", "no_window"}  # of models with recurrent states, or groups


def test_file_that_begins_later_has_the_causes_of_unfinished_requests():
    from tests.extras.trace_traffic import Lines, RecordedRun

    lines = Lines(limit=3)
    run = RecordedRun(lines, decode=str, num_blocks=9, block_size=2)
    run.add([1, 2, 1, 3, 1], max_tokens=1)
    run.add([1, 2, 1, 1, 1], max_tokens=9)
    run.finish()
    first, second = lines.segments[:2]
    misses = [event[2] for line in first[1:] for event in line["events"] if event[0] == "miss"]
    [seq] = second[0]["state"]["seqs"]
    assert seq["misses"] == misses[1] != []
    assert misses[1][1] == {"start": 3, "end": 4, "cause": "differs", "cached": [3], "prompt": [1]}
    assert replay_of(second[:1]).seqs[2].misses == seq["misses"]
    assert "3" in second[1]["texts"], "the cached token, which no sequence has, is shown too"


def test_interrupted_engine_begins_anew_in_the_recording(with_tokenizer, tmp_path):
    path = tmp_path / "run.jsonl"
    with LLM(with_tokenizer, trace=path, **OPTIONS) as llm:
        stream = llm.stream("abcdefgh", SamplingParams(max_tokens=8, ignore_eos=True))
        next(stream)
        for request_id in list(llm.engine.requests):
            llm.engine.abort_request(request_id)
        stream.close()
        llm.engine.recover()
        llm.reset_prefix_cache()
        llm.generate("abcdefgh", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    lines = read_recording(path)
    assert {"start", "reset"} <= {event[0] for line in lines[1:] for event in line["events"]}
    assert replay_of(lines).num_used == 0


def test_file_never_grows_above_its_limit_and_both_parts_can_be_read(tmp_path):
    from tests.extras.trace_traffic import RecordedRun

    path = tmp_path / "run.jsonl"
    file = TraceFile(path, max_bytes=40_000)
    run = RecordedRun(file, num_blocks=10, block_size=2, budget=8)
    largest = 0
    for i in range(60):
        run.add([i % 3, 1, 2, 3], n=1 + i % 3, max_tokens=9)
        run.step()
        largest = max(largest, sum(one.stat().st_size for one in tmp_path.iterdir()))
    run.finish()
    run.recorder.close()
    assert 30_000 < largest <= 50_000, "half of it, twice, and the line that went over it"
    before, now = read_recording(tmp_path / "run.jsonl.1"), read_recording(path)
    assert replay_of(before).step == now[0]["num_steps_before"] > 20
    assert replay_of(now).step == len(run.recorder.states)


@pytest.mark.parametrize("end", [b"", "二".encode()[:2]], ids=["ascii", "inside a character"])
def test_last_line_that_a_crash_has_cut_is_skipped_with_a_word(recorded, tmp_path, caplog, end):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(recorded[0].read_bytes()[:-40] + end)
    lines = read_recording(recorded[0])
    assert caplog.messages == []
    assert len(read_recording(cut)) == len(lines) - 1
    assert caplog.messages == [f"{cut} was cut in its last line, line {len(lines)}, which is skipped"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a recording"),
        ("[1]\n", "not a recording"),
        ("not json\n", "bad.jsonl, line 1 is not JSON"),
        ("\x80\n", "bad.jsonl, line 1 is not JSON: 'utf-8' codec"),
        ("[" * 10**5 + "]" * 10**5 + "\n", "bad.jsonl, line 1 is nested too deeply"),
        ('{"t":NaN}\n', "bad.jsonl, line 1 is not JSON: NaN"),
        ('{"format":"nanovllm-trace","version":99}\n', "version 99"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_recording(path)


@pytest.mark.parametrize(
    ("trace", "error", "message"),
    [(3, TypeError, "trace must be"), ("", TypeError, "trace must be"), ("/nowhere/at/all.jsonl", ValueError, "trace")],
)
def test_bad_path_is_refused_before_the_model_is_loaded(trace, error, message):
    with pytest.raises(error, match=message):
        LLM("no-such-model", trace=trace)


# ---- what reads it


def test_each_event_has_its_source():
    sources = read_sources()
    of_groups = {f"{code}.group" for code in ("take", "share", "copy", "register", "give_back", "admit")}
    assert set(sources) == EVENTS | {"slot.in", "move.out"} | of_groups  # the two are of swapped states
    assert sources["take"]["symbol"] == "BlockManager.take"
    assert sources["take"]["text"].startswith("def take(self")
    for source in sources.values():
        lines = (PACKAGES / source["path"]).read_text().splitlines()[source["line"] - 1 :]
        name = source["symbol"].split(".")[-1]
        assert f"def {name}(" in source["text"], "the symbol is defined by these lines"
        assert [line.strip() for line in source["text"].splitlines()] == [
            line.strip() for line in lines[: len(source["text"].splitlines())]
        ], "and they stand there"


def test_perfetto_export_has_steps_requests_and_counters(recorded):
    path, outputs, stats = recorded
    events = to_perfetto(read_recording(path))["traceEvents"]
    assert all({"ph", "pid", "tid", "name"} <= set(event) for event in events)
    steps = [event for event in events if event["name"].startswith("step ")]
    assert len(steps) == stats.steps
    parts = [event for event in events if event["ph"] == "X" and event["name"] == "run"]
    assert all(any(s["ts"] <= p["ts"] and p["ts"] + p["dur"] <= s["ts"] + s["dur"] for s in steps) for p in parts)
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {output.request_id for output in outputs} <= threads
    spans = [event for event in events if event["ph"] == "X"]
    assert {"queued", "prefill", "decode", "preempted"} <= {event["name"] for event in spans}
    assert all(event["dur"] >= 0 for event in spans)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"sequences", "blocks", "waste, %"}


def test_story_is_small_and_what_its_command_makes_today(tmp_path, capsys):
    def events(path):
        header, *lines = read_recording(path)
        untimed = {"add": 2, "fork": 6, "schedule": 2, "update": 2, "finish": 5}  # where an event says when
        found = [event for line in lines for event in line["events"]]
        return header["config"], [[one for i, one in enumerate(event) if i != untimed.get(event[0])] for event in found]

    assert view.STORY.stat().st_size < 100_000
    story_recording.record(tmp_path / "story.jsonl")
    (config, made), (kept_config, kept) = events(tmp_path / "story.jsonl"), events(view.STORY)
    assert made == kept, "run python -m tools.story_recording"
    assert config.keys() == kept_config.keys()
    assert view.main(["-o", str(tmp_path / "story.html")]) == 0
    assert 'data-name="story.jsonl"' in (tmp_path / "story.html").read_text(encoding="utf-8")


def test_command_writes_what_it_is_asked_for(recorded, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    path = str(recorded[0])
    page, perfetto = tmp_path / "run.html", tmp_path / "run.json"
    assert view.main([path, path, "-o", str(page)]) == 0
    assert view.main([path, "--perfetto", str(perfetto)]) == 0
    assert page.read_text(encoding="utf-8").count('data-name="run.jsonl"') == 2
    assert json.loads(perfetto.read_text())["traceEvents"]
    assert opened == []
    monkeypatch.setattr(view.tempfile, "tempdir", str(tmp_path))
    assert view.main([path]) == 0
    assert len(opened) == 1
    assert opened[0].startswith("file://")
    for bad in ([str(tmp_path / "none.jsonl")], [path, "-o", str(tmp_path / "no" / "such.html")]):
        with pytest.raises(SystemExit, match="2"):
            view.main(bad)
        assert "cannot be" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        view.main([path, path, "--perfetto", str(perfetto)])
    assert "--perfetto exports one recording, got" in capsys.readouterr().err


def test_requests_have_the_names_of_their_adapters(tmp_path):
    """Salts stay numbers, and requests of one adapter and salt have the same."""
    for seed, name in enumerate(("alice", "bob")):
        make_adapter(tmp_path / name, seed)
    adapters = [None, *[LoRARequest(name, i, tmp_path / name) for i, name in enumerate(("alice", "bob", "alice"), 1)]][
        :3
    ]
    prompts = [{"prompt_token_ids": [5, 6, 7], **({"cache_salt": "secret"} if i == 4 else {})} for i in range(5)]
    with LLM(TINY_QWEN3, trace=tmp_path / "run.jsonl", enable_lora=True, max_loras=2, num_kv_blocks=32) as llm:
        llm.generate(
            prompts, SamplingParams(max_tokens=2), use_tqdm=False, lora_request=[*adapters, adapters[1], adapters[1]]
        )
    assert "secret" not in (tmp_path / "run.jsonl").read_text()
    lines = read_recording(tmp_path / "run.jsonl")
    check_recording(tmp_path / "run.jsonl", lines)
    seqs = [*replay_of(lines).seqs.values()]
    assert [seq.adapter for seq in seqs] == [None, "alice", "bob", "alice", "alice"]
    assert [seq.cache_salt for seq in seqs] == [None, "salt 1", "salt 2", "salt 1", "salt 3"]
