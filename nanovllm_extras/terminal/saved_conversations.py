"""Save conversations by name, and continue them in another process without computing their prompts again.

A conversation is saved as its messages, and as the names of the blocks that its prompt fills. The blocks themselves are
in the engine's K/V store.
"""

from nanovllm_extras.full_llm import LLM
from nanovllm_extras.kv_store.kv_slots import Slot, Slots
from nanovllm_extras.terminal.chat_history import Message


class SavedConversations:
    """The conversations in the folder of an engine's store. Raises ValueError if it has none.

    The methods raise ValueError for a bad or unknown name and for a damaged file, and OSError.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._slots = Slots(llm.engine.parts.kv_store)

    def names(self) -> list[str]:
        return self._slots.names()

    def save(self, name: str, messages: list[Message]) -> str:
        """Save a conversation, and return a line about it."""
        prompt = self._llm.render_chat(messages, add_generation_prompt=False)[0]
        return describe("saved", self._slots.save(name, prompt["prompt_token_ids"], messages=messages))

    def load(self, name: str) -> tuple[list[Message], str]:
        """Return the messages of a saved conversation, and a line about it."""
        slot = self._slots.restore(name)
        if not slot.messages:
            raise ValueError(f"the conversation {name!r} has no messages, because a server has saved it")
        return slot.messages, describe("restored", slot)


def describe(what: str, slot: Slot) -> str:
    stored = f"K and V of {slot.num_stored_tokens} of {slot.num_tokens} tokens are in the store"
    return f"{what} {slot.name}: {len(slot.messages)} messages; {stored}"
