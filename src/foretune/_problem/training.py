"""Training: the dynamics of gradient descent with any Optax optimizer.

    s = (w, v, model state, t),    (w, v)_t = update((w, v)_{t-1}, grad_w J(w_{t-1}, lambda; batch t))

with v the optimizer's accumulators.

The adjoint of a step needs u' dg/dw and u' dg/dlambda of g = grad_w J. The Hessian is symmetric: they
are forward mode over reverse, which keeps no more than the gradient itself does (`transposable`).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from .checks import check_flag, check_key, check_signature, describe, describe_tree
from .dynamics import Dynamics
from .equality import reused
from .jaxprs import equations

BRANCHES = (
    "foretune: the optimizer asks in Python for the value of a hyperparameter, as some of Optax's "
    "schedules do. Write the schedule as a formula in the step, `optax.adam(lambda t: h['lr'] * "
    "jnp.minimum(1, (t + 1) / 9))`, or scale one of plain numbers, `lambda t: h['lr'] * schedule(t)`."
)
GRADIENT = "foretune.gradient"  # marks what a loss and its gradient return, for `split.py`
FLAX = "flax.nnx.module.Module"  # told by name: Flax is not a dependency

WeightsToLoss = Callable[[PyTree], tuple[Float[Array, ""], PyTree]]  # weights -> loss, model state
ValueAndGradient = tuple[tuple[Array, PyTree], PyTree]  # (J, model state) and g


class TrainState(NamedTuple):
    """The state s_t of `Training`: weights, optimizer's accumulators, model state, step number.

    `loss` is that of the last step's minibatch, at the weights before the step; 0 before the first.
    """

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    step: Int[Array, ""]
    loss: Float[Array, ""]


class Training(Dynamics):
    """Gradient descent on `loss` with an Optax optimizer.

    Args:
        loss: the inner objective, `loss(params, hparams, batch) -> scalar`.
        optimizer: an Optax transformation, or a function of the hyperparameters that returns one,
            whose constants and schedules can then be tuned. Those that ask for `value`, `grad` or
            `value_fn` get them.
        has_state: whether the loss takes and returns a model state, batch statistics say:
            `loss(params, hparams, batch, model_state) -> (scalar, model_state)`. The initial
            parameters are then the pair `(params, model_state)`.
        key: a random key. Step t calls the loss with `key=jax.random.fold_in(key, t)`.

    The floating-point arrays of `params` are trained, and nothing else in it, so an Equinox model can
    be given. An array that is to stay as it is goes into the batch, the model state or a closure.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> dynamics = ft.Training(
    ...     lambda params, hparams, batch: jnp.sum((params - batch) ** 2),
    ...     optimizer=lambda h: optax.sgd(h["lr"]))
    >>> hparams = {"lr": jnp.array(0.25)}
    >>> state = dynamics.init(jnp.array([0.0, 4.0]), hparams)
    >>> dynamics.step(state, hparams, jnp.array([2.0, 2.0])).params
    Array([1., 3.], dtype=float32)
    """

    loss: Any  # a function
    optimizer: Any = eqx.field(converter=reused)  # of Optax, or a function that returns one
    has_state: bool = eqx.field(static=True, default=False, kw_only=True)
    key: Key[Array, ""] | UInt32[Array, "..."] | None = eqx.field(default=None, kw_only=True)
    _symmetric: bool = eqx.field(default=False, kw_only=True, repr=False)  # see `transposable`
    _first_order: bool = eqx.field(default=False, kw_only=True, repr=False)

    def __check_init__(self):
        check_flag(self.has_state, "Training's has_state")
        state, key = ", model_state" if self.has_state else "", ""
        if self.key is not None:
            check_key(self.key, "Training's key")
            key = ", key=..."
        form = f"loss(params, hparams, batch{state}{key})"
        check_signature(self.loss, form, ("key",) if key else ())
        if not isinstance(self.optimizer, optax.GradientTransformation):
            if _is_from_optax(self.optimizer) or not callable(self.optimizer):
                raise _not_an_optimizer(self.optimizer)
            check_signature(self.optimizer, "optimizer(hparams)")

    def init(self, params: PyTree, hparams: PyTree) -> TrainState:
        """Return s_0; with `has_state`, `params` is the pair `(params, model_state)`."""
        model_state = None
        if self.has_state:
            if not (isinstance(params, tuple) and len(params) == 2):
                needed = "Training(has_state=True) starts from the pair (params, model_state)"
                raise ValueError(f"{needed}, got {describe(params)}.")
            params, model_state = params
        weights = eqx.filter(params, eqx.is_inexact_array)
        if not jax.tree.leaves(weights):
            raise ValueError(
                "Training found nothing to train: the initial parameters hold no floating-point "
                f"array. They are\n{describe_tree(params, 'params')}"
            )
        if any(f"{c.__module__}.{c.__name__}".startswith(FLAX) for c in type(params).__mro__):
            raise TypeError(
                "the initial parameters are a Flax NNX module. Split it, `graph, params, rest = "
                "nnx.split(model, nnx.Param, ...)`, start from `init=(params, rest)` with "
                "`has_state=True`, and `nnx.merge(graph, params, model_state)` in the loss."
            )
        opt_state = self._optimizer(hparams).init(weights)
        zero = jnp.zeros((), jnp.result_type(float))
        return TrainState(params, opt_state, model_state, jnp.zeros((), jnp.int32), zero)

    def step(self, state: TrainState, hparams: PyTree, batch: PyTree) -> TrainState:
        """Return s_t: one gradient, one update of the optimizer."""
        weights, fixed, objective = self.objective(state, hparams, batch)
        symmetric = self._symmetric and not self._first_order
        differentiated = _symmetric_gradient if symmetric else _gradient
        (value, model_state), grads = differentiated(objective, weights)
        if self._first_order:  # the same numbers, which the compiler finds once
            floats, rest = eqx.partition(state, eqx.is_inexact_array)
            stopped = eqx.combine(jax.lax.stop_gradient(floats), rest)
            grads = self.gradient(stopped, hparams, batch)
        optimizer = self._optimizer(hparams)
        extra = {"value": value, "grad": grads, "value_fn": lambda weights: objective(weights)[0]}
        taken = inspect.signature(optimizer.update).parameters
        if all(p.kind is not p.VAR_KEYWORD for p in taken.values()):  # some refuse more
            extra = {name: argument for name, argument in extra.items() if name in taken}
        # The usual promotion, since Adam multiplies floats by a count.
        with jax.numpy_dtype_promotion("standard"), _noting_branches():
            updates, opt_state = optimizer.update(grads, state.opt_state, weights, **extra)
            weights = optax.apply_updates(weights, updates)
        # A constant given as a float32 array would promote a bfloat16 accumulator.
        opt_state = jax.tree.map(_in_type_of, opt_state, state.opt_state)
        loss, params = value.astype(state.loss.dtype), eqx.combine(weights, fixed)
        return TrainState(params, opt_state, model_state, state.step + 1, loss)

    def gradient(self, state: TrainState, hparams: PyTree, batch: PyTree) -> PyTree:
        """Return the gradient of the loss in the weights, with which a step begins."""
        weights, _, objective = self.objective(state, hparams, batch)
        return jax.grad(objective, has_aux=True)(weights)[0]

    def objective(
        self, state: TrainState, hparams: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, WeightsToLoss]:
        """Return the weights, the rest of the parameters, and weights -> (loss, model state)."""
        weights, fixed = eqx.partition(state.params, eqx.is_inexact_array)

        def objective(weights):
            params = eqx.combine(weights, fixed)
            key = {} if self.key is None else {"key": jax.random.fold_in(self.key, state.step)}
            if self.has_state:
                # Rebuilt here: Flax's variables may only change in the trace that made them.
                model_state = jax.tree.map(lambda leaf: leaf, state.model_state)
                result = self.loss(params, hparams, batch, model_state, **key)
            else:
                result = self.loss(params, hparams, batch, **key), None
            _check_loss(result, self.has_state)
            return result

        return weights, fixed, objective

    def in_precision(self, dtype: jax.typing.DTypeLike) -> "Training":
        """Return the same training with its loss computed in another floating-point type.

        Parameters and batch are cast inside the loss; parameters, gradients and optimizer are not.
        """
        loss = self.loss.loss if isinstance(self.loss, _Cast) else self.loss
        return eqx.tree_at(lambda training: training.loss, self, _Cast(loss, dtype))

    def transposable(self) -> "Training":
        """Return the same training, with the gradient's transposed product by forward mode."""
        return eqx.tree_at(lambda training: training._symmetric, self, True)

    def first_order(self) -> "Training":
        """Return the same training, with a gradient that has no derivative in the state."""
        return eqx.tree_at(lambda training: training._first_order, self, True)

    def _optimizer(self, hparams: PyTree) -> optax.GradientTransformationExtraArgs:
        optimizer = self.optimizer
        if not isinstance(optimizer, optax.GradientTransformation):
            with _noting_branches():
                optimizer = optimizer(hparams)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise _not_an_optimizer(optimizer)
        return optax.with_extra_args_support(optimizer)


