"""Whether two functions do the same: the same code, closed over the same values.

`optax.sgd(0.1)` made twice is two sets of functions, as is a `lambda` evaluated twice. They are taken
for the same when their code is, and all that they close over.
"""

import dataclasses
import functools
import types
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def same(a: Any, b: Any) -> bool:
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


def _items(mapping: Any) -> list[Any]:
    return [part for item in (mapping or {}).items() for part in item]


def _cells(function: types.FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled yet
            cells.append(None)
    return cells
