"""Whether two functions do the same: the same code, closed over the same values.

`optax.sgd(0.1)` made twice is two sets of functions, as is a `lambda` evaluated twice. They are taken
for the same when their code is, and all that they close over. That compares two of them at one moment.
A program that was compiled earlier is another matter: a list in a closure or a global variable may
have changed since. `reused` therefore takes only optimizers of constants for the same.
"""

import collections
import dataclasses
import functools
import types
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer


def same(a: object, b: object) -> bool:
    """Return whether two objects are the same, or functions of the same code and closure."""
    return _same(a, b, ())


def _same(a: Any, b: Any, seen: tuple[tuple[int, int], ...]) -> bool:
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen = (*seen, (id(a), id(b)))

    def all_same(xs, ys):
        return len(xs) == len(ys) and all(_same(x, y, seen) for x, y in zip(xs, ys, strict=True))

    if isinstance(a, types.FunctionType):
        return (
            a.__code__ == b.__code__
            and all(
                all_same(x, y)
                for x, y in (
                    (a.__defaults__ or (), b.__defaults__ or ()),
                    (_items(a.__kwdefaults__), _items(b.__kwdefaults__)),
                    (_cells(a), _cells(b)),
                )
            )
            and a.__globals__ is b.__globals__
        )
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same(a.__self__, b.__self__, seen)
    if isinstance(a, functools.partial):
        return (
            _same(a.func, b.func, seen)
            and all_same(a.args, b.args)
            and all_same(_items(a.keywords), _items(b.keywords))
        )
    if isinstance(a, list | tuple):
        return all_same(a, b)
    if isinstance(a, dict):
        return all_same(_items(a), _items(b))
    if eqx.is_array(a) or isinstance(a, np.ndarray | np.generic):
        if isinstance(a, Tracer) or isinstance(b, Tracer):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and bool(jnp.all(jnp.asarray(a == b)))
    if hasattr(a, "__wrapped__"):  # jitted
        return _same(a.__wrapped__, b.__wrapped__, seen)
    plain = type(a).__eq__ is object.__eq__ or dataclasses.is_dataclass(a)
    if plain and hasattr(a, "__dict__") and not isinstance(a, type):
        return all_same(_items(vars(a)), _items(vars(b)))
    try:
        return bool(a == b)
    except Exception:
        return False


def _items(mapping: dict | None) -> list[object]:
    return [part for item in (mapping or {}).items() for part in item]


def _cells(function: types.FunctionType) -> list[object]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled yet
            cells.append(None)
    return cells


_OPTIMIZERS: collections.deque[optax.GradientTransformation] = collections.deque(maxlen=32)
_CONSTANTS = (type(None), bool, int, float, str)
_LIBRARIES = ("optax", "foretune", "jax")


def reused(optimizer: Any) -> Any:
    """Return an earlier optimizer that does the same for ever, or this one.

    What was compiled for the earlier one then serves again: `optax.adam(0.1)` may be written where it
    is used.

    >>> import optax
    >>> reused(optax.adam(0.1)) is reused(optax.adam(0.1))
    True
    >>> reused(optax.adam(0.1)) is reused(optax.adam(0.2))
    False
    """
    if isinstance(optimizer, optax.GradientTransformation):
        for earlier in _OPTIMIZERS:
            if _constantly_same(earlier, optimizer):
                return earlier
        _OPTIMIZERS.append(optimizer)
    return optimizer


def _constantly_same(a: Any, b: Any) -> bool:
    """Return whether two objects are made of the same functions of libraries and the same constants."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_constantly_same, a, b))
    if isinstance(a, types.FunctionType):
        return (
            a.__code__ is b.__code__
            and str(a.__module__).split(".")[0] in _LIBRARIES
            and _constantly_same(a.__defaults__, b.__defaults__)
            and _constantly_same(tuple(_items(a.__kwdefaults__)), tuple(_items(b.__kwdefaults__)))
            and _constantly_same(tuple(_cells(a)), tuple(_cells(b)))
        )
    if isinstance(a, functools.partial):
        parts = ((p.func, p.args, tuple(_items(p.keywords))) for p in (a, b))
        return _constantly_same(*parts)
    if isinstance(a, _CONSTANTS):
        return repr(a) == repr(b)  # 0.0 is not -0.0, and NaN is NaN
    return a is b and isinstance(a, type | types.BuiltinFunctionType | types.ModuleType | np.dtype)
