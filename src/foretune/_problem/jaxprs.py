"""Programs as JAX traces them: the equations of a jaxpr, those of the functions in it included."""

from collections.abc import Iterator, Mapping

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import partial_eval


def subjaxprs(parameters: Mapping[str, object]) -> list[Jaxpr]:
    """Return the functions among the parameters of an operation: bodies of loops, branches."""
    return list(jaxprs_in_params(parameters))


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations, each before those of the functions in it.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, x))(1.0)
    >>> [equation.primitive.name for equation in equations(program.jaxpr)]
    ['scan', 'add', 'mul']
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in subjaxprs(equation.params):
            yield from equations(inner)


def inputs_of(jaxpr: Jaxpr, i: int) -> list[bool]:
    """Return, for each input of a program, whether its i-th output depends on it."""
    return partial_eval.dce_jaxpr(jaxpr, [k == i for k in range(len(jaxpr.outvars))])[1]
