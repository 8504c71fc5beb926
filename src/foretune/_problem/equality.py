"""Whether two functions do the same: the same code, closed over the same values.

`optax.sgd(0.1)` made twice is two sets of functions, which are the same when their code is, and all
that they close over. That holds at one moment: a list in a closure may change later. `reused`, for
programs that were compiled earlier, therefore takes only optimizers of constants for the same.
"""

import collections
import dataclasses
import functools
import types
from typing import Any

import equinox as eqx
import jax
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
        same_code = a.__code__ == b.__code__ and a.__globals__ is b.__globals__
        return same_code and all_same(_parts(a), _parts(b))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same(a.__self__, b.__self__, seen)
    if isinstance(a, functools.partial | list | tuple | dict):
        return all_same(_parts(a), _parts(b))
    if eqx.is_array(a) or isinstance(a, np.ndarray | np.generic):
        if isinstance(a, Tracer) or isinstance(b, Tracer):
            return False
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        with jax.ensure_compile_time_eval():  # inside a program too
            equal = (a == b) | ((a != a) & (b != b))  # NaN is NaN
            return bool(jnp.all(jnp.asarray(equal)))
    if hasattr(a, "__wrapped__"):  # jitted
        return _same(a.__wrapped__, b.__wrapped__, seen)
    plain = type(a).__eq__ is object.__eq__ or dataclasses.is_dataclass(a)
    if plain and hasattr(a, "__dict__") and not isinstance(a, type):
        return all_same(_parts(vars(a)), _parts(vars(b)))
    try:
        return bool(a == b)
    except Exception:
        return False


def _parts(a: Any) -> tuple[Any, ...]:
    """Return what a function, a partial one or a container is made of, besides its code."""
    if isinstance(a, types.FunctionType):
        return a.__defaults__ or (), _parts(a.__kwdefaults__ or {}), closed_over(a)
    if isinstance(a, functools.partial):
        return a.func, a.args, _parts(a.keywords)
    return tuple(a) if not isinstance(a, dict) else tuple(x for item in a.items() for x in item)


def closed_over(function: object) -> tuple[object, ...]:
    """Return what a function closes over, with None for what is not known yet."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return tuple(found)


_OPTIMIZERS: collections.deque[optax.GradientTransformation] = collections.deque(maxlen=32)
_CONSTANTS = (type(None), bool, int, float, str)
_LIBRARIES = ("optax", "foretune", "jax")


def reused(optimizer: Any) -> Any:
    """Return an earlier optimizer that does the same for ever, or this one: its programs serve again.

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
    if isinstance(a, types.FunctionType):
        library = str(a.__module__).split(".")[0] in _LIBRARIES
        return a.__code__ is b.__code__ and library and _constantly_same(_parts(a), _parts(b))
    if isinstance(a, tuple | functools.partial):
        a, b = _parts(a), _parts(b)
        return len(a) == len(b) and all(map(_constantly_same, a, b))
    if isinstance(a, _CONSTANTS):
        return repr(a) == repr(b)  # 0.0 is not -0.0, and NaN is NaN
    return a is b and isinstance(a, type | types.BuiltinFunctionType | types.ModuleType | np.dtype)
