"""Dynamics: a training procedure as s_t = Phi_t(s_{t-1}, lambda).

A dynamics has two methods,

    init(params, hparams) -> state             s_0
    step(state, hparams, batch) -> state       Phi_t, with batch t as its data

both pure functions that JAX can trace. The state is a pytree; its floating-point leaves are
what the engines differentiate, its integers and random keys are carried along, and anything
else in it (a model's activation function, say) stays as it is.

`Dynamics` declares them, and what a dynamics may offer besides, with defaults. Nothing need inherit
from it: any object with the two methods gets a `Wrapper`, the only place that looks at what an object
has.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .checks import check_signature, describe


class Dynamics(abc.ABC):
    """A training procedure. Subclass it, or give any object with the methods `init` and `step`.

    `step_and_loss`, `gradient` and `in_precision` are optional; `Training` has them all. Where a class
    overrides only one of `step` and `step_and_loss`, that one counts.

    >>> import foretune as ft, jax.numpy as jnp
    >>> class Halving(ft.Dynamics):
    ...     def init(self, params, hparams):
    ...         return params
    ...     def step(self, state, hparams, batch):
    ...         return hparams["rate"] * state
    >>> problem = ft.Problem(
    ...     Halving(), lambda s, h, _: s, init=jnp.array(8.0), batches=ft.FullBatch(None, steps=2))
    >>> float(ft.Reverse()(problem, {"rate": jnp.array(0.5)}).grad["rate"])  # f = 8 rate^2
    8.0
    """

    @abc.abstractmethod
    def init(self, params: Any, hparams: Any) -> Any:
        """Return s_0 from the initial parameters."""

    @abc.abstractmethod
    def step(self, state: Any, hparams: Any, batch: Any) -> Any:
        """Return s_t = Phi_t(s_{t-1}, lambda): same structure, shapes and dtypes as `state`."""

    def step_and_loss(self, state: Any, hparams: Any, batch: Any) -> tuple[Any, Any]:
        """Return s_t and the training loss, which real-time tuning reports and watches."""
        return self.step(state, hparams, batch), None

    def gradient(self, state: Any, hparams: Any, batch: Any) -> PyTree:
        """Return the gradient, in `state.params`, of the loss that the training minimises."""
        raise NotImplementedError

    def in_precision(self, dtype: Any) -> "Dynamics":
        """Return the same dynamics with its loss computed in another floating-point type."""
        raise NotImplementedError

    def transposable(self) -> "Dynamics":
        """Return the same dynamics with a step that is cheap to transpose, without forward mode."""
        return self

    def offers(self, capability: str) -> bool:
        """Return whether one of the optional methods is there."""
        return getattr(type(self), capability) is not getattr(Dynamics, capability)

    @property
    def carried(self) -> tuple[str, ...]:
        """The paths of hyperparameters that the initial state may depend on already."""
        return ()

    @property
    def reports_loss(self) -> bool:
        """Whether `advance` returns a loss."""
        return _own_step(self) == "step_and_loss"

    def advance(self, state: Any, hparams: Any, batch: Any) -> tuple[Any, Any]:
        """Return s_t, and the loss or None: the step as engines and tuners take it."""
        if self.reports_loss:
            return self.step_and_loss(state, hparams, batch)
        return self.step(state, hparams, batch), None


def _own_step(dynamics: Any) -> str:
    """Return which of the two methods the object itself or its most derived class defines."""
    classes = [vars(base) for base in type(dynamics).__mro__ if base is not Dynamics]
    for defined in (getattr(dynamics, "__dict__", {}), *classes):
        if "step_and_loss" in defined:
            return "step_and_loss"
        if "step" in defined:
            return "step"
    return "step"


class Wrapper(Dynamics, eqx.Module):
    """A dynamics that does as another one, but for what a subclass overrides.

    The other may be any object with `init` and `step`; what else it has is looked for here alone.
    """

    dynamics: Any  # the object, or its `Identity`

    @property
    def inner(self) -> Any:
        """The object."""
        return self.dynamics.held if isinstance(self.dynamics, Identity) else self.dynamics

    def init(self, params: Any, hparams: Any) -> Any:
        """Return s_0."""
        return self.inner.init(params, hparams)

    def step(self, state: Any, hparams: Any, batch: Any) -> Any:
        """Return s_t."""
        return self.advance(state, hparams, batch)[0]

    def step_and_loss(self, state: Any, hparams: Any, batch: Any) -> tuple[Any, Any]:
        """Return s_t, and the loss or None."""
        return self.advance(state, hparams, batch)

    def gradient(self, state: Any, hparams: Any, batch: Any) -> PyTree:
        """Return the gradient of the loss."""
        return self.inner.gradient(state, hparams, batch)

    def in_precision(self, dtype: Any) -> Dynamics:
        """Return the same in another floating-point type."""
        return self._around(self.inner.in_precision(dtype))

    def transposable(self) -> Dynamics:
        """Return the same with the object's transposable form."""
        if not isinstance(self.inner, Dynamics):
            return self
        return self._around(self.inner.transposable())

    def _around(self, dynamics: Any) -> Dynamics:
        """Return the same around another object, held as this one is."""
        hold = as_dynamics if isinstance(self.dynamics, Dynamics) else as_held
        return eqx.tree_at(lambda wrapper: wrapper.dynamics, self, hold(dynamics))

    def offers(self, capability: str) -> bool:
        """Return whether the object does."""
        if isinstance(self.inner, Dynamics):
            return self.inner.offers(capability)
        return callable(getattr(self.inner, capability, None))

    @property
    def reports_loss(self) -> bool:
        """Whether the object's step does."""
        if isinstance(self.inner, Dynamics):
            return self.inner.reports_loss
        return _own_step(self.inner) == "step_and_loss"

    def advance(self, state: Any, hparams: Any, batch: Any) -> tuple[Any, Any]:
        """Return s_t, and the loss or None."""
        if self.reports_loss:
            return self.inner.step_and_loss(state, hparams, batch)
        return self.inner.step(state, hparams, batch), None


