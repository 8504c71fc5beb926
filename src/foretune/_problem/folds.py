"""Cross-validated problems: one lambda, several inner problems, the mean of their errors.

    f(lambda) = 1/k sum_i E_i(s_T^i(lambda), lambda)

The k inner problems (folds of the same examples, seeds of the same training) run side by side as one
dynamics whose state is the stack of theirs, so every engine and driver takes it for a problem like
any other. What is the same in all of them, the examples above all, is held once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from .batches import Batches, FullBatch, Minibatches, Whole, as_batches
from .checks import as_arrays, check_count, check_signature, describe, named_leaves
from .dynamics import Continued, Wrapper
from .equality import same
from .problem import Problem
from .system import objectives_of


class PerFold(eqx.Module):
    """An array that differs between the folds, with the folds as its leading axis."""

    array: Any


class CrossValidated(Problem):
    """The mean response of several inner problems under the same hyperparameters.

    Args:
        problem_of_fold: a function of the fold's number, 0 .. folds - 1, that returns its `Problem`.
            All must be the same but for the numbers in their arrays: same functions, same shapes, same
            number of steps. Folds of unequal size are made equal by a mask (see the example).
        folds: how many.

    It is a problem: every engine, `minimize` and `check_hypergradient` take it. Its state is the stack
    of the inner states, with the folds as a leading axis. An array that all folds share, such as the
    examples where folds differ by their masks only, lies on the device once; make it a JAX array
    outside of `problem_of_fold`, so that it is not copied there first either.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> x = jnp.linspace(-1.0, 1.0, 9)
    >>> y = 2 * x + jnp.sin(40 * x)
    >>> fold = jnp.arange(9) % 3
    >>> def loss(w, h, batch):
    ...     x, y, use = batch
    ...     return jnp.sum(use * (w * x - y) ** 2) + h["decay"] * w**2
    >>> def error(state, h, batch):
    ...     x, y, use = batch
    ...     return jnp.sum(use * (state.params * x - y) ** 2)
    >>> def problem_of_fold(k):
    ...     return ft.Problem(
    ...         ft.Training(loss, optax.sgd(0.1)), error, init=jnp.array(0.0),
    ...         batches=ft.FullBatch((x, y, fold != k), steps=50), validation=(x, y, fold == k))
    >>> problem = ft.CrossValidated(problem_of_fold, folds=3)
    >>> value, grad, state = ft.Reverse()(problem, {"decay": jnp.array(0.5)})
    >>> state.params.shape
    (3,)
    """

    def __init__(self, problem_of_fold: Any, folds: Any):
        check_count(folds, f"CrossValidated(folds={folds!r})")
        if not callable(problem_of_fold):
            raise TypeError(
                "CrossValidated takes a function from the fold's number to its problem; got "
                f"{describe(problem_of_fold)}."
            )
        check_signature(problem_of_fold, "problem_of_fold(k)")
        problems: list[Any] = [problem_of_fold(k) for k in range(folds)]
        for k, problem in enumerate(problems):
            if not isinstance(problem, Problem):
                raise TypeError(
                    f"problem_of_fold({k}) returned {describe(problem)}, not a `foretune.Problem`."
                )
            if isinstance(problem, CrossValidated):
                raise TypeError(
                    "problem_of_fold returned a CrossValidated problem. Number the inner problems "
                    "through instead: `seed, fold = divmod(k, folds)`."
                )
            if problem.trajectory != problems[0].trajectory:
                raise ValueError(
                    f"trajectory is {problem.trajectory} in fold {k}, but not in fold 0."
                )
        objectives = [objectives_of(problem) for problem in problems]
        names = list(objectives[0])
        for k, others in enumerate(objectives):
            if list(others) != names:
                raise ValueError(f"fold {k} has objectives for {list(others)}, fold 0 for {names}.")
        mean = {
            name: FoldMean(_combine([o[name] for o in objectives], "objective"), folds)
            for name in names
        }
        objective: Any = mean.get(None, mean)
        super().__init__(
            FoldDynamics(_combine([p.dynamics for p in problems], "dynamics"), folds),
            objective,
            _combine([p.init for p in problems], "init"),
            FoldBatches([p.batches for p in problems]),
            _combine([p.validation for p in problems], "validation"),
            trajectory=problems[0].trajectory,
        )

    @property
    def folds(self) -> int:
        """How many inner problems there are."""
        return next(iter(self._means().values())).folds

    def fold_values(self, state: PyTree, hparams: PyTree) -> PyTree[Float[Array, " folds"]]:
        """Return the error of each fold at a final state; their mean is the value."""
        values = {
            name: f.each(state, hparams, self.validation) for name, f in self._means().items()
        }
        return values.get(None, values)

    def _means(self) -> Any:
        return objectives_of(self)

    def replace(self, **changes: Any) -> "CrossValidated":
        """Return the problem with some of its arguments changed.

        `batches`, `init` and `validation` are given as a list with an entry for each fold, as
        `minimize(batches=...)` does too.
        """
        for name in ("batches", "init", "validation"):
            if name not in changes:
                continue
            parts = changes[name]
            if not isinstance(parts, list) or len(parts) != self.folds:
                raise ValueError(
                    f"{name} of a CrossValidated problem is a list with one entry for each of its "
                    f"{self.folds} folds; got {describe(parts)}."
                )
            changes[name] = (
                FoldBatches(parts) if name == "batches" else _combine(as_arrays(parts), name)
            )
        for name in ("dynamics", "objective"):
            if name in changes:
                raise ValueError(f"make a new CrossValidated problem to change its {name}.")
        return self._replaced(changes)

    def continued(self, state: PyTree) -> "CrossValidated":
        """Return the problem that starts from a stack of the folds' states."""
        return self._replaced({"dynamics": Continued(self.dynamics), "init": state})

    def apart(self) -> "CrossValidated":
        """Return the problem whose hyperparameters are a stack, with an entry for each fold.

        One hypergradient of it has those of all folds, at the price of their mean.
        """
        means = {
            name: FoldMean(mean.objective, self.folds, apart=True)
            for name, mean in self._means().items()
        }
        return self._replaced(
            {"dynamics": _apart(self.dynamics), "objective": means.get(None, means)}
        )

    def _replaced(self, changes: dict[str, Any]) -> "CrossValidated":
        plain, folds = super().replace(**changes), object.__new__(CrossValidated)
        for name in Problem.__dataclass_fields__:
            object.__setattr__(folds, name, getattr(plain, name))
        return folds


