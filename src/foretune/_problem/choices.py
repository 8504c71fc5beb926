"""Random choices whose probabilities depend on a hyperparameter: their derivative is cut.

A Bernoulli draw is a comparison, `uniform < p`, and a categorical one an `argmax(gumbel + logits)`.
Neither has a derivative. A program is searched for them without running it: every variable is marked
with what it is made from. Random numbers that come in as data, and `floor(uniform + p)`, are missed.
"""

import functools
import operator
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .jaxprs import equations, subjaxprs

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
            if subjaxprs(equation.params):
                results, more = self._call(equation, operands)
            else:
                results = [_result(equation, operands)] * len(equation.outvars)
                more = _chosen(equation.primitive.name, operands)
            found |= more
            for variable, result in zip(equation.outvars, results, strict=True):
                origin[variable] = result if _is_float(variable) else _flat(result)
        return [read(atom) for atom in jaxpr.outvars], found

    def _call(self, equation: JaxprEqn, operands: list[int]) -> tuple[list[int], int]:
        """The functions of an operation; of a loop, until what is carried is made from no more."""
        name, n, carried = equation.primitive.name, len(equation.outvars), _carried(equation)
        chosen_by = operands[:1] if name == "cond" else []
        while True:
            outcomes = [self(f, given) for f, given in _functions(equation, operands)]
            returned = [results for results, _ in outcomes if len(results) == n]
            results = [_join((*chosen_by, *each)) for each in zip(*returned, strict=True)]
            before, operands = operands, list(operands)
            for i, result in zip(carried, results, strict=False):  # a scan returns more
                operands[i] |= result
            if operands == before:
                break
        # the author of a function with its own derivative knows of the choices in it
        own = name in ("custom_jvp_call", "custom_vjp_call")
        found = 0 if own else _join(found for _, found in outcomes)
        return results or [_join(operands)] * n, found


def _functions(equation: JaxprEqn, operands: list[int]) -> list[tuple[Jaxpr, list[int]]]:
    """Return the functions of an operation, each with its operands."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        of_condition, carried = operands[: params["cond_nconsts"]], _carried(equation)
        return [
            (params["body_jaxpr"].jaxpr, operands[len(of_condition) :]),
            (params["cond_jaxpr"].jaxpr, of_condition + operands[carried.start :]),
        ]
    operands = operands[1:] if name == "cond" else operands
    return [
        (f, operands if len(f.invars) == len(operands) else [_join(operands)] * len(f.invars))
        for f in subjaxprs(params)
    ]


def _carried(equation: JaxprEqn) -> range:
    """Return which operands of a loop its body returns anew, beginning with its first result."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        return range(params["cond_nconsts"] + params["body_nconsts"], len(equation.invars))
    if name != "scan":
        return range(0)
    if "ft_in" in params:  # JAX 0.11: constants, what is carried, and what is scanned over
        first, count = map(len, params["ft_in"].unpack()[:2])
    else:
        first, count = params["num_consts"], params["num_carry"]
    return range(first, first + count)


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


def _join(origins: Iterable[int]) -> int:
    return functools.reduce(operator.or_, origins, 0)


def _flat(origin: int) -> int:
    return origin & (GIVEN | RANDOM)


def _is_float(atom: Var | Literal) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact)  # a token has none
