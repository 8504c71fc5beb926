"""Dynamics: a training procedure as s_t = Phi_t(s_{t-1}, lambda).

    init(params, hparams) -> state             s_0
    step(state, hparams, batch) -> state       Phi_t, with batch t as its data

Both are pure functions that JAX can trace. Of the state, a pytree, the engines differentiate the
floating-point leaves. Real-time tuning watches a state's field `loss`.
"""

import abc

import equinox as eqx
from jaxtyping import PyTree

from .arguments import flatten
from .checks import check_signature, describe


class Dynamics(eqx.Module):
    """A training procedure: a subclass with the methods `init` and `step`.

    It is an `equinox.Module`: a frozen dataclass, whose fields are declared with their types.
    `gradient`, `transposable` and `first_order` are optional.

    >>> import foretune as ft, jax.numpy as jnp
    >>> class Scaling(ft.Dynamics):
    ...     def init(self, params, hparams):
    ...         return params
    ...     def step(self, state, hparams, batch):
    ...         return hparams["rate"] * state
    >>> problem = ft.Problem(
    ...     Scaling(), lambda s, h, _: s, init=jnp.array(8.0), batches=ft.FullBatch(None, steps=2))
    >>> float(ft.Reverse()(problem, {"rate": jnp.array(0.5)}).grad["rate"])  # f = 8 rate^2
    8.0
    """

    @abc.abstractmethod
    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        """Return s_0 from the initial parameters."""

    @abc.abstractmethod
    def step(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        """Return s_t = Phi_t(s_{t-1}, lambda): same structure, shapes and dtypes as `state`."""

    def gradient(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        """Return the gradient, in `state.params`, of the loss that the training minimises."""
        raise NotImplementedError

    def transposable(self) -> "Dynamics":
        """Return the same dynamics with a step that is cheap to transpose, without forward mode."""
        return self

    def first_order(self) -> "Dynamics":
        """Return the same dynamics, whose derivative leaves out the Hessian of the loss."""
        raise TypeError(f"Reverse(first_order=True): {type(self).__name__} has no `first_order`.")


class Wrapper(Dynamics):
    """A dynamics that does as another one, but for what a subclass overrides."""

    dynamics: Dynamics

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        return self.dynamics.init(params, hparams)

    def step(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        return self.dynamics.step(state, hparams, batch)

    def gradient(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        return self.dynamics.gradient(state, hparams, batch)

    def transposable(self) -> Dynamics:
        return eqx.tree_at(lambda wrapper: wrapper.dynamics, self, self.dynamics.transposable())

    def first_order(self) -> Dynamics:
        return eqx.tree_at(lambda wrapper: wrapper.dynamics, self, self.dynamics.first_order())


class Continued(Wrapper):
    """A dynamics that starts from a state it is given."""

    # the paths of hyperparameters that the state may depend on already
    carried: tuple[str, ...] = eqx.field(static=True, default=())

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        return params


def check_dynamics(dynamics: object) -> Dynamics:
    """Return the dynamics, or raise where it is none, or has methods that cannot be called."""
    if isinstance(dynamics, type):
        raise TypeError(f"the dynamics is a class; give an instance, `{dynamics.__name__}(...)`.")
    if not isinstance(dynamics, Dynamics):
        needed = "`foretune.Training(...)`, or an instance of a subclass of `foretune.Dynamics`"
        raise TypeError(f"the dynamics is {describe(dynamics)}: give {needed}.")
    check_signature(dynamics.init, "dynamics.init(params, hparams)")
    check_signature(dynamics.step, "dynamics.step(state, hparams, batch)")
    try:
        hash(flatten(dynamics)[1])
    except TypeError as error:
        found = f"a field of {type(dynamics).__name__} cannot be hashed ({error})"
        raise TypeError(f"{found}: give arrays, numbers, text, functions or tuples.") from None
    return dynamics