class Continued(Wrapper):
    """A dynamics that starts from a state it is given."""

    carries: tuple[str, ...] = eqx.field(static=True, default=())

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        """Return the state."""
        return params

    @property
    def carried(self) -> tuple[str, ...]:
        """The paths of hyperparameters that the state may depend on already."""
        return self.carries


class Identity:
    """Holds an object that cannot be hashed (a dataclass, say); equal where the object is the same."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Identity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def as_dynamics(dynamics: Any) -> Dynamics:
    """Return the object as a `Dynamics` that a program can be compiled for, or raise."""
    check_dynamics(dynamics)
    if not _hashable(dynamics):
        return Wrapper(Identity(dynamics))
    return dynamics if isinstance(dynamics, Dynamics) else Wrapper(dynamics)


def as_held(dynamics: Any) -> Any:
    """Return the object as a `Wrapper` holds it: as it is, or its `Identity`."""
    found = as_dynamics(dynamics)
    return found.dynamics if type(found) is Wrapper else found


def _hashable(tree: Any) -> bool:
    try:
        hash(tuple(leaf for leaf in jax.tree.leaves(tree) if not eqx.is_array(leaf)))
    except TypeError:
        return False
    return True


def check_dynamics(dynamics: Any) -> None:
    """Raise unless `dynamics` has the two methods."""
    if isinstance(dynamics, type):
        raise TypeError(f"the dynamics is a class; give an instance, `{dynamics.__name__}(...)`.")
    for form in ("init(params, hparams)", "step(state, hparams, batch)"):
        method: Callable[..., Any] | None = getattr(dynamics, form[:4], None)
        if not callable(method):
            raise TypeError(
                f"the dynamics is {describe(dynamics)}, which has no method `{form}`. A dynamics "
                "is `foretune.Training(...)` or any object with `init` and `step`."
            )
        check_signature(method, f"dynamics.{form}")
