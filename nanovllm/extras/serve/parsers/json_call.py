"""A call that is a JSON object: `{"name": "get_weather", "arguments": {"city": "Oslo"}}`."""

from nanovllm.extras.serve.parsers.json_scanner import ObjectScanner, State
from nanovllm.extras.serve.parsers.tool_parser import Call

ARGUMENTS = ("arguments", "parameters")  # names that models give them


class JsonCall(Call):
    """The arguments are handed on in the model's own spelling."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner = ObjectScanner()
        self._num_taken = 0  # characters of the arguments

    @property
    def has_ended(self) -> bool:
        return self._scanner.state in (State.DONE, State.WRONG)

    def read(self, text: str) -> str:
        """Take the part of `text` that belongs to the object, and return the rest."""
        num_used = self._scanner.feed(text)
        self.text += text[:num_used]
        name = self._scanner.value_of("name") if self.name is None else None
        if isinstance(name, str):
            self.name = name
        return text[num_used:]

    def take_arguments(self) -> str:
        """The part of the arguments that has come since the last call; of anything but an object, when it is complete.

        Arguments that are JSON within a string lose the string. Missing arguments are an empty object.
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
