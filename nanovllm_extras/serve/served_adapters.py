"""`ServedAdapters`: the LoRA adapters that requests may name as their model, and which of them are in use.

A request has accepted its adapter when it is about to be submitted. From then on it keeps the adapter, also if a client
unloads it meanwhile: the engine forgets an unloaded adapter when its last request has ended. New requests get 404.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from nanovllm_extras.lora.lora_request import LoRARequest


class ServedAdapters(dict[str, LoRARequest]):
    """Name -> adapter. on_unused: called with the number of an unloaded adapter when its last request has ended"""

    def __init__(self, adapters: Iterable[LoRARequest], on_unused: Callable[[int], None]) -> None:
        super().__init__({one.name: one for one in adapters})
        self._on_unused = on_unused
        self._last_number = max([one.lora_int_id for one in self.values()], default=0)
        self._num_users: Counter[int] = Counter()  # number of an adapter -> requests in progress
        self._unloaded: set[int] = set()  # numbers of adapters that requests in progress still use

    def take_number(self) -> int:
        """Return a number for a new adapter, which no other has had."""
        self._last_number += 1
        return self._last_number

    def hold(self, adapter: LoRARequest | None) -> None:
        """Count one more request in progress with an adapter, or with none."""
        if adapter is not None:
            self._num_users[adapter.lora_int_id] += 1

    def release(self, adapter: LoRARequest | None) -> None:
        """Count one less, once its request is not in the engine any more, or is being aborted."""
        if adapter is None:
            return
        number = adapter.lora_int_id
        self._num_users[number] -= 1
        if not self._num_users[number]:
            del self._num_users[number]
            if number in self._unloaded:
                self._unloaded.remove(number)
                self._on_unused(number)

    def unload(self, name: str) -> LoRARequest | None:
        """Forget a name, and return its adapter; None if there is none. Without requests it is unused at once."""
        adapter = self.pop(name, None)
        if adapter is not None:
            self._unloaded.add(adapter.lora_int_id)
            self.hold(adapter)
            self.release(adapter)
        return adapter
