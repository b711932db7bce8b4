"""Triton's interpreter without what it computes over and over: it spends most of its time beside the arithmetic.

`tests/conftest.py` calls `make_faster` in processes with TRITON_INTERPRET=1. No result changes.
"""

import dataclasses
from collections.abc import Callable

import triton.language as tl
from triton.runtime import interpreter


def make_faster() -> None:
    prepare_each_module_once()
    skip_the_check_of_overflows()
    look_dtypes_up()
    remember(tl.block_type, lambda element_ty, shape: (element_ty.name, *shape), {"element_ty": lambda ty, _: ty})
    of_tensor = {"handle": lambda handle, _: handle, "type": lambda _, ty: ty, "dtype": lambda _, ty: ty.scalar}
    remember(tl.tensor, lambda handle, ty: ty.name, of_tensor)


def prepare_each_module_once() -> None:
    """It prepares `triton.language` anew whenever a kernel calls another function. Once for each module that has such
    functions is enough.
    """
    prepared = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def skip_the_check_of_overflows() -> None:
    """Each sum of integers is computed in 64 bits as well, for an assertion that is made only in debug mode."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_dtypes_up() -> None:
    """NumPy's dtype of a Triton dtype, by its name: pointers cannot be hashed."""
    convert, known = interpreter._get_np_dtype, {}

    def look_up(dtype):
        if dtype.name not in known:
            known[dtype.name] = convert(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up


def remember(cls: type, key_of: Callable, own: dict[str, Callable]) -> None:
    """A new `cls(*args)` shares the attributes of the first one with the same key, all but its `own`."""
    init, known = cls.__init__, {}

    def init_or_share(self, *args):
        key = key_of(*args)
        if key not in known:
            init(self, *args)
            known[key] = {name: value for name, value in vars(self).items() if name not in own}
        vars(self).update(known[key], **{name: value_of(*args) for name, value_of in own.items()})

    cls.__init__ = init_or_share