class _Cast(eqx.Module):
    """A loss computed in another floating-point type."""

    loss: Callable[..., PyTree]
    dtype: jax.typing.DTypeLike = eqx.field(static=True)

    def __call__(
        self, params: PyTree, hparams: PyTree, batch: PyTree, *state: PyTree, **key: Array
    ) -> PyTree:
        def cast(leaf):
            return leaf.astype(self.dtype) if eqx.is_inexact_array(leaf) else leaf

        params, batch, given = jax.tree.map(cast, (params, batch, state))
        result = self.loss(params, hparams, batch, *given, **key)
        value = result[0] if state else result
        value = value.astype(np.promote_types(value.dtype, np.float32))
        return (value, jax.tree.map(_in_type_of, result[1], state[0])) if state else value


def _gradient(objective: WeightsToLoss, weights: PyTree) -> ValueAndGradient:
    return jax.value_and_grad(objective, has_aux=True)(weights)


def _symmetric_gradient(objective: WeightsToLoss, weights: PyTree) -> ValueAndGradient:
    """Return the loss and its gradient, with a transposed product of its own and no forward mode.

    With the pullback G(w, theta, c) = c' d(J, m)/d(w, theta) of the loss J and the model state m, of
    which g is the first part at c = (1, 0), cotangents (a, b, u) of J, m and g give

        a dJ + b' dm + u' dg  =  the derivative of G along w: u, c: (a, b)

    in w as in theta, which is all else that the loss depends on.
    """
    rest = []

    def arrays_only(weights):
        value, model_state = objective(weights)
        arrays, other = eqx.partition(model_state, eqx.is_array)
        rest[:] = [other]
        return value, arrays

    traced, shape = jax.make_jaxpr(arrays_only, return_shape=True)(weights)
    # A function with a reverse mode of its own need not have a forward mode, and its derivative need
    # not be one (a gradient that is reversed, say): the Hessian need not be symmetric then.
    own = any("custom_vjp" in equation.primitive.name for equation in equations(traced.jaxpr))
    is_complex = any(map(jnp.iscomplexobj, [*traced.consts, *jax.tree.leaves(weights)]))
    if traced.effects or own or is_complex:
        return _gradient(objective, weights)
    theta, constants = eqx.partition(traced.consts, eqx.is_inexact_array)
    structure = jax.tree.structure(shape)

    def loss(weights, theta, constants):
        closed = ClosedJaxpr(traced.jaxpr, eqx.combine(theta, constants))
        out = jaxpr_as_fun(closed)(*jax.tree.leaves(weights))
        value, model_state = jax.tree.unflatten(structure, out)
        floats, others = eqx.partition(model_state, eqx.is_inexact_array)
        return (value, floats), others

    def plain(weights, theta, constants):
        def value(weights):
            (value, floats), others = loss(weights, theta, constants)
            return value, (floats, others)

        (value, aux), grads = jax.value_and_grad(value, has_aux=True)(weights)
        return value, aux, grads

    def backward(residuals, cotangents):
        weights, theta, constants = residuals
        a, (b, _), u = cotangents
        one = jnp.ones_like(a), jax.tree.map(jnp.zeros_like, b)

        def G(weights, c):
            at_constants = lambda w, theta: loss(w, theta, constants)  # noqa: E731
            return jax.vjp(at_constants, weights, theta, has_aux=True)[1](c)

        _, (d_weights, d_theta) = jax.jvp(G, (weights, one), (u, (a, b)))
        nothing = lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0)  # noqa: E731
        return d_weights, d_theta, jax.tree.map(nothing, constants)

    gradient = jax.custom_vjp(plain)
    gradient.defvjp(lambda *given: (plain(*given), given), backward)
    found = checkpoint_name(gradient(weights, theta, constants), GRADIENT)
    value, (floats, others), grads = found
    return (value, eqx.combine(floats, others, *rest)), grads


