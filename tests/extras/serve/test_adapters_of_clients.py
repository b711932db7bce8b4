"""This package's own clients and `run-batch` name an adapter as their model. The oracle is the server's own answer."""

import json

import httpx
import pyarrow.parquet as pq
import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LoRARequest
from nanovllm_extras.bench import benchmark
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.batch import command
from nanovllm_extras.terminal.answerers import AnswerError, ServerAnswerer
from tests.extras.lora.peft_adapters import make_adapter
from tests.extras.serve.real_server import in_thread

QUESTION = [{"role": "user", "content": "What is a block table?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
NAMES = ("tiny-qwen3", "alice")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alice")
    make_adapter(folder, scale=0.6)
    return folder


def test_clients_and_rows_name_an_adapter(folder, tmp_path, monkeypatch, capsys):
    llm = AsyncLLM(TINY_QWEN3, enable_lora=True, num_kv_blocks=64, device="cpu")
    with llm, in_thread(llm, lora_modules=(LoRARequest("alice", 1, folder),)) as server:
        expected = {}
        for name in NAMES:
            body = {"model": name, "messages": QUESTION, **GREEDY}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
            expected[name] = answer["choices"][0]["message"]["content"]
            assert [*ServerAnswerer(server.url, name, None, GREEDY).answer(QUESTION)][-1].text == expected[name]
        with pytest.raises(AnswerError, match="unknown model 'bob'"):
            [*ServerAnswerer(server.url, "bob", None, GREEDY).answer(QUESTION)]
        options = ["--base-url", server.url, "--num-prompts", 2, "--random-input-len", 5, "--random-output-len", 3]
        options += ["--disable-tqdm", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "out.json"]
        assert benchmark.main([*map(str, options), "--model", "alice"]) == 0
        assert json.loads((tmp_path / "out.json").read_text())["completed"] == 2
        assert benchmark.main([*map(str, options), "--model", "bob"]) == 1
        assert "unknown model 'bob'" in capsys.readouterr().err
    assert expected["alice"] != expected[NAMES[0]]

    monkeypatch.setattr(command, "keep_from_collector", lambda: None)
    bodies = {name: {"model": name, "messages": QUESTION, **GREEDY} for name in (*NAMES, "bob")}
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": bodies[name]} for name in bodies
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "--num-kv-blocks", "64", "--device", "cpu"]
    assert command.main([*given, "--enable-lora", "--lora-modules", f"alice={folder}"]) == 0
    found = {row["custom_id"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert {name: found[name]["text"] for name in NAMES} == expected
    assert "unknown model 'bob'" in found["bob"]["error"]["message"]
    with pytest.raises(SystemExit):
        command.main([*given, "--lora-modules", f"alice={folder}"])
    assert "--lora-modules needs --enable-lora" in capsys.readouterr().err
