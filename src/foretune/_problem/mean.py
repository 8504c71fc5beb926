"""Mean problems: one lambda, several inner problems, the mean of their errors.

    f(lambda) = 1/k sum_i E_i(s_T^i(lambda), lambda)

The k inner problems (folds of the same examples, draws of the same training) run side by side as one
dynamics whose state is the stack of theirs. What is the same in all, as the examples, is stored once.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, PyTree

from .arguments import unflatten
from .batches import Batches, FullBatch, Minibatches
from .checks import check_count, check_signature, describe, named_leaves
from .definition import Definition
from .draws import Draw, traced
from .dynamics import Wrapper
from .equality import same
from .jaxprs import inputs_of
from .problem import Problem

OF_DRAWS = "The mean over n draws is `Mean.of_draws(draw, n)`."


class Mean(Problem):
    """The mean response of several problems under the same hyperparameters.

    Args:
        problems: a list of problems that are the same but for the numbers in their arrays: same
            functions, shapes and number of steps. Folds of unequal size are made equal by a mask.

    It is a problem, whose state is the stack of the inner states on a leading axis. An array that all
    problems share lies on the device once. `Mean.of_draws(draw, n)` is the mean over random draws.

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
    >>> def problem_of(k):
    ...     return ft.Problem(
    ...         ft.Training(loss, optax.sgd(0.1)), error, init=jnp.array(0.0),
    ...         batches=ft.FullBatch((x, y, fold != k), steps=50), validation=(x, y, fold == k))
    >>> problem = ft.Mean([problem_of(k) for k in range(3)])
    >>> value, grad, state = ft.Reverse()(problem, {"decay": jnp.array(0.5)})
    >>> state.params.shape
    (3,)
    """

    count: int = eqx.field(static=True)

    def __init__(self, problems: object, *n: object):
        if n:
            raise TypeError(f"Mean takes a list of problems alone. {OF_DRAWS}")
        folds = problems if isinstance(problems, Folds) else _folds(_checked(problems))
        self.count, objective = folds.count, folds.objective
        if isinstance(objective, dict):
            mean = {name: MeanObjective(f, self.count) for name, f in objective.items()}
        else:
            mean = MeanObjective(objective, self.count)
        rest = folds.init, folds.batches, folds.validation
        dynamics = MeanDynamics(folds.dynamics, self.count)
        super().__init__(dynamics, mean, *rest, trajectory=folds.trajectory)

    @staticmethod
    def of_draws(draw: Any, n: int) -> "MeanDraw":
        """Return the draw of the mean over n draws, each with a key of its own.

        >>> import foretune as ft, jax, jax.numpy as jnp, optax
        >>> training = ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"]))
        >>> def draw(key):
        ...     return ft.Problem(
        ...         training, lambda state, h, x: (state.params - x) ** 2, validation=jnp.array(0.0),
        ...         init=jax.random.normal(key), batches=ft.FullBatch(jnp.array(0.0), steps=2))
        >>> mean = ft.Mean.of_draws(draw, 4)
        >>> hparams, key = {"lr": jnp.array(0.1)}, jax.random.key(0)
        >>> ft.Reverse()(mean, hparams, key=key).state.params.shape
        (4,)
        """
        if isinstance(draw, Definition) or not callable(draw):
            raise TypeError(f"Mean.of_draws takes a function draw(key), got {describe(draw)}.")
        check_signature(draw, "draw(key)")
        return MeanDraw(cast(Draw, draw), check_count(n, f"Mean.of_draws(n={n!r})"))

    def start(self, hparams: PyTree) -> PyTree:
        """Return the stack of the s_0; a start that is a function may hold arrays of each problem."""
        if not self.starts_from_function:
            return super().start(hparams)
        parts = self.dynamics.dynamics, self.init, hparams
        return _each(lambda d, f, h: d.init(f(h), h), self.count, *parts)

    def values(self, state: PyTree, hparams: PyTree) -> PyTree[Float[Array, " count"]]:
        """Return the error of each problem at a final state; their mean is the value."""
        means = cast(dict[str | None, MeanObjective], self.objectives)
        values = {name: f.each(state, hparams, self.validation) for name, f in means.items()}
        return values.get(None, values)

    def replace(self, **changes: object) -> Problem:
        """Raise: the parts of the problems are changed before their mean is taken."""
        raise TypeError(
            f"a Mean has no {', '.join(changes) or 'arguments'} of its own: change the problems, "
            "`Mean([problem.replace(...) for problem in problems])`."
        )


class MeanDraw(eqx.Module):
    """A draw whose problem is the mean over n draws of another."""

    draw: Draw = eqx.field(static=True)
    n: int = eqx.field(static=True)

    def __call__(self, key: Array) -> Mean:
        closed, structure = traced(self.draw, key)  # once, and then side by side
        (one,) = _checked([unflatten(structure, closed.out_avals)])
        jaxpr, n = closed.jaxpr, len(closed.out_avals)
        axes = [0 if inputs_of(jaxpr, i)[0] else None for i in range(n)]
        draws = jax.vmap(jaxpr_as_fun(closed), out_axes=axes)(jax.random.split(key, self.n))
        parts = zip(draws, axes, strict=True)
        arrays = [jnp.asarray(x) if axis is None else PerFold(x) for x, axis in parts]
        each = unflatten(structure, arrays)
        batches = MeanBatches(*_split(each.batches), one.steps)
        start = each.dynamics, each.objective, each.init
        return Mean(Folds(*start, batches, each.validation, one.trajectory, self.n))


class PerFold(eqx.Module):
    """An array that differs between the problems, which are its leading axis."""

    array: Array


class MeanDynamics(Wrapper):
    """The inner dynamics side by side: the state is the stack of their states."""

    count: int = eqx.field(static=True)

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        return _each(lambda d, p, h: d.init(p, h), self.count, self.dynamics, params, hparams)

    def step(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        """Return the stack of the s_t. The batch is the source and its entry, see `MeanBatches`."""
        return self._call("step", state, hparams, batch)

    def gradient(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        return self._call("gradient", state, hparams, batch)

    def _call(self, method: str, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        def one(dynamics, s, h, batch):
            source, x = batch
            batch = source.whole() if x is None else source.batch(x)  # the same for a full batch
            return getattr(dynamics, method)(s, h, batch)

        return _each(one, self.count, self.dynamics, per_fold(state), hparams, batch)


class MeanObjective(eqx.Module):
    """The mean of an objective over the problems; those of one objective share its gradient."""

    mean_of: Callable[..., Array]
    count: int = eqx.field(static=True)

    def each(self, state: PyTree, hparams: PyTree, validation: PyTree) -> Float[Array, " count"]:
        def one(objective, s, h, v):
            return jnp.asarray(objective(s, h, v))

        return _each(one, self.count, self.mean_of, per_fold(state), hparams, validation)

    def __call__(self, state: PyTree, hparams: PyTree, validation: PyTree) -> Float[Array, "..."]:
        return jnp.mean(self.each(state, hparams, validation), axis=0)


class MeanBatches(Batches):
    """The batches of all problems. A step's batch is made inside each, so shared data stays single."""

    source: Batches  # the batches without what the loop scans over
    xs: PyTree  # x_1 .. x_T, the steps as the leading axis, then the problems where they differ
    steps: int = eqx.field(static=True)

    def __init__(self, source: Batches, xs: PyTree, steps: int):
        self.source, self.xs, self.steps = source, xs, steps

    def batch(self, x: PyTree) -> PyTree:
        """Return what `MeanDynamics.step` takes: the source and the entry."""
        return self.source, x

    def whole(self) -> PyTree:
        """Return the source and no entry, for the whole data of each problem."""
        return self.source, None


