"""A conversation's blocks by name: what is saved is restored, names stay in the folder, and damage is reported."""

import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_extras.kv_store.conversations import (
    UnknownNameError,
    delete_conversation,
    list_conversations,
    restore_conversation,
    save_conversation,
)
from nanovllm_extras.kv_store.disk_tier import DiskTier
from tests.conftest import examples
from tests.extras.kv_store.tier_machine import MAX_BYTES, block_data, block_name

BLOCKS = [block_name(key, tokens) for key, tokens in ((0, 0), (1, 151_935), (2, 2**31 - 1))]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve ☕ \ud83d"}]
BAD_NAMES = [
    "", ".", "..", "../x", "/x", "a/b", "a\\b/..", ".x", "a\0b", "a\n", "ü", "a b", "٣", "x" * 101, None, 7, b"a",
]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    store = DiskTier(tmp_path / "store", MAX_BYTES)
    for block in BLOCKS:
        store.save(block, block_data())
    return store


def test_a_conversation_outlives_its_engine(store):
    assert save_conversation(store, "chat-1", BLOCKS, MESSAGES) == 3
    store.close()
    again = DiskTier(store.folder, MAX_BYTES)
    assert restore_conversation(again, "chat-1") == (BLOCKS, 3, MESSAGES)
    again.failed(BLOCKS[1])
    assert restore_conversation(again, "chat-1") == (BLOCKS, 1, MESSAGES), "the others are computed"


def test_a_conversation_is_saved_after_the_folder_was_deleted(store):
    shutil.rmtree(store.folder)
    assert save_conversation(store, "chat-1", BLOCKS, MESSAGES) == 0
    assert restore_conversation(store, "chat-1") == (BLOCKS, 0, MESSAGES)
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_a_conversation_is_replaced_and_deleted(store):
    save_conversation(store, "a", BLOCKS)
    save_conversation(store, "b", BLOCKS[:1])
    assert save_conversation(store, "a", [*BLOCKS[:2], block_name(9)]) == 2
    assert restore_conversation(store, "a")[0] == [*BLOCKS[:2], block_name(9)]
    assert restore_conversation(store, "b")[0] == BLOCKS[:1]
    save_conversation(store, "empty", [])
    assert restore_conversation(store, "empty") == ([], 0, [])
    assert list_conversations(store) == ["a", "b", "empty"]
    delete_conversation(store, "a")
    for function in (restore_conversation, delete_conversation):
        with pytest.raises(UnknownNameError, match="`name` must be that of a saved conversation, got 'a'"):
            function(store, "a")
    assert list_conversations(store) == ["b", "empty"]
    assert list_conversations(DiskTier(store.folder.parent / "other", MAX_BYTES)) == []
    assert store.match(BLOCKS) == 3


def test_what_is_written(store):
    save_conversation(store, "a.b_C-1", BLOCKS)
    (path,) = (store.folder / "conversations").iterdir()
    assert path.name == "a.b_C-1.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    content = json.loads(path.read_text())
    assert [block["key"] for block in content["blocks"]] == [block.key.hex() for block in BLOCKS]
    assert content["blocks"][1]["tokens"] == [151_935] * 4
    assert DiskTier(store.folder, MAX_BYTES).match(BLOCKS) == 3, "it is not taken for a block"


@pytest.mark.parametrize("function", [save_conversation, restore_conversation, delete_conversation])
def test_names_that_are_refused(store, function):
    for name in BAD_NAMES:
        with pytest.raises(ValueError, match=r"`name` must be 1 to 100 letters, digits"):
            function(store, name, *[BLOCKS] * (function is save_conversation))
    assert not (store.folder / "conversations").exists()
    assert len(list(store.folder.parent.iterdir())) == 1


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    return DiskTier(tmp_path_factory.mktemp("conversations") / "store", MAX_BYTES)


@given(st.text(st.sampled_from("a./\\~-_ \0\n"), max_size=6))
@settings(max_examples=examples(200), deadline=None)
def test_no_name_leaves_the_folder(empty_store, name):
    try:
        save_conversation(empty_store, name, BLOCKS)
    except ValueError:
        assert name.startswith(".") or not name or set(name) - set("a._-")
        return
    outside = [path for path in empty_store.folder.parent.rglob("*") if path.suffix == ".json"]
    assert [path.name for path in outside] == [f"{name}.json"]
    assert outside[0].parent == empty_store.folder / "conversations"
    delete_conversation(empty_store, name)


KEY = "00" * 32
BLOCKS_OF = [  # (version, key, tokens)
    (2, KEY, "[1]"), (1, "00" * 31, "[1]"), (1, "zz" * 32, "[1]"), (1, KEY, "[]"), (1, KEY, "[-1]"), (1, KEY, "[1.5]"),
    (1, KEY, "[true]"), (1, KEY, '"ab"'), (1, KEY, "[2147483648]"), (1, KEY, "3"), (1, KEY, "{}"),
]  # fmt: skip
MESSAGES_OF = [
    "3", "[3]", '["role"]', '[{"role": "user"}]', '[{"role": "user", "content": 3}]',
    '[{"role": "user", "content": "a", "b": "c"}]',
]  # fmt: skip
DAMAGED = [
    *("", "{", "[]", "null", "{}", "[" * 100_000, "\xff", '{"version": 1}', '{"version": 1, "blocks": []}'),
    *(f'{{"version": 1, "blocks": {blocks}}}' for blocks in ("3", "[3]", '[{"key": "00"}]')),
    *(
        f'{{"version": {version}, "blocks": [{{"key": "{key}", "tokens": {tokens}}}], "messages": []}}'
        for version, key, tokens in BLOCKS_OF
    ),
    *(f'{{"version": 1, "blocks": [], "messages": {messages}}}' for messages in MESSAGES_OF),
]


def test_a_damaged_file_is_refused(store):
    for content in DAMAGED:
        save_conversation(store, "a", BLOCKS)
        (path,) = (store.folder / "conversations").iterdir()
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=r"the conversation 'a' (is damaged|cannot be read).*[Ss]ave it again"):
            restore_conversation(store, "a")
    save_conversation(store, "a", BLOCKS)
    assert restore_conversation(store, "a") == (BLOCKS, 3, [])


def test_a_link_is_not_followed(store, tmp_path):
    save_conversation(store, "a", BLOCKS)
    (path,) = (store.folder / "conversations").iterdir()
    elsewhere = tmp_path / "elsewhere.json"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="cannot be read"):
        restore_conversation(store, "a")
    save_conversation(store, "a", BLOCKS[:1])
    assert restore_conversation(store, "a")[0] == BLOCKS[:1]
    assert len(json.loads(elsewhere.read_text())["blocks"]) == 3


def test_a_save_that_is_cut_off_leaves_the_old_one(store, monkeypatch):
    save_conversation(store, "a", BLOCKS)

    def dump(content, file):
        file.write("{")
        raise OSError("full")

    monkeypatch.setattr(json, "dump", dump)
    with pytest.raises(OSError, match="full"):
        save_conversation(store, "a", BLOCKS[:1])
    assert restore_conversation(store, "a") == (BLOCKS, 3, [])
    assert [path.name for path in (store.folder / "conversations").iterdir()] == ["a.json"]
