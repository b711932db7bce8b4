"""Rows of files: which there are, how they are named, and what is wrong with those that are no requests."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanovllm_extras.serve.batch.batch_inputs import Records, are_in, digest, digests_of, find_sources, scan
from nanovllm_extras.serve.batch.rows import Form

PROMPTS = Form(prompt_column="prompt", id_column=None)


def openai_row(name, **others):
    row = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({**row, **others})


def read_all(paths, form, rows_per_part=3):
    batch = scan(find_sources(paths), form, rows_per_part)
    records = Records()
    return batch, [row for chunk in batch.chunks for row in batch.read(chunk, records)]


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


# ---- names


def test_each_row_is_read_once_and_named_by_its_line(tmp_path):
    """Blank lines have numbers, and are no rows. The last line needs no end."""
    lines = [b"" if i % 4 == 3 else json.dumps({"prompt": f"p{i}"}) for i in range(23)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    for rows_per_part in (1, 2, 3, 100):
        batch, rows = read_all([path], PROMPTS, rows_per_part)
        expected = [i for i in range(23) if i % 4 != 3]
        assert [row.custom_id for row in rows] == [f"in.jsonl:{i + 1}" for i in expected]
        assert [json.loads(row.body)["prompt"] for row in rows] == [f"p{i}" for i in expected]
        assert {chunk.num_rows for chunk in batch.chunks[:-1]} <= {rows_per_part}
        assert are_in(digests_of(row.custom_id for row in rows), batch.digests).all()


def test_parquet_and_folders(tmp_path):
    """Chunks cross the borders of row groups."""
    (tmp_path / "a").mkdir()
    table = pa.table({"prompt": [f"p{i}" for i in range(11)], "key": [*range(10), 0], "top_k": [None, *range(1, 11)]})
    pq.write_table(table, tmp_path / "a" / "one.parquet", row_group_size=4)
    write_lines(tmp_path / "two.jsonl", json.dumps({"prompt": "q", "key": "k"}), json.dumps({"prompt": "r"}))
    form = Form("prompt", "key", chat=True, body={"top_k": 99, "seed": 1}, body_columns=("top_k",))
    _, rows = read_all([tmp_path], form)
    assert [row.custom_id for row in rows] == [*map(str, range(10)), "a/one.parquet:11", "k", "two.jsonl:2"]
    bodies = [json.loads(row.body) for row in rows if not row.code]
    assert [body["messages"][0]["content"] for body in bodies] == [*(f"p{i}" for i in range(10)), "q", "r"]
    assert [body["top_k"] for body in bodies] == [99, *range(1, 10), 99, 99]
    assert {row.url for row in rows} == {"/v1/chat/completions", ""}
    assert rows[10].code == "duplicate_id"


def test_of_rows_with_the_same_name_the_first_keeps_it(tmp_path):
    names = ["a", "b", "a", "c", "b", "a"]
    path = write_lines(tmp_path / "in.jsonl", *map(openai_row, names))
    batch, rows = read_all([path], Form())
    assert [row.custom_id for row in rows] == ["a", "b", "in.jsonl:3", "c", "in.jsonl:5", "in.jsonl:6"]
    assert [row.code for row in rows] == ["", "", "duplicate_id", "", "duplicate_id", "duplicate_id"]
    assert "in.jsonl:1" in rows[2].message
    assert len(np.unique(batch.digests)) == 6


def test_names_that_cannot_be_told_apart_are_refused(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", openai_row("in.jsonl:2"), openai_row("in.jsonl:2"))
    with pytest.raises(ValueError, match="--id-column"):
        read_all([path], Form())
    (tmp_path / "other").mkdir()
    other = write_lines(tmp_path / "other" / "in.jsonl", openai_row("x"))
    with pytest.raises(ValueError, match=r"the name in\.jsonl"):
        find_sources([path, other])


def test_digests_do_not_end_with_zero():
    """numpy would drop it, and two digests that differ by it would be equal. One in 256 would have one."""
    assert all(digest(str(i))[-1] for i in range(2000))
    digests = np.sort(digests_of(map(str, range(2000))))
    assert are_in(digests_of(map(str, range(2500))), digests).sum() == 2000


# ---- rows that are no requests


BAD_ROWS = [  # (line, code, message)
    (b"{", "invalid_json", "not valid JSON"),
    (b'{"custom_id": "\xff"}', "invalid_json", "not valid JSON"),
    (b"[" * 100_000, "invalid_json", "not valid JSON"),
    ("3", "invalid_row", "object"),
    (openai_row("r", url="/v1/models"), "invalid_url", "'/v1/models'"),
    (openai_row("r", url=["/v1/completions"]), "invalid_url", "'/v1/completions'"),
    (openai_row("r", method="GET"), "invalid_method", "'GET'"),
    (openai_row("r", body=[1]), "invalid_body", "list"),
    (openai_row("r", body={"prompt": "x", "stream": True}), "invalid_body", "stream"),
    (openai_row(None), "invalid_custom_id", "None"),
    (openai_row("\ud800"), "invalid_custom_id", "custom_id"),
    (openai_row(True), "invalid_custom_id", "True"),
]


def test_a_bad_row_is_told_and_stops_no_other(tmp_path):
    for line, code, message in BAD_ROWS:
        path = write_lines(tmp_path / "in.jsonl", openai_row("before"), line, openai_row("behind"))
        _, rows = read_all([path], Form(), rows_per_part=2)
        assert [row.code for row in rows] == ["", code, ""], line
        assert message in rows[1].message
        assert rows[1].custom_id in ("r", "in.jsonl:2")


def test_bad_prompts(tmp_path):
    values = ["", None, 3, [], {}, ["x"], [1, 2], [{"role": "user", "content": "x"}]]
    path = write_lines(tmp_path / "in.jsonl", *[json.dumps({"prompt": value}) for value in values])
    _, rows = read_all([path], PROMPTS)
    assert [row.code for row in rows] == ["invalid_prompt"] * 5 + [""] * 3
    assert [row.url for row in rows[5:]] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]


def test_inputs_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        find_sources([write_lines(tmp_path / "in.csv", "x")])
    with pytest.raises(ValueError, match=r"there is no \.jsonl or \.parquet file"):
        find_sources([tmp_path])
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match="--prompt-column"):
        read_all([tmp_path / "in.parquet"], Form())
    with pytest.raises(ValueError, match="no column prompt; it has text"):
        read_all([tmp_path / "in.parquet"], PROMPTS)
