"""`LoRARequest`: which adapter a request wants. The fields have the names of vLLM's."""

from dataclasses import dataclass
from pathlib import Path

from nanovllm.checks import check_int


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, a number that no other adapter of the engine has, and its folder.

    Raises TypeError or ValueError if the name is empty, the number is below 1 or the path is empty.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str):
            raise TypeError(f"lora_name must be a str, got {self.lora_name!r}")
        if not self.lora_name:
            raise ValueError("lora_name must not be empty, got ''")
        check_int("lora_int_id", self.lora_int_id, 1)
        if not isinstance(self.lora_path, str | Path):
            raise TypeError(f"lora_path must be a str or Path, got {self.lora_path!r}")
        if not str(self.lora_path):
            raise ValueError("lora_path must not be empty; it is the folder with adapter_config.json")

    @property
    def name(self) -> str:
        """The adapter's name, as in vLLM."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder, as in vLLM."""
        return str(self.lora_path)
