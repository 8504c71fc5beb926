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

_CONSTANTS = (type(None), bool, int, float, str)
_LIBRARIES = ("optax", "foretune", "jax")
_OPTIMIZERS: collections.deque[optax.GradientTransformation] = collections.deque(maxlen=32)


def same(a: Any, b: Any, seen: tuple[tuple[int, int], ...] = ()) -> bool:
    """Return whether two objects are the same, or functions of the same code and closure."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    if getattr(a, "__globals__", None) is not getattr(b, "__globals__", None):  # of functions
        return False
    if (parts := _parts(a)) is not None:
        others, seen = _parts(b) or (), (*seen, (id(a), id(b)))
        alike = len(parts) == len(others)
        return alike and all(same(x, y, seen) for x, y in zip(parts, others, strict=True))
    if eqx.is_array(a) or isinstance(a, np.ndarray | np.generic):
        if isinstance(a, Tracer) or isinstance(b, Tracer):
            return False
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        with jax.ensure_compile_time_eval():  # inside a program too
            return bool(jnp.all(jnp.asarray((a == b) | ((a != a) & (b != b)))))  # NaN is NaN
    try:
        return bool(a == b)
    except Exception:
        return False


def _parts(a: Any) -> tuple[Any, ...] | None:
    """Return what a function, a container or a plain object is made of; None for a value."""
    if isinstance(a, types.FunctionType):
        return a.__code__, a.__defaults__, (*(a.__kwdefaults__ or {}).items(),), closed_over(a)
    if isinstance(a, types.MethodType):
        return a.__func__, a.__self__
    if isinstance(a, functools.partial):
        return a.func, a.args, (*a.keywords.items(),)
    if isinstance(a, dict):
        return tuple(x for item in a.items() for x in item)
    if isinstance(a, list | tuple):
        return tuple(a)
    if isinstance(a, jax.Array | np.ndarray | np.generic | type):
        return None
    if hasattr(a, "__wrapped__"):  # jitted
        return (a.__wrapped__,)
    plain = type(a).__eq__ is object.__eq__ or dataclasses.is_dataclass(a)
    return _parts(vars(a)) if plain and hasattr(a, "__dict__") else None


def closed_over(function: object) -> tuple[object, ...]:
    """Return what a function closes over, with None for what is not known yet."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return tuple(found)


def reused(optimizer: Any) -> Any:
    """Return an earlier optimizer that does the same for ever, whose programs serve, or this one."""
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
    if isinstance(a, types.FunctionType) and str(a.__module__).split(".")[0] not in _LIBRARIES:
        return False
    if isinstance(a, types.FunctionType | tuple | functools.partial):
        a, b = _parts(a), _parts(b)
        return len(a) == len(b) and all(map(_constantly_same, a, b))
    if isinstance(a, _CONSTANTS):
        return repr(a) == repr(b)  # 0.0 is not -0.0, and NaN is NaN
    fixed = type | types.CodeType | types.BuiltinFunctionType | types.ModuleType | np.dtype
    return a is b and isinstance(a, fixed)
