"""Find the replica that stores the response of a request. Its name is a part of each id (`response_store.py`).

The body is searched, not parsed, because it may be long. If the search finds a wrong id, the request goes to a replica
that answers that the response is not stored.
"""

import re

from nanovllm_extras.serve.response_store import OWN_ID

PATH = re.compile(r".*/responses/+([^/]+)(/+(cancel|input_items))?/*")  # with a prefix, or with slashes too many
OF_BODY = re.compile(r".*/responses(/+input_tokens)?/*")
PREVIOUS, REFERENCE = b'"previous_response_id"', b'"item_reference"'
NEAR = 256  # bytes; the id of a reference is in the same small object as its type
IN_BODY = re.compile(OWN_ID.pattern.encode())


def replica_of(path: str, body: bytes) -> str | None:
    """Return the name of the replica that stores what a request needs; None if it needs nothing."""
    if OF_BODY.fullmatch(path):
        return replica_in(body)
    named = PATH.fullmatch(path)
    found = None if named is None else OWN_ID.fullmatch(named[1])
    return None if found is None else found[1]


def replica_in(body: bytes) -> str | None:
    """Return the replica in the first id that continues or references something."""
    for name, before in ((PREVIOUS, 0), (REFERENCE, NEAR)):
        place = body.find(name)
        if place >= 0:
            found = IN_BODY.search(body, max(0, place - before), place + len(name) + NEAR)
            if found is not None:
                return found[1].decode()
    return None
