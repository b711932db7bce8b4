"""One word for one thing: the glossary and the viewer's terms come from one list, and Chinese texts use its words."""

import json
import re
import unicodedata

import pytest

from tools import terms

WORDS = terms.read_terms()["words"]
TEXT = r'"(?:[^"\\]|\\.)*"'


@pytest.mark.parametrize("path", sorted(terms.generated()), ids=lambda path: str(path.relative_to(terms.ROOT)))
def test_a_file_is_made_from_the_list(path):
    assert path.read_text(encoding="utf-8") == terms.generated()[path], "python -m tools.terms"


def test_no_chinese_text_uses_another_word_for_a_term():
    assert [str(other) for other in terms.other_words()] == []


def test_another_word_is_found_and_the_term_itself_is_not(tmp_path, monkeypatch):
    """The patterns of the list must match other words only: a pattern that matches its own term finds nothing wrong."""
    monkeypatch.setattr(terms, "ROOT", tmp_path)
    page = tmp_path / "page.zh.md"
    monkeypatch.setattr(terms, "chinese_texts", lambda: [page])
    page.write_text("\n".join(f"这里的{word['zh']}很多。" for word in WORDS.values()), encoding="utf-8")
    assert terms.other_words() == []
    page.write_text("块表。\n提示的分段预填充，前向传播一次，\n一个潜向量、递归状态、空块，录像。", encoding="utf-8")
    found = {(other.line, other.term) for other in terms.other_words()}
    assert found >= {(2, "提示词"), (2, "分块预填充"), (2, "前向计算")}
    assert {term for line, term in found if line == 3} == {"潜在向量", "循环状态", "占位块", "运行记录"}


def is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def unclosed_bold(line: str) -> list[str]:
    """Return bold texts of a line that Markdown does not end: `**` after punctuation must not touch a word after it."""
    line = re.sub(r"`[^`]*`", "code", line)
    found = [bold for bold in re.finditer(r"\*\*(.+?)\*\*(?=(.))", line) if is_punctuation(bold[1][-1])]
    return [bold[1] for bold in found if not bold[2].isspace() and not is_punctuation(bold[2])]


def test_bold_text_of_chinese_pages_ends_where_it_should():
    """Chinese has no spaces after a sentence, so `**…？**…` is not bold: the mark belongs after the `**`."""
    assert unclosed_bold("**为什么？**设 θ") == ["为什么？"]
    assert unclosed_bold("**为什么**？设 **头**（head），**K** 和 `**`") == []
    pages = [path for path in terms.chinese_texts() if path.suffix == ".md"]
    lines = [(path.name, line) for path in pages for line in path.read_text(encoding="utf-8").split("\n")]
    assert [(name, text) for name, line in lines for text in unclosed_bold(line)] == []


def test_both_languages_of_the_viewer_name_the_same_terms():
    """Where an English text has a term of the list, the Chinese text beside it has the Chinese term."""
    script = (terms.VIEWER / "i18n.js").read_text(encoding="utf-8")
    pairs = [tuple(map(json.loads, pair)) for pair in re.findall(rf"\[\s*({TEXT}),\s*({TEXT}),?\s*\]", script)]
    assert len(pairs) > 300
    missing = [
        (word["zh"], chinese)
        for word in WORDS.values()
        for english, chinese in pairs
        if re.search(rf"\b{word['en']}(e?s)?\b", english, re.IGNORECASE) and word["zh"] not in chinese
    ]
    assert missing == []


def test_the_viewer_names_only_terms_of_the_list():
    script = (terms.VIEWER / "i18n.js").read_text(encoding="utf-8")
    used = set(re.findall(r"\bTERMS\.(\w+)", script))
    assert used
    assert used <= WORDS.keys()
