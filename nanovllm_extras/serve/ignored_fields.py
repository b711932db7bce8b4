"""Log the fields of requests that have no effect, so that a misspelt or unsupported field is noticed.

Clients choose the names, so the number of logged names and their length are limited.
"""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import get_args

from pydantic import BaseModel

logger = logging.getLogger(__name__)

MAX_NAMES = 100
MAX_NAME_CHARS = 64
MAX_FIELDS = 1000  # of one object of a request
WITHOUT_EFFECT = ("text.verbosity", "reasoning.summary")
"""Fields whose values are checked, but not used."""


class IgnoredFields:
    """The names that have been logged. Each name is logged once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, path: str, model: type[BaseModel], body: object) -> None:
        """Log the fields of a request's JSON that its model does not use. path: the route, such as `/v1/responses`."""
        for name in ignored_names(model, body):
            if len(self._names) == MAX_NAMES:
                return
            if name not in self._names:
                self._names.add(name)
                logger.warning("%s: the field %r is ignored; later requests with it are not logged", path, name)


def ignored_names(model: type[BaseModel], body: object, prefix: str = "") -> Iterator[str]:
    """Yield the names of the fields that are ignored: those of the body, and those of objects in its fields.

    Objects in lists, such as messages and tools, are not searched. A field with null is absent.
    """
    if not isinstance(body, dict) or model.model_config.get("extra") != "ignore":
        return
    known = {field.alias or name: field for name, field in model.model_fields.items()} | model.model_fields
    for name in islice(body, MAX_FIELDS):
        path = prefix + name
        if body[name] is None:
            continue
        if name not in known or path in WITHOUT_EFFECT:
            yield path[:MAX_NAME_CHARS]
        elif (inner := model_of(known[name].annotation)) is not None:
            yield from ignored_names(inner, body[name], f"{path}.")


def model_of(annotation: object) -> type[BaseModel] | None:
    """Return the model of an optional object; None for any other field, and for a choice of several models."""
    models = [
        one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, BaseModel)
    ]
    return models[0] if len(models) == 1 else None
