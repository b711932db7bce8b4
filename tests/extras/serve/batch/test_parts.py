"""The folder of answers: one run at a time, whole parts only, and what a killed run leaves behind."""

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from nanovllm_extras.serve.batch.attempts import Attempt
from nanovllm_extras.serve.batch.batch_inputs import are_in, digests_of
from nanovllm_extras.serve.batch.parts import SCHEMA, Busy, Parts, to_table


def answers(*names):
    return [{"custom_id": name} for name in names]


def test_parts_are_what_is_done(tmp_path):
    with Parts.opened(tmp_path / "out") as parts:
        parts.write(0, answers("a", "b"))
        parts.write(7, answers("c"))
    with Parts.opened(tmp_path / "out") as parts:
        assert are_in(digests_of("abcd"), parts.done()).tolist() == [True, True, True, False]
        table = pyarrow.dataset.dataset(parts.folder).to_table()  # other files in the folder are ignored
        assert table.schema == SCHEMA
        assert sorted(table.column("custom_id").to_pylist()) == ["a", "b", "c"]


def test_what_is_pending_or_half_written_is_removed(tmp_path):
    with Parts.opened(tmp_path) as parts:
        parts.write(0, answers("a"))
        whole = parts.paths()
        pq.write_table(to_table(answers("b")), tmp_path / "part-x-000000000001-0.parquet")
        (tmp_path / "part-x-000000000002-0.parquet").write_bytes(b"PAR1, but no end")
        for i in (1, 2, 3):
            (parts.checkpoint / f"part-x-{i:012}.pending.parquet").write_bytes(b"")
        (tmp_path / ".part-y-000000000000-0.parquet").write_bytes(b"half")
    with Parts.opened(tmp_path) as parts:
        assert parts.paths() == whole
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
        assert list(parts.checkpoint.iterdir()) == []


def test_one_run_at_a_time(tmp_path):
    with Parts.opened(tmp_path), pytest.raises(Busy, match="another run"), Parts.opened(tmp_path):
        pass
    with Parts.opened(tmp_path):
        pass


def test_a_folder_has_answers_to_one_thing(tmp_path):
    with Parts.opened(tmp_path) as parts:
        parts.check_same({"model": "a", "body": {"n": 1}})
        parts.check_same({"model": "a", "body": {"n": 1}})
        with pytest.raises(ValueError, match="model 'a', but this run has 'b'"):
            parts.check_same({"model": "b", "body": {"n": 1}})


# ---- attempts


def test_attempts_find_the_row_that_kills(tmp_path):
    """The process that computes all rows together dies twice; the one that computes them one by one dies at b."""
    rows = ["a", "b", "c"]
    together = [Attempt(tmp_path, "run", rows) for _ in range(2)]
    assert [one.is_alone for one in together] == [False, False]
    alone = Attempt(tmp_path, "run", rows)
    alone.note("a")
    alone.note(None)
    alone.note("b")
    last = Attempt(tmp_path, "run", rows)
    assert (alone.is_alone, alone.given_up, last.is_alone, last.given_up) == (True, [], True, ["b"])
    assert Attempt(tmp_path, "run", ["other"]).number == 1
    assert Attempt(tmp_path, "run 2", rows).number == 1, "another run's deaths may have another reason"
    last.end()
    assert Attempt(tmp_path, "run", rows).given_up == []
