"""Systems: a problem as the engines see it, pure functions of an array-only state.

What is not an array in the user's state (a model's activation function, say) is kept aside. An error
averaged over the trajectory is a system too, with one more state variable that accumulates it.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from .definition import Definition, Objective


def _all_of_it(hparams: PyTree, x: PyTree) -> PyTree:
    return hparams


class System(NamedTuple):
    """A problem as pure functions of an array-only state s."""

    initial: Callable[[PyTree], PyTree]  # lambda -> s_0
    step: Callable[[PyTree, PyTree, PyTree], PyTree]  # Phi: s_{t-1}, lambda, x_t -> s_t
    errors: Callable[[PyTree, PyTree], tuple[Float[Array, ""], ...]]  # s_T, lambda -> K errors
    xs: PyTree[Array]  # x_1 .. x_T
    steps: int  # T
    restore: Callable[[PyTree], PyTree]  # s -> the user's state
    rows: dict[str | None, int]  # hyperparameter's name -> the error it follows; None: all of them
    transposable: Callable[[PyTree, PyTree, PyTree], PyTree]  # Phi, for reverse mode
    # Where a step depends on a few entries of lambda, its adjoint need not touch the others: `seen` is
    # what `step` takes instead of all of lambda, `add` puts the adjoint's product with it in its place.
    seen: Callable[[PyTree, PyTree], PyTree] = _all_of_it  # lambda, x_t -> what step t sees
    add: Callable[[PyTree, PyTree, PyTree], PyTree] = (  # g, alpha_t B_t, x_t -> their sum
        lambda g, alpha_B, x: jax.tree.map(operator.add, g, alpha_B)
    )

    @property
    def sees_all(self) -> bool:
        return self.seen is _all_of_it

    def run(self, hparams: PyTree) -> PyTree:
        """Return s_T: plain training."""
        s_0 = self.initial(hparams)
        return lax.scan(lambda s, x: (self.step(s, hparams, x), None), s_0, self.xs, self.steps)[0]

    def value(self, errors: tuple[Float[Array, ""], ...]) -> PyTree[Float[Array, ""]]:
        """Return the error, or the dict of errors by hyperparameter name."""
        values = {name: errors[k] for name, k in self.rows.items()}
        return values.get(None, values)

    def gradient(self, rows: PyTree[Float[Array, "K ..."]]) -> PyTree[Float[Array, "..."]]:
        """Return, from the gradients of all K errors, each hyperparameter's own."""
        if None in self.rows:
            return jax.tree.map(lambda row: row[0], rows)
        own = {name: operator.itemgetter(k) for name, k in self.rows.items()}
        return {name: jax.tree.map(row, rows[name]) for name, row in own.items()}


def make_system(problem: Definition, hparams: PyTree) -> System:
    """Return a problem as functions of array-only states (call it inside a trace)."""
    s_0 = eqx.filter_eval_shape(problem.start, hparams)
    fixed = eqx.filter(s_0, is_abstract, inverse=True)
    functions = _distinct_objectives(problem)

    def restore(s):
        return eqx.combine(s, fixed)

    def initial(hparams):
        return eqx.filter(problem.start(hparams), eqx.is_array)

    def step_of(dynamics):
        def step(s, hparams, x):
            state = dynamics.step(restore(s), hparams, problem.batches.batch(x))
            return eqx.filter(state, eqx.is_array)

        return step

    def errors(s, hparams):
        return tuple(f(restore(s), hparams, problem.validation) for f in functions.values())

    xs, steps, rows = problem.batches.xs, problem.steps, rows_of(problem)
    step, transposable = step_of(problem.dynamics), step_of(problem.dynamics.transposable())
    plain = System(initial, step, errors, xs, steps, restore, rows, transposable)
    return _averaged(plain, hparams) if problem.trajectory else plain


def rows_of(problem: Definition) -> dict[str | None, int]:
    """Return, by hyperparameter name, the number of the error that it follows."""
    order = list(_distinct_objectives(problem))
    return {name: order.index(_identity(name, f)) for name, f in problem.objectives.items()}


def _distinct_objectives(problem: Definition) -> dict[object, Objective]:
    """Return the objectives, each once though several hyperparameters may follow it."""
    return {_identity(name, f): f for name, f in problem.objectives.items()}


def owners(problem: Definition, hparams: PyTree) -> list[str | None]:
    """Return, for each leaf of the hyperparameters, the name of the objective it follows."""
    several = isinstance(problem.objective, dict)
    return [path[0].key if several else None for path, _ in jax.tree.leaves_with_path(hparams)]


def _identity(name: str | None, objective: Objective) -> object:
    # a module may hold arrays, which cannot be compared inside a program: it counts by its name,
    # but the mean of an objective over folds counts as that objective
    objective = getattr(objective, "mean_of", objective)
    return name if isinstance(objective, eqx.Module) else objective


def _averaged(system: System, hparams: PyTree) -> System:
    """The system whose error is the mean of E(s_t) over t: one more state, the running mean."""
    shapes = jax.eval_shape(lambda h: system.errors(system.initial(h), h), hparams)

    def initial(hparams):
        return system.initial(hparams), tuple(jnp.zeros((), E.dtype) for E in shapes)

    def averaging(inner):
        def step(state, hparams, x):
            s = inner(state[0], hparams, x)
            errors = zip(state[1], system.errors(s, hparams), strict=True)
            return s, tuple(mean + E / system.steps for mean, E in errors)

        return step

    return system._replace(
        initial=initial,
        step=averaging(system.step),
        errors=lambda state, hparams: state[1],
        restore=lambda state: system.restore(state[0]),
        transposable=averaging(system.transposable),
    )


def is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
