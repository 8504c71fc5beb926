"""What is checked before anything is compiled, and the words it is reported in.

The checks on shapes and structures trace the user's functions abstractly (no arithmetic, no
compilation), once per combination of structures and shapes.
"""

import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jaxtyping import Array, Float, PyTree

from ._arguments import Structure, flatten, unflatten


def as_arrays(tree: PyTree) -> PyTree:
    """Put NumPy arrays on the device, once; drop weak types, which would compile a second time."""

    def convert(leaf):
        if isinstance(leaf, np.ndarray | np.generic):
            return jnp.asarray(leaf)
        if getattr(leaf, "weak_type", False):
            return jax.lax.convert_element_type(leaf, leaf.dtype)
        return leaf

    return jax.tree.map(convert, tree)


def describe(leaf: Any) -> str:
    """Return `float32[5,3]` for an array, the type for anything else."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return f"the {type(leaf).__name__} {leaf!r:.60}"


def named_leaves(tree: PyTree, name: str) -> dict[str, Any]:
    """Return the leaves by path, `hparams['lr']` and the like."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def check_dynamics(dynamics: Any) -> None:
    """Raise unless `dynamics` has the two methods."""
    for method, arguments in (("init", "params, hparams"), ("step", "state, hparams, batch")):
        if not callable(getattr(dynamics, method, None)):
            raise TypeError(
                f"the dynamics {describe(dynamics)} has no method `{method}({arguments})`. A "
                "dynamics is `foretune.Training(...)` or any object with `init` and `step`."
            )


def check_objective(objective: Any) -> None:
    """Raise unless `objective` is a function or a dict of functions."""
    if isinstance(objective, Mapping):
        for name, function in objective.items():
            if not callable(function):
                raise TypeError(f"objective[{name!r}] must be a function, got {function!r:.100}.")
        if objective:
            return
    if not callable(objective):
        raise TypeError(
            "the objective must be a function (state, hparams, validation) -> scalar, or a "
            f"non-empty dict of them by hyperparameter name; got {describe(objective)}."
        )


def check_leading_axis(tree: PyTree, name: str, meaning: str = "the examples") -> int:
    """Return the length of the leading axis that all leaves share, or raise."""
    leaves = named_leaves(tree, name)
    if not leaves:
        raise ValueError(f"{name} holds no array.")
    for path, leaf in leaves.items():
        if not eqx.is_array(leaf) or leaf.ndim == 0:
            raise ValueError(
                f"{path} is {describe(leaf)}, but every leaf must be an array with a leading axis "
                f"({meaning})."
            )
    lengths = {path: leaf.shape[0] for path, leaf in leaves.items()}
    if len(set(lengths.values())) > 1:
        listed = "\n".join(f"  {path}: {describe(leaf)}" for path, leaf in leaves.items())
        raise ValueError(f"the leading axes ({meaning}) of {name} differ:\n{listed}")
    return next(iter(lengths.values()))


def check_steps(steps: Any, given: str) -> None:
    """Raise unless T is a positive integer."""
    if not isinstance(steps, int | np.integer) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"{given}: the number of steps T must be a whole number, 1 or more.")


def check_hparams(hparams: PyTree) -> PyTree[Float[Array, "..."]]:
    """Return the hyperparameters as arrays, or raise for a leaf that is not a float array."""
    hparams = as_arrays(hparams)
    if all(map(_is_hyperparameter, leaves := jax.tree.leaves(hparams))) and leaves:
        return hparams
    if not leaves:
        raise ValueError("there are no hyperparameters: hparams has no leaf.")
    for path, leaf in named_leaves(hparams, "hparams").items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"{path} is {describe(leaf)}; hyperparameters are float arrays. Write "
                f"`jnp.array({leaf!r:.30}, dtype=float)` if it is a real number to be tuned; keep "
                "anything else out of hparams."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{path} is {describe(leaf)}; only floating-point hyperparameters have a gradient. "
                "Convert it to float, or keep it out of hparams (close over it instead)."
            )
        if leaf.size == 0:
            raise ValueError(f"{path} is {describe(leaf)}: it holds no number.")
    return hparams


def _is_hyperparameter(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 0
    )


def validated(problem: Any, hparams: PyTree) -> tuple[list[Array], Structure]:
    """Return `(problem, hparams)`, flattened, after every check that needs no arithmetic."""
    arrays, structure = flatten((problem, check_hparams(hparams)))
    _check_shapes(structure, tuple((array.shape, array.dtype) for array in arrays))
    return arrays, structure


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


