"""Problems: f(lambda) = E(s_T(lambda)), a dynamics with its data, its start and its error.

A `Problem` holds what the user gives. `Problem.system` turns it into a `System`: the same thing
as pure functions of array-only states, which is all that an engine knows. An error averaged
over the whole trajectory is a system too, with one more state variable that accumulates it, so
no engine has a case for it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from .arguments import Output, Structure, unflatten
from .checks import (
    as_arrays,
    check_count,
    check_dynamics,
    check_leading_axis,
    check_objective,
    check_signature,
    describe,
    validated,
)


class Batches(eqx.Module):
    """What the steps train on: `xs`, which the loop scans over, and `batch(x)`, an entry's batch."""


class Minibatches(Batches):
    """T minibatches as indices into data that lies on the device once.

    Step t sees `data` with its leading axis indexed by `indices[t]`; the gather happens inside the
    training loop, so memory is the data's own, whatever T is.

    Args:
        data: a pytree of arrays that share their leading axis, the examples.
        indices: integers of shape (T, batch size), or (T, ...) in general.
        gather: makes the minibatch, `gather(data, indices[t])`, where it is not rows of the data:
            windows of a signal, crops, pairs. The data may then be any pytree of arrays, and the
            indices are yours to keep in range.

    >>> import foretune as ft, jax, jax.numpy as jnp
    >>> batches = ft.Minibatches(jnp.arange(10.0), jnp.array([[0, 1], [8, 9], [4, 4]]))
    >>> batches.steps
    3
    >>> batches.batch(batches.xs[1])
    Array([8., 9.], dtype=float32)
    >>> def context(signal, i):  # each sample with its neighbours
    ...     return signal[i[:, None] + jnp.arange(-1, 2)]
    >>> batches = ft.Minibatches(jnp.arange(10.0), jnp.array([[3, 8]]), gather=context)
    >>> batches.batch(batches.xs[0])
    Array([[2., 3., 4.],
           [7., 8., 9.]], dtype=float32)
    """

    data: PyTree[Array]
    indices: Int[Array, "T ..."]
    gather: Callable[[PyTree, Array], PyTree] | None = eqx.field(static=True)

    def __init__(
        self,
        data: PyTree,
        indices: Any,
        gather: Any = None,
    ):
        if gather is not None and not callable(gather):
            raise TypeError(
                f"Minibatches' gather must be a function (data, indices) -> batch, got "
                f"{describe(gather)}."
            )
        self.data, self.indices, self.gather = as_arrays(data), as_arrays(indices), gather
        n = check_leading_axis(self.data, "Minibatches' data") if gather is None else None
        if not (eqx.is_array(self.indices) and jnp.issubdtype(self.indices.dtype, jnp.integer)):
            raise TypeError(
                f"Minibatches' indices must be an integer array, got {describe(self.indices)}."
            )
        if self.indices.ndim == 0:
            raise ValueError("Minibatches' indices need a leading axis of T steps, got a scalar.")
        check_count(self.indices.shape[0], "the leading axis of Minibatches' indices, T = 0")
        if self.indices.size == 0:
            raise ValueError(
                f"Minibatches' batches are empty: the indices have shape {self.indices.shape}."
            )
        if n is not None and not isinstance(self.indices, Tracer):
            low, high = int(self.indices.min()), int(self.indices.max())
            if low < 0 or high >= n:
                raise ValueError(
                    f"Minibatches' indices run from {low} to {high}, but the data has {n} examples "
                    f"(0 to {n - 1}). JAX would clamp them silently."
                )

    def at(self, indices: Any) -> "Minibatches":
        """Return other minibatches of the same data, without looking at the indices' values."""
        return eqx.tree_at(lambda batches: batches.indices, self, indices)

    @classmethod
    def shuffled(
        cls,
        data: PyTree,
        *,
        batch_size: int,
        steps: int,
        key: Key[Array, ""] | UInt32[Array, "..."],
    ) -> "Minibatches":
        """Draw `steps` minibatches by reshuffling the examples at each epoch.

        >>> import foretune as ft, jax, jax.numpy as jnp
        >>> data = {"x": jnp.ones((100, 3)), "y": jnp.zeros(100)}
        >>> key = jax.random.key(0)
        >>> ft.Minibatches.shuffled(data, batch_size=20, steps=12, key=key).indices.shape
        (12, 20)
        """
        n = check_leading_axis(as_arrays(data), "Minibatches' data")
        check_count(steps, f"steps={steps}")
        if not 1 <= batch_size <= n:
            raise ValueError(f"batch_size={batch_size} must lie between 1 and the {n} examples.")
        per_epoch = n // batch_size
        keys = jax.random.split(key, -(-steps // per_epoch))
        order = jax.vmap(lambda k: jax.random.permutation(k, n))(keys)
        indices = order[:, : per_epoch * batch_size].reshape(-1, batch_size)
        return cls(data, indices[:steps])

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return self.indices.shape[0]

    @property
    def xs(self) -> Int[Array, "T ..."]:
        """What the training loop scans over."""
        return self.indices

    def batch(self, x: Int[Array, "..."]) -> PyTree[Array]:
        """Return the minibatch of one entry of `xs`."""
        if self.gather is not None:
            return self.gather(self.data, x)
        return jax.tree.map(lambda leaf: leaf[x], self.data)


class FullBatch(Batches):
    """The same data at each of T steps: full-batch descent.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.FullBatch({"x": jnp.ones((5, 2))}, steps=100).steps
    100
    """

    data: PyTree[Array]
    steps: int = eqx.field(static=True)

    def __init__(self, data: PyTree, steps: int):
        check_count(steps, f"FullBatch's steps={steps}")
        self.data, self.steps = as_arrays(data), steps

    @property
    def xs(self) -> None:
        """Nothing: every step sees the same data."""
        return None

    def batch(self, x: None) -> PyTree[Array]:
        """Return the data."""
        return self.data


class Stacked(Batches):
    """A pytree of arrays with leading axis T, one entry a step."""

    xs: PyTree[Array]

    def __init__(self, xs: PyTree):
        self.xs = as_arrays(xs)
        steps = check_leading_axis(self.xs, "batches", "T, one entry per step")
        check_count(steps, f"the leading axis of the batches, T = {steps}")

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return jax.tree.leaves(self.xs)[0].shape[0]

    def batch(self, x: PyTree[Array]) -> PyTree[Array]:
        """Return the batch of one entry of `xs`."""
        return x


def as_batches(batches: Any) -> Any:
    """Return the batches as `Batches`: a pytree of arrays has an entry for each step."""
    return batches if isinstance(batches, Batches) else Stacked(batches)


class System(NamedTuple):
    """A problem as the engines see it: pure functions of an array-only state s."""

    initial: Callable[[PyTree], PyTree]  # lambda -> s_0
    step: Callable[[PyTree, PyTree, PyTree], PyTree]  # Phi: s_{t-1}, lambda, x_t -> s_t
    step_and_loss: Callable[..., tuple[PyTree, Any]]  # the same, and the training loss or None
    errors: Callable[[PyTree, PyTree], tuple[Float[Array, ""], ...]]  # s_T, lambda -> K errors
    xs: PyTree[Array]  # x_1 .. x_T
    steps: int  # T
    restore: Callable[[PyTree], PyTree]  # s -> the user's state

    def run(self, hparams: PyTree) -> PyTree:
        """Return s_T: plain training."""
        s_0 = self.initial(hparams)
        s_T, _ = lax.scan(
            lambda s, x: (self.step(s, hparams, x), None), s_0, self.xs, length=self.steps
        )
        return s_T


class Problem(eqx.Module):
    """The response f(lambda) = E(s_T(lambda), lambda) of a training procedure.

    Args:
        dynamics: `Training`, or any object with `init(params, hparams)` and
            `step(state, hparams, batch)`. It must be pure, and not change once it is in use:
            a compiled program does not see the change.
        objective: the error `E(state, hparams, validation) -> scalar`, or a dict from top-level
            hyperparameter names to such functions, so that each hyperparameter follows its own
            error. The direct dependence of E on the hyperparameters counts.
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

    dynamics: Any
    objective: Callable[..., Any] | dict[str, Callable[..., Any]]
    init: PyTree
    batches: Any  # `Batches`
    validation: PyTree
    trajectory: bool = eqx.field(static=True)

    def __init__(
        self,
        dynamics: Any,
        objective: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        init: PyTree,
        batches: PyTree,
        validation: PyTree = None,
        *,
        trajectory: bool = False,
    ):
        check_dynamics(dynamics)
        check_objective(objective)
        self.dynamics = dynamics if _hashable(dynamics) else _ByIdentity(dynamics)
        self.objective = dict(objective) if isinstance(objective, Mapping) else objective
        self.init = as_arrays(init)
        if self._starts_from_function():
            check_signature(init, "init(hparams)")
        self.batches = as_batches(batches)
        self.validation = as_arrays(validation)
        self.trajectory = trajectory

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return self.batches.steps

    def response(self, hparams: PyTree) -> tuple[PyTree[Float[Array, ""]], PyTree]:
        """Return `(value, final state)`: one training run and its error, as they are.

        No gradient, and no check that the value is finite.
        """
        arrays, structure = validated(self, hparams)
        value, state = _response(structure, arrays)
        return value, state.tree()

    def replace(self, **changes: Any) -> "Problem":
        """Return the problem with some of its arguments changed.

        >>> import foretune as ft, jax.numpy as jnp, optax
        >>> problem = ft.Problem(
        ...     ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
        ...     lambda state, h, x: (state.params - x) ** 2,
        ...     jnp.array(0.0), ft.FullBatch(jnp.array(1.0), steps=3), jnp.array(1.0))
        >>> problem.replace(batches=ft.FullBatch(jnp.array(1.0), steps=5)).steps
        5
        """
        given = {name: getattr(self, name) for name in Problem.__dataclass_fields__}
        return Problem(**(given | changes))

    def continued(self, state: PyTree) -> "Problem":
        """Return the problem that starts from a state of the dynamics instead of from `init`."""
        return self.replace(dynamics=Continued(self.dynamics), init=state)

    def start(self, hparams: PyTree) -> PyTree:
        """Return the user's s_0."""
        params = self.init(hparams) if self._starts_from_function() else self.init
        return self.dynamics.init(params, hparams)

    def _starts_from_function(self) -> bool:
        # An Equinox model is callable as well, but holds arrays: it is a start, not a function.
        arrays = jax.Array | jax.ShapeDtypeStruct
        holds_arrays = any(isinstance(leaf, arrays) for leaf in jax.tree.leaves(self.init))
        return callable(self.init) and not holds_arrays

    def objectives(self) -> dict[str | None, Callable[..., Any]]:
        """Return the objectives by hyperparameter name, sorted; a single one has the name None."""
        if not isinstance(self.objective, dict):
            return {None: self.objective}
        return {name: self.objective[name] for name in sorted(self.objective)}

    def rows(self) -> dict[str | None, int]:
        """Return, by hyperparameter name, the entry of `System.errors` that it follows."""
        order = {key: k for k, key in enumerate(self._distinct())}
        return {name: order[_identity(name, f)] for name, f in self.objectives().items()}

    def _distinct(self) -> dict[Any, Callable[..., Any]]:
        """Return the objectives, each once though several hyperparameters may follow it."""
        return {_identity(name, f): f for name, f in self.objectives().items()}

    def owners(self, hparams: PyTree) -> list[str | None]:
        """Return, for each leaf of the hyperparameters, the name of the objective it follows."""
        paths, _ = jax.tree_util.tree_flatten_with_path(hparams)
        if not isinstance(self.objective, dict):
            return [None] * len(paths)
        return [path[0].key for path, _ in paths]

    def system(self, hparams: PyTree) -> System:
        """Return the problem as functions of array-only states (call it inside a trace)."""
        s_0 = eqx.filter_eval_shape(self.start, hparams)
        is_array = jax.tree.map(lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), s_0)
        static = eqx.filter(s_0, is_array, inverse=True)
        functions = list(self._distinct().values())

        def E(arrays, hparams):
            state = eqx.combine(arrays, static)
            return tuple(f(state, hparams, self.validation) for f in functions)

        def initial(hparams):
            return eqx.filter(self.start(hparams), is_array)

        def step_and_loss(arrays, hparams, x):
            state, batch = eqx.combine(arrays, static), self.batches.batch(x)
            if hasattr(self.dynamics, "step_and_loss"):
                state, loss = self.dynamics.step_and_loss(state, hparams, batch)
            else:
                state, loss = self.dynamics.step(state, hparams, batch), None
            return eqx.filter(state, is_array), loss

        def step(arrays, hparams, x):
            return step_and_loss(arrays, hparams, x)[0]

        def restore(arrays):
            return eqx.combine(arrays, static)

        plain = System(initial, step, step_and_loss, E, self.batches.xs, self.steps, restore)
        return _averaged(plain, hparams) if self.trajectory else plain

    def value(self, errors: tuple[Float[Array, ""], ...]) -> PyTree[Float[Array, ""]]:
        """Return the error, or the dict of errors by hyperparameter name."""
        values = {name: errors[k] for name, k in self.rows().items()}
        return values.get(None, values)

    def gradient(self, rows: PyTree[Float[Array, "K ..."]]) -> PyTree[Float[Array, "..."]]:
        """Return, from the gradients of all K errors, each hyperparameter's own."""
        if not isinstance(self.objective, dict):
            return jax.tree.map(lambda row: row[0], rows)
        return {
            name: jax.tree.map(lambda row, k=k: row[k], rows[name])
            for name, k in self.rows().items()
        }


def _identity(name: Any, objective: Any) -> Any:
    # a module may hold arrays, which cannot be compared inside a program: it counts by its name,
    # unless it stands for another objective, as the mean over folds does
    objective = getattr(objective, "stands_for", objective)
    return name if isinstance(objective, eqx.Module) else objective


def _averaged(system: System, hparams: PyTree) -> System:
    """The system whose error is the mean of E(s_t) over t: one more state, the running mean."""
    shapes = jax.eval_shape(lambda h: system.errors(system.initial(h), h), hparams)

    def initial(hparams):
        return system.initial(hparams), tuple(jnp.zeros((), E.dtype) for E in shapes)

    def step(state, hparams, x):
        s, mean = state
        s = system.step(s, hparams, x)
        return s, tuple(
            m + E / system.steps for m, E in zip(mean, system.errors(s, hparams), strict=True)
        )

    def errors(state, hparams):
        return state[1]

    return system._replace(
        initial=initial, step=step, errors=errors, restore=lambda state: system.restore(state[0])
    )


@functools.partial(jax.jit, static_argnums=0)
def _response(structure: Structure, arrays: list[Array]) -> tuple[PyTree, Output]:
    problem, hparams = unflatten(structure, arrays)
    system = problem.system(hparams)
    s_T = system.run(hparams)
    return problem.value(system.errors(s_T, hparams)), Output(system.restore(s_T))


def _hashable(obj: Any) -> bool:
    leaves = jax.tree.leaves(obj)
    try:
        hash(tuple(leaf for leaf in leaves if not eqx.is_array(leaf)))
    except TypeError:
        return False
    return True


class Continued(eqx.Module):
    """A dynamics that starts from a state it is given.

    `carried` names the hyperparameters that the state may depend on already.
    """

    dynamics: Any
    carried: tuple[str, ...] = eqx.field(static=True, default=())

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        """Return the state."""
        return params

    def step(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        """Return s_t."""
        return self.dynamics.step(state, hparams, batch)

    @property
    def step_and_loss(self) -> Callable[..., Any]:
        """The dynamics' own, where it has one."""
        return self.dynamics.step_and_loss


class _ByIdentity:
    """An object that cannot be hashed (a dataclass, say), told apart by identity for the cache."""

    def __init__(self, wrapped: Any):
        self.init, self.step = wrapped.init, wrapped.step
        if hasattr(wrapped, "step_and_loss"):
            self.step_and_loss = wrapped.step_and_loss
        if hasattr(wrapped, "in_precision"):
            self.in_precision = lambda dtype: _ByIdentity(wrapped.in_precision(dtype))
