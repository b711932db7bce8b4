"""`AdapterRegistry`: the adapters that an engine has loaded, by the names and numbers that users give them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from nanovllm_extras.lora.adapters import Adapters, Ranks
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.records.loaded_adapter import LoadedAdapter


@dataclass(frozen=True)
class Known:
    """An adapter that requests can have."""

    request: LoRARequest
    adapter: LoadedAdapter


class AdapterRegistry:
    """Loads adapters when they are first asked for.

    max_loaded: the most adapters in host memory, None for any number; the least recently used one that no request has
    is forgotten, and read again when it is needed. in_use: returns the numbers of adapters of unfinished requests
    """

    def __init__(
        self,
        adapters: Adapters,
        ranks: Callable[[], Ranks],
        max_loaded: int | None,
        in_use: Callable[[], Collection[int]],
    ) -> None:
        self._adapters, self._ranks, self._max_loaded, self._in_use = adapters, ranks, max_loaded, in_use
        self._numbers = count(1)
        self.known: dict[int, Known] = {}
        """lora_int_id -> adapter, the least recently used first."""
        self._leaving: list[int] = []  # numbers of adapters that are forgotten when their requests have finished
        self._retired: set[int] = set()  # of `known`: other adapters may have their names

    def find(self, wanted: LoRARequest) -> LoadedAdapter:
        """Return the adapter of a request, loaded. Raises ValueError, and changes nothing, if it cannot be."""
        if not isinstance(wanted, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {wanted!r}")
        known = self.known.get(wanted.lora_int_id)
        if known is not None:
            if (known.request.name, known.request.path) != (wanted.name, wanted.path):
                raise ValueError(
                    f"lora_int_id {wanted.lora_int_id} belongs to the adapter {known.request.name!r} of "
                    f"{known.request.path}, got {wanted.name!r} of {wanted.path}; give each adapter a number of its own"
                )
            self.known[wanted.lora_int_id] = self.known.pop(wanted.lora_int_id)
            return known.adapter
        if (other := self.named(wanted.name)) and wanted.lora_int_id not in self._retired:
            raise ValueError(
                f"lora_name {wanted.name!r} belongs to the adapter with lora_int_id {other.lora_int_id}, got "
                f"{wanted.lora_int_id}; give each adapter a name of its own"
            )
        number = next(self._numbers)
        read = self._adapters.load(self._ranks(), number, Path(wanted.path))
        self._make_room()  # afterwards, because a file that cannot be read must not evict an adapter
        adapter = LoadedAdapter(number, wanted.name, read.digest)
        self.known[wanted.lora_int_id] = Known(wanted, adapter)
        return adapter

    def named(self, name: str) -> LoRARequest | None:
        """Return what a request for the adapter `name` is, if it is loaded and not retired."""
        requests = [one.request for one in self.known.values()]
        return next((one for one in requests if one.name == name and one.lora_int_id not in self._retired), None)

    def retire(self, lora_int_id: int) -> None:
        """Free the name of an adapter. Requests with its number still get it, until it is removed."""
        self._retired.add(lora_int_id)

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; unfinished requests keep it. Returns False if there is none of this number."""
        self._retired.discard(lora_int_id)
        is_known = lora_int_id in self.known
        if is_known:
            self._leaving.append(self.known.pop(lora_int_id).adapter.number)
        self.sweep()
        return is_known

    @property
    def needs_sweep(self) -> bool:
        """Whether there is something to unload, perhaps only once a request has ended."""
        return bool(self._leaving) or (self._max_loaded is not None and len(self.known) > self._max_loaded)

    def sweep(self) -> None:
        """Unload adapters that no request has: those that were removed, and those above `max_loaded`."""
        in_use = self._in_use()
        self._trim(self._max_loaded, in_use)
        for number in [one for one in self._leaving if one not in in_use]:
            self._adapters.unload(self._ranks(), number)
            self._leaving.remove(number)

    def _make_room(self) -> None:
        """Unload the least recently used adapters that no request has, until there is room for another one."""
        if self._max_loaded is not None:
            self._trim(self._max_loaded - 1, self._in_use())
        self.sweep()

    def _trim(self, most: int | None, in_use: Collection[int]) -> None:
        """Forget the least recently used adapters that no request has, until at most `most` are known."""
        for lora_int_id, known in [*self.known.items()]:
            if most is None or len(self.known) <= most:
                return
            if known.adapter.number not in in_use:
                self._leaving.append(self.known.pop(lora_int_id).adapter.number)
