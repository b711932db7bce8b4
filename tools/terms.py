"""Write the glossary in both languages and the viewer's terms from one list, `docs/book/terms.json`.

    python -m tools.terms           # write the pages and the viewer's file; then look at the difference
    python -m tools.terms --check   # fail if a file differs from the list, or if a Chinese text uses another word

`words` are the terms that the book, the site and the viewer share: the English and the Chinese word, and patterns
(`not`) of other Chinese words that mean the same. `chapters` are the entries of the glossary, and `head` is its first
paragraph. A cell of a table is one text for both languages, or a list of an English and a Chinese text.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "docs" / "book"
VIEWER = ROOT / "nanovllm_extras" / "trace" / "viewer"
WIDTH = 120
LANGUAGES = ("en", "zh")
PAGES = {"en": BOOK / "glossary.md", "zh": BOOK / "zh" / "glossary.md"}

TITLES = {"en": "# Glossary", "zh": "# 术语表"}
COLUMNS = {"en": "| term | here | vLLM | SGLang |", "zh": "| 术语 | 本引擎 | vLLM | SGLang |"}
CONTENTS = {"en": "contents", "zh": "目录"}


class OtherWord(NamedTuple):
    """A place where a Chinese text uses another word for a term of the list."""

    path: Path
    line: int
    found: str
    term: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.found}: write {self.term}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the glossary and the viewer's terms from docs/book/terms.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs from the list")
    args = parser.parse_args()
    files = generated()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if not args.check:
        for path in stale:
            path.write_text(files[path], encoding="utf-8")
            print(path.relative_to(ROOT))
        return
    faults = [f"{path.relative_to(ROOT)} is stale: python -m tools.terms" for path in stale]
    faults += map(str, other_words())
    print("\n".join(faults))
    sys.exit(1 if faults else 0)


def read_terms() -> dict[str, Any]:
    terms: dict[str, Any] = json.loads((BOOK / "terms.json").read_text(encoding="utf-8"))
    return terms


def generated() -> dict[Path, str]:
    """Return the text of each file that is made from the list."""
    terms = read_terms()
    files = {page: glossary(terms, language) for language, page in PAGES.items()}
    return files | {VIEWER / "terms.js": viewer_terms(terms["words"])}


# ---- what is generated


def glossary(terms: dict[str, Any], language: str) -> str:
    chapters, column = terms["chapters"], LANGUAGES.index(language)
    parts = [f"{TITLES[language]}\n", paragraph(terms["head"][language], language)]
    for chapter in chapters:
        parts.append(f"## [{title_of(chapter['page'], language)}]({chapter['page']})\n")
        parts += [definition(term, language) for term in chapter["terms"]]
        rows = (" | ".join(pick(cell, column) for cell in row) for row in chapter["table"])
        parts.append("\n".join([COLUMNS[language], "|---|---|---|---|", *(f"| {row} |" for row in rows)]) + "\n")
    last = chapters[-1]["page"]
    parts.append(f"[← {title_of(last, language)}]({last}) · [{CONTENTS[language]}](README.md)\n")
    return "\n".join(parts)


def definition(term: dict[str, Any], language: str) -> str:
    name = term["name"][LANGUAGES.index(language)]
    stop = {"en": ".** ", "zh": "**。"}[language]
    return paragraph(f"**{name}{stop}{term[language]}", language)


def paragraph(text: str, language: str) -> str:
    """Return the paragraph, wrapped if it is English: a line break inside a Chinese sentence is shown as a space."""
    is_wrapped = language == "en"
    return (textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) if is_wrapped else text) + "\n"


def pick(cell: str | list[str], column: int) -> str:
    return cell if isinstance(cell, str) else cell[column]


def title_of(page: str, language: str) -> str:
    """Return the title of a chapter, as its own page has it."""
    return (PAGES[language].parent / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def viewer_terms(words: dict[str, Any]) -> str:
    lines = [f"  {name}: {json.dumps([word['en'], word['zh']], ensure_ascii=False)}," for name, word in words.items()]
    note = "// The terms that the page shares with the book. `python -m tools.terms` writes this file."
    return "\n".join([note, "", "export const TERMS = {", *lines, "};", ""])


# ---- other words for the same term


def chinese_texts() -> list[Path]:
    """Return the files with Chinese text: the book, pages next to their English ones, and the viewer's words."""
    pages = [*ROOT.glob("*.zh.md"), *(ROOT / "docs").glob("*.zh.md"), *(BOOK / "zh").glob("*.md")]
    return [*sorted(pages), VIEWER / "i18n.js"]


def other_words() -> list[OtherWord]:
    patterns = [(re.compile(other), word["zh"]) for word in read_terms()["words"].values() for other in word["not"]]
    return [
        OtherWord(path, number, found[0], term)
        for path in chinese_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        for pattern, term in patterns
        for found in pattern.finditer(line)
    ]


if __name__ == "__main__":
    main()