@functools.lru_cache(maxsize=256)
def _check_shapes(structure: Structure, shapes: tuple[tuple[Any, Any], ...]) -> None:
    problem, hparams = unflatten(structure, (jax.ShapeDtypeStruct(*shape) for shape in shapes))
    _check_names(problem, hparams)
    s_0 = eqx.filter_eval_shape(lambda p, h: p.start(h), problem, hparams)
    s_1 = eqx.filter_eval_shape(_first_step, problem, hparams)
    _check_same_state(s_0, s_1)
    for name, E in problem.objectives().items():
        value = eqx.filter_eval_shape(
            lambda p, s, h, E=E: E(s, h, p.validation), problem, s_0, hparams
        )
        _check_scalar(value, "objective" if name is None else f"objective[{name!r}]")
    _check_dependence(problem, hparams)


def _first_step(problem: Any, hparams: PyTree) -> PyTree:
    x_1 = jax.tree.map(lambda leaf: leaf[0], problem.batches.xs)
    return problem.dynamics.step(problem.start(hparams), hparams, problem.batches.batch(x_1))


def _check_names(problem: Any, hparams: PyTree) -> None:
    if not isinstance(problem.objective, dict):
        return
    if not isinstance(hparams, dict):
        raise TypeError(
            "a dict of objectives needs a dict of hyperparameters with the same top-level names; "
            f"hparams is a {type(hparams).__name__}."
        )
    unknown = sorted(set(problem.objective) - set(hparams), key=str)
    missing = sorted(set(hparams) - set(problem.objective), key=str)
    if unknown or missing:
        raise ValueError(
            f"the objectives are given for {sorted(problem.objective, key=str)}, the "
            f"hyperparameters are {sorted(hparams, key=str)}: "
            + "; ".join(
                [f"objective[{name!r}] names no hyperparameter" for name in unknown]
                + [f"hparams[{name!r}] has no objective" for name in missing]
            )
            + ". Give exactly one objective for each top-level hyperparameter."
        )


def _check_same_state(before: PyTree, after: PyTree) -> None:
    old, new = named_leaves(before, "state"), named_leaves(after, "state")
    for path in [*old, *(path for path in new if path not in old)]:
        was, now = old.get(path), new.get(path)
        if not _is_abstract(was) and not _is_abstract(now):
            continue
        if path not in old or path not in new:
            found, lacking = ("s_1", "s_0") if path in new else ("s_0", "s_1")
            raise ValueError(
                f"a step changes the structure of the state: {path} ({describe(old.get(path, now))}"
                f") is in {found} but not in {lacking}. `step` must return the structure that "
                "`init` returns."
            )
        if describe(was) != describe(now):
            hint = (
                "Return it from `init` as an array, `jnp.asarray(...)`."
                if not _is_abstract(was)
                else "`step` must keep every shape and dtype; cast or reshape inside it."
            )
            raise ValueError(
                f"a step changes {path} from {describe(was)} to {describe(now)}. {hint}"
            )


def _check_scalar(value: Any, name: str) -> None:
    if not _is_abstract(value) or value.shape != ():
        shown = {p: describe(v) for p, v in named_leaves(value, name).items()}
        raise ValueError(
            f"the {name} must return one scalar, it returned "
            + (", ".join(f"{path} = {leaf}" for path, leaf in shown.items()) or "nothing")
            + ". Reduce it, for instance with `jnp.mean`."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"the {name} must return a floating-point scalar, it returned {describe(value)}. A "
            "count of errors has no gradient: use a smooth loss."
        )


def _check_dependence(problem: Any, hparams: PyTree) -> None:
    """Raise for a hyperparameter that cannot influence its error: its gradient would be 0."""
    arrays, static = eqx.partition(problem, jax.tree.map(_is_abstract, problem))

    def errors(arrays, hparams):
        system = eqx.combine(arrays, static).system(hparams)
        return system.errors(system.run(hparams), hparams)

    def tangents(arrays, hparams, direction):
        return jax.jvp(lambda h: errors(arrays, h), (hparams,), (direction,))[1]

    # A dependence that has a derivative is one of the errors' tangents on the direction. A
    # custom_vjp function has no tangent: there, dependence of the errors themselves must do.
    try:
        jaxpr = jax.make_jaxpr(tangents)(arrays, hparams, hparams).jaxpr
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        jaxpr = jax.make_jaxpr(errors)(arrays, hparams).jaxpr

    rows, paths = problem.rows(), list(named_leaves(hparams, "hparams"))
    unused = []
    for path, owner, i in zip(paths, problem.owners(hparams), range(-len(paths), 0), strict=True):
        wanted = [k == rows[owner] for k in range(len(jaxpr.outvars))]
        _, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        if not used[i]:  # the direction (or the hyperparameters) are the last inputs
            unused.append(path)
    if unused:
        raise ValueError(
            f"the response does not depend on {', '.join(unused)}: the hypergradient there "
            "would be 0 whatever its value. Use it in the loss, the optimizer, the initial state "
            "or the objective (not only under `stop_gradient`, an integer cast or a comparison), "
            "or take it out of hparams."
        )
