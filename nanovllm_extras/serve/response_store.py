"""Keep responses in memory, so that later requests can continue, read and delete them.

The items of a conversation are shared: a response has its own turn (its input and its output), and a reference to the
turn that it continues. So a conversation of n turns needs the memory of n turns, not of n².

    resp_1 ─→ turn 1                 Deleting resp_1 keeps turn 1 while resp_2 or resp_3 need it.
    resp_2 ─→ turn 2 ─→ turn 1
    resp_3 ─→ turn 3 ─→ turn 1

Everything is JSON that is already encoded, which is smaller than Python's objects. Call all methods in the event loop.
"""

import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from uuid import uuid4

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from nanovllm_extras.serve.event_log import EventLog

logger = logging.getLogger(__name__)

ITEM_BYTES, RESPONSE_BYTES = 400, 1000  # of Python's objects for an item and for a response, besides its JSON
OWN_ID = re.compile(r"[a-z]+_([0-9A-Za-z]+)_[0-9a-f]{32}")
"""An id that `new_id` has made: a prefix, the name of the replica, and 122 random bits, which nobody can guess."""


def new_tag() -> str:
    """Return a random name for a replica."""
    return uuid4().hex[:8]


def tag_of(name: str) -> str | None:
    """Return the replica in an id; None if the id is not one of `new_id`."""
    found = OWN_ID.fullmatch(name)
    return None if found is None else found[1]


class StoredItem(NamedTuple):
    """An item of a conversation, and its JSON."""

    id: str
    json: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.id) + len(self.json) + ITEM_BYTES


@dataclass(eq=False)
class Turn:
    """The input and the output of one response. parent: the turn that it continues."""

    input: Sequence[StoredItem]
    output: Sequence[StoredItem]
    """Empty until the response has ended."""
    parent: "Turn | None"
    num_users: int = 0
    """The number of stored responses and of later turns that need this turn."""

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in (*self.input, *self.output))

    def items(self) -> list[StoredItem]:
        """Return all items of the conversation, the oldest first."""
        return [*self.items_before(), *self.input, *self.output]

    def items_before(self) -> list[StoredItem]:
        """Return the items of the turns before this one, the oldest first."""
        turns = [] if self.parent is None else [*self.parent.chain()]
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def chain(self) -> Iterator["Turn"]:
        """Yield this turn and those before it, the newest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended. owner: the key that may read it; empty for a server without keys."""

    id: str
    owner: str
    answer: bytes
    """The JSON of the response."""
    turn: Turn
    is_background: bool = False
    log: EventLog | None = None
    """The events, which clients may read; the last one may still be missing."""
    log_bytes: int = 0
    """The memory of all events."""

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + self.log_bytes + RESPONSE_BYTES


class RunningResponse(Protocol):
    """A response that is being generated."""

    @property
    def log(self) -> EventLog | None:
        """The events, which clients may read; None if they are only sent to the client of the request."""
        ...

    @property
    def turn(self) -> Turn:
        """The input, and the turns before it."""
        ...

    @property
    def answer(self) -> bytes:
        """The JSON of the response in its current state."""
        ...

    async def cancel(self) -> None:
        """Abort the generation, and return when the response has ended."""
        ...


@dataclass(frozen=True)
class StoreBounds:
    """The limits of a store. If one of them is 0, nothing is stored."""

    max_responses: int
    max_bytes: int
    max_age_s: float

    @property
    def is_on(self) -> bool:
        return self.max_responses > 0 and self.max_bytes > 0 and self.max_age_s > 0