@contextlib.contextmanager
def _noting_branches() -> Iterator[None]:
    """Say what to do where Optax asks for the value of a hyperparameter, which is traced."""
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(BRANCHES)
        raise


def _not_an_optimizer(given: object) -> TypeError:
    shown = "one of Optax's functions, not called" if _is_from_optax(given) else describe(given)
    if isinstance(given, optax.MultiSteps):
        shown = "an `optax.MultiSteps`: give its `.gradient_transformation()`"
    return TypeError(
        "Training's optimizer must be an Optax transformation, `optax.sgd(0.1)`, or a function of "
        f'hparams that returns one, `lambda h: optax.sgd(h["lr"])`; got {shown}.'
    )


def _is_from_optax(given: object) -> bool:
    return str(getattr(given, "__module__", "")).split(".")[0] == "optax"


def _check_loss(result: object, has_state: bool) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"loss must return the pair (value, model_state), not {describe(result)}.")
    value = result[0]
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        hint = "" if has_state else "; a loss with a model state needs `has_state=True`"
        needed = f"a floating-point scalar (`jnp.mean` reduces an array{hint})"
        found = describe_tree(value, "loss")
        raise TypeError(f"the loss must return {needed}, it returned\n{found}")


def _in_type_of(new, old):
    return new.astype(old.dtype) if eqx.is_inexact_array(new) and eqx.is_array(old) else new
