"""Text in the languages of the exercises."""

from typing import Literal, NamedTuple

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


class Text(NamedTuple):
    """The same text in English and in Chinese."""

    en: str
    zh: str

    def show(self, language: Language) -> str:
        return self.zh if language == "zh" else self.en

    def format(self, **values: object) -> "Text":
        """Return the text with `{name}` replaced by a value, in both languages."""
        return Text(self.en.format(**values), self.zh.format(**values))


def same_text(text: str) -> Text:
    """Return text that is the same in all languages: numbers, names and drawings."""
    return Text(text, text)


def count(number: int, noun: str) -> str:
    """Return the number with the English noun: "1 block", "2 blocks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