class Folds(Definition):
    """The parts of all problems, with `PerFold` where their arrays differ."""

    count: int = eqx.field(static=True)


def _folds(problems: Sequence[Definition]) -> Folds:
    first, batches = problems[0], [p.batches for p in problems]
    kinds = [f"{type(b).__name__} of {b.steps} steps" for b in batches]
    if len(set(kinds)) > 1:
        raise ValueError(f"the batches differ in kind or number of steps: {', '.join(kinds)}.")
    names = "dynamics", "objective", "init", "batches", "validation"
    parts = {name: _combine([getattr(p, name) for p in problems], name) for name in names}
    parts["batches"] = MeanBatches(*_split(parts["batches"]), first.steps)
    return Folds(**parts, trajectory=first.trajectory, count=len(problems))


def _split(batches: Batches) -> tuple[Batches, PyTree]:
    """Return batches without what the loop scans over, and that, the steps as its leading axis."""
    if isinstance(batches, FullBatch):
        return batches, None
    scanned = "indices" if isinstance(batches, Minibatches) else "xs"
    xs = jax.tree.map(
        lambda leaf: PerFold(jnp.moveaxis(leaf.array, 1, 0)) if is_per_fold(leaf) else leaf,
        getattr(batches, scanned),
        is_leaf=is_per_fold,
    )
    return eqx.tree_at(lambda b: getattr(b, scanned), batches, None), xs


