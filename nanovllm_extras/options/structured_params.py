"""Define the fields that constrain the output of a request, with vLLM's names and meanings.

    StructuredOutputsParams(json={"type": "object", …})     a JSON value that fits a schema
    StructuredOutputsParams(regex="[a-z]+@[a-z]+")          a text that the whole expression matches
    StructuredOutputsParams(choice=["yes", "no"])           one of these texts
    StructuredOutputsParams(grammar='start: "a"+')          a text of a context-free grammar, in Lark's or GBNF's syntax
    StructuredOutputsParams(json_object=True)               any JSON object

This file checks the fields, and that exactly one form is given. `compiler.py` compiles the form, and `grammar.py` masks
the tokens of each step that do not conform to it.
"""

import json
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from nanovllm.checks import check_bool
from nanovllm_extras.options.option_checks import takes_vllm_options
from nanovllm_extras.options.vllm_options import translate

FORMS = ("json", "regex", "choice", "grammar", "json_object")


@takes_vllm_options("structured outputs")
@dataclass
class StructuredOutputsParams:
    """The form of an output; exactly one of the forms must be given.

    Raises TypeError or ValueError, with the field, the value and the allowed values. A schema, expression or grammar
    that cannot be compiled is refused when the request is added.
    """

    json: str | Mapping[str, object] | None = None
    """A JSON schema, as text or as a dict: the output is JSON that conforms to the schema."""
    regex: str | None = None
    """A regular expression in Rust's syntax, without look-around: the whole output matches it."""
    choice: abc.Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A grammar in Lark's syntax with the rule `start`, or in GBNF's with the rule `root`."""
    json_object: bool | None = None
    """True: the output is a JSON object."""
    disable_any_whitespace: bool = False
    """Whether JSON must not have white space between its tokens."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the tokens of JSON; None allows up to 32 characters."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise TypeError or ValueError if a field is invalid. Requests call this when they are added."""
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"structured_outputs.{name} must be a str or None, got {value!r}")
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise TypeError(
                f"structured_outputs.json must be a JSON schema as a str or dict, or None, got {self.json!r}"
            )
        self._check_choice()
        if self.json_object is not None:
            check_bool("structured_outputs.json_object", self.json_object)
        check_bool("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                "structured_outputs.whitespace_pattern must be None with disable_any_whitespace, "
                f"got {self.whitespace_pattern!r}"
            )
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(FORMS)}, got {given or 'none'}")

    def clone(self) -> "StructuredOutputsParams":
        """Check the fields again, and return a copy that shares no mutable values. Its schema is text."""
        self.check()
        return replace(
            self,
            json=None if self.json is None else schema_text(self.json),
            choice=None if self.choice is None else tuple(self.choice),
        )

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams":
        """Return `value` if it has this class, or create an object from a dict of the fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"structured_outputs must be a StructuredOutputsParams, a dict or None, got {value!r}")
        known = [field.name for field in fields(cls)]
        if not value.keys() <= set(known):
            value = translate(value, known, "structured outputs")
        if unknown := sorted(set(map(str, value)) - set(known)):
            raise ValueError(f"structured_outputs has the fields {', '.join(known)}, got {', '.join(unknown)}")
        return cls(**value)

    def _check_choice(self) -> None:
        choice = self.choice
        if choice is None:
            return
        if isinstance(choice, str | bytes | Mapping) or not isinstance(choice, abc.Sequence):
            raise TypeError(f"structured_outputs.choice must be a list of strings or None, got {choice!r}")
        if not choice:
            raise ValueError("structured_outputs.choice must have at least 1 text, got an empty list")
        for i, text in enumerate(choice):
            if not isinstance(text, str):
                raise TypeError(f"structured_outputs.choice[{i}] must be a str, got {text!r}")
            if not text:
                raise ValueError(f"structured_outputs.choice[{i}] must not be empty, got {text!r}")


def schema_text(schema: str | Mapping[str, object]) -> str:
    """Return a schema as JSON in a normalised format. Raises ValueError if it is not JSON."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        return json.dumps(json.loads(text, parse_int=exact_int), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is not a JSON schema: {error}") from None


def exact_int(digits: str) -> int:
    """Return an integer. Raises ValueError beyond 2**53, because compilers of schemas use floats."""
    value = int(digits)
    if abs(value) > 2**53:
        raise ValueError(f"integers must be within 2**53, got {digits[:40]}")
    return value


def check_structured_outputs(name: str, value: object) -> None:
    """Raise TypeError or ValueError if the field `structured_outputs` is invalid."""
    StructuredOutputsParams.of(value).check()


FIELD_CHECKS = {"structured_outputs": check_structured_outputs}
"""Field of `SamplingParams` -> its check."""