@dataclass
class ResponseStore:
    """The stored responses of one server. clock: the time in seconds, from which ages are computed.

    If there are too many responses or bytes, the least recently used responses are evicted. A response that cannot fit
    evicts none.
    """

    bounds: StoreBounds
    clock: Callable[[], float] = time.monotonic
    tag: str = field(default_factory=new_tag)
    """The name of this replica, a part of each id."""
    num_bytes: int = 0
    num_evicted: Counter[str] = field(default_factory=Counter)
    """Cause -> number of responses that were evicted because of it: `number`, `bytes`, `age`."""
    _responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)  # the least recently used first
    _times: dict[str, float] = field(default_factory=dict)  # id -> when it was stored, the oldest first
    _items: dict[tuple[str, str], tuple[str, StoredItem]] = field(default_factory=dict)
    # (owner, id of an item) -> id of its response, item
    _running: dict[str, tuple[str, RunningResponse]] = field(default_factory=dict)  # id -> owner, response

    def new_id(self, prefix: str) -> str:
        """Return a random id that contains the name of this replica."""
        return f"{prefix}_{self.tag}_{uuid4().hex}"

    def put(self, response: StoredResponse) -> None:
        """Store a response, and evict others to keep the bounds. Does nothing if the store is off, or too small."""
        if not self.bounds.is_on:
            return
        self._expire()
        if response.num_bytes + sum(turn.num_bytes for turn in response.turn.chain()) > self.bounds.max_bytes:
            logger.warning("%s and its conversation are larger than the store, so it is not stored", response.id)
            return
        self._responses[response.id] = response
        self._times[response.id] = self.clock()
        self.num_bytes += response.num_bytes
        self._use(response.turn)
        for item in (*response.turn.input, *response.turn.output):
            if tag_of(item.id) is not None:  # clients choose other ids, so another client could guess them
                self._items[response.owner, item.id] = response.id, item
        while len(self._responses) > self.bounds.max_responses:
            self._evict("number")
        while self.num_bytes > self.bounds.max_bytes:
            self._evict("bytes")

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response of `owner`, which is now the most recently used one; None if there is none."""
        self._expire()
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return response

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """Return an item of a stored response of `owner`; None if there is none."""
        self._expire()
        response_id, item = self._items.get((owner, item_id), ("", None))
        if item is not None:
            self._responses.move_to_end(response_id)
        return item

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response of `owner`, and return whether there was one. Turns that later ones continue are kept."""
        if self.get(owner, response_id) is None:
            return False
        self._remove(response_id)
        return True

    def begin(self, owner: str, response_id: str, running: RunningResponse) -> None:
        """Remember a response that is being generated."""
        self._running[response_id] = owner, running

    def end(self, response_id: str) -> None:
        """Forget a response that is not generated any longer."""
        self._running.pop(response_id, None)

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """Return a response of `owner` that is being generated; None if there is none."""
        of, running = self._running.get(response_id, ("", None))
        return running if of == owner else None

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        self._expire()
        yield GaugeMetricFamily("nanovllm:stored_responses", "Responses that are stored.", len(self._responses))
        yield GaugeMetricFamily("nanovllm:stored_response_bytes", "Memory of stored responses.", self.num_bytes)
        text = "Stored responses that were evicted, by cause."
        evicted = CounterMetricFamily("nanovllm:stored_responses_evicted", text, labels=["cause"])
        for cause in ("number", "bytes", "age"):
            evicted.add_metric([cause], self.num_evicted[cause])
        yield evicted

    def _expire(self) -> None:
        """Evict the responses that are too old."""
        oldest = self.clock() - self.bounds.max_age_s
        while self._times and (response_id := next(iter(self._times))) and self._times[response_id] <= oldest:
            self._remove(response_id)
            self.num_evicted["age"] += 1

    def _evict(self, cause: str) -> None:
        """Evict the least recently used response."""
        self._remove(next(iter(self._responses)))
        self.num_evicted[cause] += 1

    def _remove(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        del self._times[response_id]
        self.num_bytes -= response.num_bytes
        for item in (*response.turn.input, *response.turn.output):
            if self._items.get((response.owner, item.id), ("",))[0] == response_id:
                del self._items[response.owner, item.id]
        self._leave(response.turn)

    def _use(self, newest: Turn) -> None:
        """Count a user of a turn, and the bytes of turns that had none."""
        for turn in newest.chain():
            turn.num_users += 1
            if turn.num_users > 1:
                return
            self.num_bytes += turn.num_bytes

    def _leave(self, newest: Turn) -> None:
        """Remove a user of a turn, and the bytes of turns that have none left."""
        for turn in newest.chain():
            turn.num_users -= 1
            if turn.num_users > 0:
                return
            self.num_bytes -= turn.num_bytes
