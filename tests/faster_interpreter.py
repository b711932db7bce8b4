"""Triton's interpreter without what it computes over and over: it spends most of its time beside the arithmetic.

`tests/conftest.py` calls `make_faster` in processes with TRITON_INTERPRET=1. No result changes.
"""

import dataclasses
from collections.abc import Callable

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_faster() -> None:
    prepare_each_module_once()
    skip_the_check_of_overflows()
    look_dtypes_up()
    return_what_fits_already()
    decide_each_computation_type_once()
    pair_what_fits_already()
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


def return_what_fits_already() -> None:
    """Tensors of one shape need no broadcast, and tensors of the wanted dtype no cast."""
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast

    def broadcast_or_return(self, lhs, rhs):
        shapes = [list(x.type.shape) if x.type.is_block() else None for x in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    def cast_or_return(self, x, dtype, *args, **kwargs):
        return x if x.dtype is dtype else cast(self, x, dtype, *args, **kwargs)

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_or_return, cast_or_return


def decide_each_computation_type_once() -> None:
    """What two dtypes are promoted to, for each way to combine them."""
    decide, known = TritonSemantic.computation_type_impl, {}

    def look_up(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = decide(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    TritonSemantic.computation_type_impl = look_up


def pair_what_fits_already() -> None:
    """Numbers of one type need no promotion. Nor does a number beside a small constant, which is made once."""
    check, constants = TritonSemantic.binary_op_type_checking_impl, {}
    plain = {tl.int32.name, tl.int64.name, tl.float32.name}
    integers = {tl.int32.name, tl.int64.name}

    def pair(self, lhs, rhs, *args, **kwargs):
        if isinstance(lhs, tl.tensor):
            name = lhs.type.name
            if isinstance(rhs, tl.tensor):
                if name == rhs.type.name and lhs.dtype.name in plain:
                    return lhs, rhs
            elif type(rhs) is int and name in integers and -(1 << 31) <= rhs < 1 << 31:
                if (rhs, name) not in constants:
                    constants[rhs, name] = self.scalar_constant(rhs, lhs.dtype)
                return lhs, constants[rhs, name]
        return check(self, lhs, rhs, *args, **kwargs)

    TritonSemantic.binary_op_type_checking_impl = pair


def remember(cls: type, key_of: Callable, own: dict[str, Callable]) -> None:
    """A new `cls(*args)` shares the attributes of the first one with the same key, all but its `own`."""
    init, known = cls.__init__, {}

    def init_or_share(self, *args):
        key = key_of(*args)
        if key not in known:
            init(self, *args)
            known[key] = {name: value for name, value in vars(self).items() if name not in own}
        attributes = self.__dict__
        attributes.update(known[key])
        for name, value_of in own.items():
            attributes[name] = value_of(*args)

    cls.__init__ = init_or_share
