"""Triton's interpreter without what it computes over and over: it spends most of its time beside the arithmetic.

`conftest.py` calls `make_faster` in processes with TRITON_INTERPRET=1. No result changes.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle


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
    """Prepare `triton.language` once for each module that has kernels, and never undo it.

    The interpreter prepares it again at each launch, and whenever a kernel calls another function.
    """
    prepare, prepared = interpreter._patch_lang, set()
    nothing_to_undo = SimpleNamespace(restore=lambda: None)

    def prepare_once(fn):
        if fn.__module__ not in prepared:
            prepare(fn)
            prepared.add(fn.__module__)
            compute_plain_numbers_at_once()
        return nothing_to_undo

    interpreter._patch_lang = prepare_once


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


def compute_plain_numbers_at_once() -> None:
    """Operators on int32, int64 and float32, which NumPy promotes and broadcasts as Triton does, and offsets that are
    added to pointers. All else goes the interpreter's way.
    """
    for name in ("add", "radd", "sub", "mul", "rmul", "and"):
        use_numpy(f"__{name}__", getattr(np.ndarray, f"__{name}__"), is_comparison=False)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        use_numpy(f"__{name}__", getattr(np.ndarray, f"__{name}__"), is_comparison=True)


def use_numpy(name: str, operate: Callable, is_comparison: bool) -> None:
    general = getattr(tl.tensor, name)
    integers, floats = (tl.int32.name, tl.int64.name), tl.float32.name
    results = {(a, b): tl.int32 if a == b == tl.int32.name else tl.int64 for a in integers for b in integers}
    results |= {(a, int): getattr(tl, a) for a in integers}
    if name == "__and__":
        results[tl.int1.name, tl.int1.name] = tl.int1
    else:
        results |= {(floats, b): tl.float32 for b in (floats, float, int)}
    numpy_dtypes = {tl.int1: np.bool_, tl.int32: np.int32, tl.int64: np.int64, tl.float32: np.float32}

    def apply(self, other):
        if type(other) is tl.constexpr:
            other = other.value
        x, dtype, is_block = self.handle.data, self.dtype, self.type.is_block()
        if type(other) is tl.tensor:
            y, kind, is_block = other.handle.data, other.dtype.name, is_block or other.type.is_block()
        else:
            y, kind = other, type(other)
        if name == "__add__" and kind in integers and dtype.is_ptr():
            size = max(1, dtype.element_ty.primitive_bitwidth // 8)  # bytes
            data = x + size * y.astype(np.uint64)
        else:
            dtype = results.get((dtype.name, kind))
            if dtype is None or (kind is int and not -(1 << 31) <= y < 1 << 31):
                return general(self, other)
            data = operate(x, y)
            dtype = tl.int1 if is_comparison else dtype
            assert data.dtype == numpy_dtypes[dtype]
        return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if is_block else dtype)

    setattr(tl.tensor, name, apply)


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
