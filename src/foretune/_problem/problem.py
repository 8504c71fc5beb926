"""Problems: f(lambda) = E(s_T(lambda)), a dynamics with its data, its start and its error."""

import functools
from collections.abc import Sequence
from typing import cast

import jax
from jaxtyping import Array, Float, PyTree

from .arguments import PROGRAMS, Compiled, Output, Structure, flatten, unflatten
from .batches import Batches, Stacked, warn_of_rows
from .checks import as_arrays, as_data, check_flag, check_hparams, check_objective, check_signature
from .definition import Definition
from .draws import Draw, Drawn
from .dynamics import check_dynamics
from .system import make_system
from .validation import check_shapes, warn_of_choices


class Problem(Definition):
    """The response f(lambda) = E(s_T(lambda), lambda) of a training procedure.

    Args:
        dynamics: `Training`, or an instance of your own subclass of `Dynamics`.
        objective: the error `E(state, hparams, validation) -> scalar`, or a dict from top-level
            hyperparameter names to such functions: each follows its own error. The direct dependence
            of E on the hyperparameters counts.
        init: the initial parameters, or a function of the hyperparameters that returns them.
        batches: a pytree of arrays with leading axis T, `Minibatches` or `FullBatch`.
        validation: what the objective gets as its third argument.
        trajectory: average E over s_1 .. s_T instead of taking it at s_T.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(
    ...         lambda w, h, batch: jnp.sum((w - batch) ** 2) + h["decay"] * jnp.sum(w**2),
    ...         optimizer=optax.sgd(0.1)),
    ...     objective=lambda state, h, target: jnp.sum((state.params - target) ** 2),
    ...     init=jnp.zeros(2),
    ...     batches=ft.FullBatch(jnp.array([1.0, 3.0]), steps=50),
    ...     validation=jnp.array([0.8, 2.4]))
    >>> value, state = problem.response({"decay": jnp.array(0.25)})
    >>> state.params.round(3)
    Array([0.8, 2.4], dtype=float32)
    """

    def __init__(
        self,
        dynamics: object,
        objective: object,
        init: PyTree,
        batches: PyTree,
        validation: PyTree = None,
        *,
        trajectory: object = False,
    ):
        self.dynamics = as_arrays(check_dynamics(dynamics), "dynamics")
        check_flag(trajectory, "Problem's trajectory")
        self.objective = as_arrays(check_objective(objective), "objective")
        self.init = as_arrays(init, "init")
        if self.starts_from_function:
            check_signature(init, "init(hparams)")
        self.batches = batches if isinstance(batches, Batches) else Stacked(batches)
        self.validation = as_data(validation, "validation")
        warn_of_rows(self.batches, self.validation)
        self.trajectory = bool(trajectory)

    def response(self, hparams: PyTree) -> tuple[PyTree[Float[Array, ""]], PyTree]:
        """Return `(value, final state)` of one training run, which need not be finite."""
        return responded(self, hparams)

    def replace(self, **changes: object) -> "Problem":
        """Return the problem with some of its arguments changed, `replace(init=params)` say."""
        given = {name: getattr(self, name) for name in Definition.__dataclass_fields__}
        return Problem(**(given | changes))


ProblemLike = Definition | Drawn | Draw


def responded(problem: Definition | Drawn, hparams: PyTree) -> tuple[PyTree, PyTree]:
    """Return `(value, final state)` of one training run, of a problem or of a draw."""
    arrays, structure, _ = _checked(problem, hparams)
    value, state = _response(structure, arrays)
    return value, state.tree()


def validated(
    problem: Definition | Drawn, hparams: PyTree, *, smooth: bool = True
) -> tuple[list[Array], Structure]:
    """Return `(problem, hparams)`, flattened, after every check that needs no arithmetic.

    `smooth` says that the response is to be differentiated. `opened` is the way back.
    """
    arrays, structure, chosen = _checked(problem, hparams, smooth)
    if chosen:
        warn_of_choices(structure, chosen)
    return arrays, structure


def opened(structure: Structure, arrays: Sequence[Array]) -> tuple[Problem, PyTree]:
    """Return `(problem, hparams)` from what `validated` returned; where it is drawn, inside a trace."""
    problem, hparams = unflatten(structure, arrays)
    problem = problem.problem() if isinstance(problem, Drawn) else problem
    return cast(Problem, problem), hparams


def _checked(
    problem: Definition | Drawn, hparams: PyTree, smooth: bool = True
) -> tuple[list[Array], Structure, tuple[str, ...]]:
    arrays, structure = flatten((problem, check_hparams(hparams)))
    asked = structure, tuple((array.shape, array.dtype) for array in arrays)
    asked = _drawn_shapes(*asked) if isinstance(problem, Drawn) else asked
    return arrays, structure, check_shapes(*asked, smooth)


@functools.lru_cache(maxsize=PROGRAMS)
def _drawn_shapes(structure: Structure, shapes: tuple) -> tuple[Structure, tuple]:
    """Return the structure and the shapes of a drawn problem."""
    found = []

    def arrays_of(arrays):
        arrays, inner = flatten(opened(structure, arrays))
        found[:] = [inner]
        return arrays

    arrays = jax.eval_shape(arrays_of, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return found[0], tuple((array.shape, array.dtype) for array in arrays)


@functools.partial(Compiled, static=1)
def _response(structure: Structure, arrays: list[Array]) -> tuple[PyTree, Output]:
    problem, hparams = opened(structure, arrays)
    system = make_system(problem, hparams)
    s_T = system.run(hparams)
    return system.value(system.errors(s_T, hparams)), Output(system.restore(s_T))