def per_fold(tree: PyTree) -> PyTree:
    """Return a tree whose arrays have an entry for each problem."""
    return jax.tree.map(lambda leaf: PerFold(leaf) if eqx.is_array(leaf) else leaf, tree)


def is_per_fold(node: object) -> bool:
    return isinstance(node, PerFold)


def _each(f: Callable[..., PyTree], count: int, *arguments: PyTree) -> PyTree:
    """Return f on each problem, stacked; what is not `PerFold` is the same for all."""
    nodes, treedef = jax.tree.flatten(arguments, is_leaf=is_per_fold)
    differ = {i: node.array for i, node in enumerate(nodes) if is_per_fold(node)}

    def one(differ):
        each = [differ.get(i, node) for i, node in enumerate(nodes)]
        return f(*jax.tree.unflatten(treedef, each))

    axes = eqx.if_array(0)
    return eqx.filter_vmap(one, in_axes=axes, out_axes=axes, axis_size=count)(differ)


def _checked(problems: object) -> list[Definition]:
    more = f" {OF_DRAWS}" if callable(problems) else ""
    if not isinstance(problems, Sequence) or not problems:
        got = "an empty one" if isinstance(problems, Sequence) else describe(problems)
        example = "`Mean([problem_of(k) for k in range(5)])`"
        raise TypeError(f"Mean takes a list of problems, {example}; got {got}.{more}")
    for k, problem in enumerate(problems):
        if not isinstance(problem, Definition) or isinstance(problem, Mean):
            more = f" {OF_DRAWS}" if callable(problem) else ""
            more = " Give all their problems in one list." if isinstance(problem, Mean) else more
            raise TypeError(f"Mean takes problems; fold {k} is {describe(problem)}.{more}")
        if problem.trajectory != problems[0].trajectory:
            raise ValueError(f"trajectory is {problem.trajectory} in fold {k}, but not in fold 0.")
    return list(problems)


def _combine(parts: Sequence[PyTree], name: str) -> PyTree:
    """Return one pytree for all problems, with `PerFold` where their arrays differ."""
    first, structure = named_leaves(parts[0], name), jax.tree.structure(parts[0])
    columns = [[leaf] for leaf in first.values()]
    for k, part in enumerate(parts[1:], start=1):
        leaves = named_leaves(part, name)
        if list(leaves) != list(first):
            odd = next((p for p in [*leaves, *first] if (p in leaves) != (p in first)), name)
            raise ValueError(f"folds {k} and 0 differ in structure: only one of them has {odd}.")
        if not same(jax.tree.structure(part), structure):
            raise ValueError(f"{name}: fold {k} and fold 0 differ in what is not an array.")
        for (path, old), new, column in zip(first.items(), leaves.values(), columns, strict=True):
            _check_leaf(path, k, old, new)
            column.append(new)
    merged = [
        c[0] if all(same(c[0], leaf) for leaf in c[1:]) else PerFold(jnp.stack(c)) for c in columns
    ]
    return jax.tree.unflatten(structure, merged)


def _check_leaf(path: str, k: int, old: object, new: object) -> None:
    if not eqx.is_array(old) and not eqx.is_array(new):
        if not same(old, new):
            raise ValueError(
                f"{path} is another {type(new).__name__} in fold {k} than in fold 0, or closes over "
                "other values. Folds may differ in arrays only: pass what differs through batches, "
                "validation or init, and define the functions outside."
            )
    elif describe(old) != describe(new):
        differ = f"{path} is {describe(new)} in fold {k}, {describe(old)} in fold 0"
        raise ValueError(f"{differ}. Folds need equal shapes: all rows, with a mask of those used.")
