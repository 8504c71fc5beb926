"""Random choices whose probabilities depend on a hyperparameter: their derivative is cut.

A Bernoulli draw is a comparison, `uniform < p`, and a categorical one an `argmax(gumbel + logits)`.
Neither has a derivative, so a hypergradient leaves out how the choice changes with p. Here a program is
searched for them, without running it: every variable is marked with what it is made from. The search
misses random numbers that come in as data, and draws in another form (`floor(uniform + p)`).
"""

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .jaxprs import equations, subjaxprs

Parameters = dict[str, Any]  # of an operation
# What a variable is made from is a set, held as the bits of a number: `|` joins two of them.
GIVEN = 1  # any input of the program, hyperparameters included
RANDOM = 2  # random numbers
SHIFTED = 4  # random numbers alone, shifted or scaled by something with a derivative in hparams
FIRST = 8  # the first hyperparameter; the bits above are the others: it has a derivative in them
HPARAMS = -FIRST  # the bits of them all

SOURCES = {"random_bits", "threefry2x32", "random_gamma", "rng_uniform", "rng_bit_generator"}
COMPARISONS = {"lt", "le", "gt", "ge", "lt_to", "le_to"}
ARGUMENTS = {"argmax", "argmin", "top_k"}
ARITHMETIC = {"add", "sub", "mul", "div"}
FLAT = {"stop_gradient", "floor", "ceil", "round", "sign"}  # derivative 0
# Same numbers in another place, or one of several: what is shifted remains so.
MOVES = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather"),
    *("reshape", "select_n", "slice", "squeeze", "transpose"),
}


def cut_hparams(jaxpr: Jaxpr, hparams: Sequence[int]) -> list[int]:
    """Return those inputs, of the given ones, that set the probabilities of a random choice."""
    if not any(equation.primitive.name in SOURCES for equation in equations(jaxpr)):
        return []
    bits = {i: FIRST << k for k, i in enumerate(hparams)}
    _, found = _Search()(jaxpr, [GIVEN | bits.get(i, 0) for i in range(len(jaxpr.invars))])
    return [i for i, bit in bits.items() if found & bit]


class _Search:
    """What a program's outputs are made from, and the hyperparameters found, from its inputs."""

    def __init__(self):
        self._done = {}  # the same function is often called again

    def __call__(self, jaxpr: Jaxpr, inputs: list[int]) -> tuple[list[int], int]:
        key = id(jaxpr), *inputs
        if key not in self._done:
            self._done[key] = self._search(jaxpr, inputs)
        return self._done[key]

    def _search(self, jaxpr: Jaxpr, inputs: list[int]) -> tuple[list[int], int]:
        origin = dict(zip(jaxpr.invars, inputs, strict=True))
        found = 0

        def read(atom):
            return 0 if isinstance(atom, Literal) else origin.get(atom, 0)

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            name, params, n = equation.primitive.name, equation.params, len(equation.outvars)
            if name in CALLS:
                results, more = CALLS[name](self, params, operands)
            elif subjaxprs(params):
                results, more = _call(self, params, operands)
            else:
                results, more = [_result(equation, operands)] * n, _chosen(name, operands)
            if len(results) != n:
                results = [_join(operands)] * n
            found |= more
            for variable, result in zip(equation.outvars, results, strict=True):
                origin[variable] = result if _is_float(variable) else _flat(result)
        return [read(atom) for atom in jaxpr.outvars], found


def _is_drawn(origin: int) -> bool:
    # The norm of a gradient with dropout is random too; a comparison with it, to clip it, is no choice.
    return origin & (RANDOM | GIVEN) == RANDOM


def _chosen(name: str, operands: list[int]) -> int:
    """Return the hyperparameters whose derivative ends in this operation on random numbers."""
    if name in ARGUMENTS and operands[0] & SHIFTED:
        return operands[0] & HPARAMS
    if name in COMPARISONS:
        for one, other in (operands, operands[::-1]):
            if (_is_drawn(one) or one & SHIFTED) and other & HPARAMS:
                return (one | other) & HPARAMS
    return 0


def _result(equation: JaxprEqn, operands: list[int]) -> int:
    name, joined = equation.primitive.name, _join(operands)
    if name in SOURCES:  # whatever the key was made from
        floats = [o for o, v in zip(operands, equation.invars, strict=True) if _is_float(v)]
        return _join(floats) | RANDOM
    if name in FLAT:
        return _flat(joined)
    if name in ARITHMETIC and joined & HPARAMS and any(map(_is_drawn, operands)):
        return joined | SHIFTED
    return joined if name in MOVES else joined & ~SHIFTED


def _call(search: _Search, params: Parameters, operands: list[int]) -> tuple[list[int], int]:
    """A function that is called as it is (jit, remat), and any other operation with functions."""
    inner = subjaxprs(params)
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return search(inner[0], operands)
    return [], _join(search(f, [_join(operands)] * len(f.invars))[1] for f in inner)


def _own_derivative(search: _Search, params: Parameters, operands: list[int]):
    """A function with a derivative by its author (`jax.custom_jvp`), who knows of the choices in it."""
    return _call(search, params, operands)[0], 0


def _scan(search: _Search, params: Parameters, operands: list[int]) -> tuple[list[int], int]:
    if "ft_in" in params:  # JAX 0.11: constants, what is carried, and what is scanned over
        first, carried = map(len, params["ft_in"].unpack()[:2])
    else:
        first, carried = params["num_consts"], params["num_carry"]
    last = first + carried
    body, constants, xs = subjaxprs(params)[0], operands[:first], operands[last:]
    return _loop(lambda carry: search(body, constants + carry + xs), operands[first:last])


def _while(search: _Search, params: Parameters, operands: list[int]) -> tuple[list[int], int]:
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    carry, found = _loop(lambda carry: search(body, operands[first:last] + carry), operands[last:])
    return carry, found | search(condition, operands[:first] + carry)[1]


def _cond(search: _Search, params: Parameters, operands: list[int]) -> tuple[list[int], int]:
    which, rest = operands[0], operands[1:]
    outcomes = [search(branch.jaxpr, rest) for branch in params["branches"]]
    results = [_join((which, *each)) for each in zip(*(r for r, _ in outcomes), strict=True)]
    return results, _join(found for _, found in outcomes)


CALLS: dict[str, Callable[..., tuple[list[int], int]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _own_derivative,
    "custom_vjp_call": _own_derivative,
}


def _loop(body: Callable[..., tuple[list[int], int]], carry: list[int]) -> tuple[list[int], int]:
    """Repeat until what is carried is made from no more than before."""
    while True:
        results, found = body(carry)
        new = [a | b for a, b in zip(carry, results, strict=False)]  # a scan returns more
        if new == carry:
            return carry + results[len(carry) :], found
        carry = new


def _join(origins: Iterable[int]) -> int:
    return functools.reduce(operator.or_, origins, 0)


def _flat(origin: int) -> int:
    return origin & (GIVEN | RANDOM)


def _is_float(atom: Var | Literal) -> bool:
    return _is_inexact(getattr(atom.aval, "dtype", None))  # a token has none


@functools.cache
def _is_inexact(dtype: Hashable) -> bool:  # of a key, it is no `numpy.dtype`
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)  # pyright: ignore
