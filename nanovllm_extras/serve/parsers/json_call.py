"""Parse a tool call that is a JSON object: `{"name": "get_weather", "arguments": {"city": "Oslo"}}`."""

from nanovllm_extras.serve.parsers.json_scanner import ObjectScanner, State
from nanovllm_extras.serve.parsers.tool_parser import Call

ARGUMENTS = ("arguments", "parameters")  # keys that models use for the arguments


class JsonCall(Call):
    """A call as a JSON object. Its arguments are returned exactly as the model has written them."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner = ObjectScanner()
        self._num_taken = 0  # characters of the arguments that have been taken

    @property
    def has_ended(self) -> bool:
        return self._scanner.state in (State.DONE, State.WRONG)

    def read(self, text: str) -> str:
        """Read the part of `text` that belongs to the object, and return the rest."""
        num_used = self._scanner.feed(text)
        self.text += text[:num_used]
        name = self._scanner.value_of("name") if self.name is None else None
        if isinstance(name, str):
            self.name = name
        return text[num_used:]

    def take_arguments(self) -> str:
        """Return the part of the arguments that is new since the last time.

        Arguments that are not an object are returned when they are complete: a string is replaced by its content, which
        should be JSON. Missing arguments are an empty object.
        """
        key = next((key for key in self._scanner.raw if key in ARGUMENTS), "")
        raw = self._scanner.raw.get(key, "")
        if not raw.startswith("{"):
            if not self.has_ended:
                return ""
            value = self._scanner.value_of(key)
            raw = value if isinstance(value, str) else "{}" if value is None else raw
        text = raw[self._num_taken :]
        self._num_taken = len(raw)
        return text