class FoldDynamics(Wrapper):
    """The inner dynamics side by side: the state is the stack of their states."""

    folds: int = eqx.field(static=True)
    apart: bool = eqx.field(static=True, default=False)
    """Whether each fold has hyperparameters of its own: a stack of them."""

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        """Return the stack of the s_0."""
        h = _hyperparameters(hparams, self.apart)
        return _each(lambda d, p, h: d.init(p, h), self.folds, self.dynamics, params, h)

    def advance(self, state: PyTree, hparams: PyTree, batch: PyTree) -> tuple[PyTree, None]:
        """Return the stack of the s_t. The batch is the source and its entry, see `FoldBatches`."""

        def one(dynamics, s, h, batch):
            source, x = batch
            return dynamics.advance(s, h, source.batch(x))[0]

        h = _hyperparameters(hparams, self.apart)
        return _each(one, self.folds, self.dynamics, _of_folds(state), h, batch), None

    @property
    def reports_loss(self) -> bool:
        """No: there is one for each fold."""
        return False

    def gradient(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        """Return the stack of the gradients."""

        def one(dynamics, s, h, batch):
            source, x = batch
            return dynamics.gradient(s, h, source.batch(x))

        h = _hyperparameters(hparams, self.apart)
        return _each(one, self.folds, self.dynamics, _of_folds(state), h, batch)


class FoldMean(eqx.Module):
    """The mean over the folds of an objective."""

    objective: Callable[..., Any]
    folds: int = eqx.field(static=True)
    apart: bool = eqx.field(static=True, default=False)

    @property
    def stands_for(self) -> Callable[..., Any]:
        """The objective itself: hyperparameters that follow the same one share its gradient."""
        return self.objective

    def each(self, state: PyTree, hparams: PyTree, validation: PyTree) -> Float[Array, " folds"]:
        """Return the error of each fold."""
        return _each(
            lambda f, s, h, v: jnp.asarray(f(s, h, v)),
            self.folds,
            self.objective,
            _of_folds(state),
            _hyperparameters(hparams, self.apart),
            validation,
        )

    def __call__(self, state: PyTree, hparams: PyTree, validation: PyTree) -> Float[Array, "..."]:
        """Return their mean."""
        return jnp.mean(self.each(state, hparams, validation), axis=0)


class FoldBatches(Batches):
    """The batches of all folds. A step's batch is made inside the fold, so shared data stays single."""

    source: Any  # the batches without what the loop scans over
    xs: PyTree  # x_1 .. x_T, the steps as the leading axis, then the folds where they differ
    steps: int = eqx.field(static=True)

    def __init__(self, batches: Sequence[Any]):
        batches = [as_batches(b) for b in batches]
        kinds = {type(b).__name__ for b in batches}
        steps = {b.steps for b in batches}
        if len(kinds) > 1 or len(steps) > 1:
            shown = ", ".join(
                f"fold {k}: {type(b).__name__} of {b.steps} steps" for k, b in enumerate(batches)
            )
            raise ValueError(
                f"the folds' batches differ in kind or number of steps ({shown}). "
                "Give every fold the same."
            )
        self.steps = steps.pop()
        self.xs = _combine([b.xs for b in batches], "batches.xs", axis=1)
        self.source = _combine([_source(b) for b in batches], "batches")

    def batch(self, x: PyTree) -> PyTree:
        """Return what `FoldDynamics.step` takes: the source and the entry, not yet brought together."""
        return self.source, x

    def whole(self) -> PyTree:
        """Return the source and no entry, for the whole data of each fold."""
        return Whole(self.source), None


def _hyperparameters(hparams: PyTree, apart: bool) -> PyTree:
    return _of_folds(hparams) if apart else hparams


def _apart(dynamics: Any) -> Any:
    if isinstance(dynamics, FoldDynamics):
        return FoldDynamics(dynamics.dynamics, dynamics.folds, apart=True)
    return dynamics._around(_apart(dynamics.inner))


def _source(batches: Any) -> Any:
    if isinstance(batches, FullBatch):
        return batches
    scanned = "indices" if isinstance(batches, Minibatches) else "xs"
    return eqx.tree_at(lambda b: getattr(b, scanned), batches, None)


def _of_folds(state: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: PerFold(leaf) if eqx.is_array(leaf) else leaf, state)


def _is_per_fold(node: Any) -> bool:
    return isinstance(node, PerFold)


def _each(f: Callable[..., Any], folds: int, *arguments: PyTree) -> PyTree:
    """Return f on each fold, stacked; what is not `PerFold` is the same for all."""
    nodes, treedef = jax.tree.flatten(arguments, is_leaf=_is_per_fold)
    differ = [node.array for node in nodes if _is_per_fold(node)]

    def one(differ):
        rest = iter(differ)
        return f(
            *jax.tree.unflatten(treedef, [next(rest) if _is_per_fold(n) else n for n in nodes])
        )

    axes = eqx.if_array(0)
    return eqx.filter_vmap(one, in_axes=axes, out_axes=axes, axis_size=folds)(differ)


def _combine(parts: Sequence[PyTree], name: str, axis: int = 0) -> PyTree:
    """Return one pytree for all folds, with `PerFold` where their arrays differ."""
    first, structure = named_leaves(parts[0], name), jax.tree.structure(parts[0])
    columns = [[leaf] for leaf in first.values()]
    for k, part in enumerate(parts[1:], start=1):
        leaves = named_leaves(part, name)
        if list(leaves) != list(first):
            odd = next((p for p in [*leaves, *first] if (p in leaves) != (p in first)), name)
            raise ValueError(
                f"fold {k} and fold 0 differ in structure: only one of them has {odd}."
            )
        if not same(jax.tree.structure(part), structure):
            raise ValueError(
                f"the {name} of fold {k} and of fold 0 differ in what is not an array: "
                f"{jax.tree.structure(part)} and {structure}."
            )
        for (path, old), new, column in zip(first.items(), leaves.values(), columns, strict=True):
            _check_leaf(path, k, old, new)
            column.append(new)
    shared = [_shared(column) for column in columns]
    return jax.tree.unflatten(
        structure,
        [
            column[0] if one else PerFold(jnp.stack(column, axis))
            for column, one in zip(columns, shared, strict=True)
        ],
    )


def _check_leaf(path: str, k: int, old: Any, new: Any) -> None:
    if not eqx.is_array(old) and not eqx.is_array(new):
        if not same(old, new):
            raise ValueError(
                f"{path} is another {type(new).__name__} in fold {k} than in fold 0, or closes over "
                "other values. Folds may differ in their arrays only: pass what differs (the fold's "
                "rows, its mask, its start) through batches, validation or init, define the functions "
                "outside of problem_of_fold, and give all folds the same constants."
            )
    elif describe(old) != describe(new):
        raise ValueError(
            f"{path} is {describe(new)} in fold {k}, {describe(old)} in fold 0. Folds run as one "
            "program and need equal shapes: keep all rows in each and give a mask of those to use, or "
            "leave out the rows that are over."
        )


def _shared(column: Sequence[Any]) -> bool:
    return not eqx.is_array(column[0]) or all(_equal(column[0], leaf) for leaf in column[1:])


def _equal(a: Array, b: Array) -> bool | Bool[Array, ""]:
    if a is b or isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(jnp.array_equal(a, b, equal_nan=bool(jnp.issubdtype(a.dtype, jnp.inexact))))
