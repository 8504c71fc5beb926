"""What is checked before anything is compiled, and the words it is reported in.

The checks on shapes and structures trace the user's functions abstractly (no arithmetic, no
compilation), once per combination of structures and shapes.
"""

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, PyTree

from .arguments import Structure, flatten, unflatten


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
    """Return `float32[5,3]` for an array, `a function` or the like for anything else."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    if leaf is None:
        return "None"
    simple = isinstance(leaf, int | float | complex | str | bytes)
    return f"the {type(leaf).__name__} {leaf!r:.60}" if simple else f"a {type(leaf).__name__}"


def describe_tree(tree: PyTree, name: str, most: int = 6) -> str:
    """Return the leaves of a tree by path, in a line each, the first few of them."""
    leaves = [f"  {path}: {describe(leaf)}" for path, leaf in named_leaves(tree, name).items()]
    rest = [f"  ... and {len(leaves) - most} more"] if len(leaves) > most else []
    return "\n".join(leaves[:most] + rest) or f"  {name}: {describe(tree)}, no leaf"


def named_leaves(tree: PyTree, name: str) -> dict[str, Any]:
    """Return the leaves by path, `hparams['lr']` and the like."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def check_signature(function: Any, form: str, keywords: tuple[str, ...] = ()) -> None:
    """Raise unless `function` can be called as `form` says, `loss(params, hparams, batch)` say."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin: nothing to see
    names = form[form.index("(") + 1 : form.index(")")].split(", ")
    positional = [name for name in names if "=" not in name]
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(
            f"`{form}` is how it is called, but it takes `{signature}` ({error})."
        ) from None


def check_dynamics(dynamics: Any) -> None:
    """Raise unless `dynamics` has the two methods."""
    if isinstance(dynamics, type):
        raise TypeError(f"the dynamics is a class; give an instance, `{dynamics.__name__}(...)`.")
    for form in ("init(params, hparams)", "step(state, hparams, batch)"):
        method = getattr(dynamics, form[:4], None)
        if not callable(method):
            raise TypeError(
                f"the dynamics is {describe(dynamics)}, which has no method `{form}`. A dynamics "
                "is `foretune.Training(...)` or any object with `init` and `step`."
            )
        check_signature(method, f"dynamics.{form}")


def check_objective(objective: Any) -> None:
    """Raise unless `objective` is a function or a dict of functions."""
    if isinstance(objective, Mapping):
        for name, function in objective.items():
            if not callable(function):
                raise TypeError(
                    f"objective[{name!r}] must be a function, got {describe(function)}."
                )
            check_signature(function, f"objective[{name!r}](state, hparams, validation)")
        if objective:
            return
    if not callable(objective):
        raise TypeError(
            "the objective must be a function (state, hparams, validation) -> scalar, or a "
            f"non-empty dict of them by hyperparameter name; got {describe(objective)}."
        )
    check_signature(objective, "objective(state, hparams, validation)")


def check_leading_axis(tree: PyTree, name: str, meaning: str = "the examples") -> int:
    """Return the length of the leading axis that all leaves share, or raise."""
    leaves = named_leaves(tree, name)
    if isinstance(tree, list) and tree and not any(eqx.is_array(element) for element in tree):
        raise TypeError(
            f"{name} is a list of {len(tree)} batches. Stack them, one entry per step on the leading "
            f"axis: `jax.tree.map(lambda *leaves: jnp.stack(leaves), *{name})`."
        )
    if not leaves:
        raise ValueError(
            f"{name} holds no array. Where the steps need no data, give `FullBatch(None, steps=T)`."
        )
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


def check_count(count: Any, given: str) -> None:
    """Raise unless `count` is a positive integer."""
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{given}: it must be a whole number, 1 or more.")


def check_mesh(mesh: Any, given: str, axis: str | None = None) -> None:
    """Raise unless `mesh` is a mesh that leaves placement to the compiler, with the axis `axis`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{given}: a mesh is `foretune.mesh(data=...)`, got {describe(mesh)}.")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"{given}: the mesh's axes {mesh.axis_names} are of the types {mesh.axis_types}; engines "
            "need `Auto`. Make it by `foretune.mesh(...)`, or give `jax.make_mesh` "
            "`axis_types=(jax.sharding.AxisType.Auto, ...)`."
        )
    if axis is not None and axis not in mesh.axis_names:
        raise ValueError(
            f"{given}: the mesh has the axes {mesh.axis_names}, but none of the name {axis!r}. Give "
            f"`foretune.mesh({axis}=...)`, the number of devices to split over."
        )


def check_hparams(hparams: PyTree) -> PyTree[Float[Array, "..."]]:
    """Return the hyperparameters as arrays, or raise for a leaf that is not a float array."""
    hparams = as_arrays(hparams)
    if all(map(_is_hyperparameter, leaves := jax.tree.leaves(hparams))) and leaves:
        return hparams
    if not leaves:
        raise ValueError("there are no hyperparameters: hparams has no leaf.")
    for path, leaf in named_leaves(hparams, "hparams").items():
        if not isinstance(leaf, jax.Array):
            number = isinstance(leaf, int | float)
            remedy = (
                f"Write `jnp.array({leaf!r}, dtype=float)`" if number else "Keep it out of hparams"
            )
            raise TypeError(
                f"{path} is {describe(leaf)}; hyperparameters are float arrays. {remedy}."
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
    if not hasattr(problem, "system"):
        raise TypeError(
            f"the first argument must be a `foretune.Problem`, got {describe(problem)}. Call an engine "
            "as `engine(problem, hparams)`."
        )
    arrays, structure = flatten((problem, check_hparams(hparams)))
    _check_shapes(structure, tuple((array.shape, array.dtype) for array in arrays))
    return arrays, structure


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


@functools.lru_cache(maxsize=256)
def _check_shapes(structure: Structure, shapes: tuple[tuple[Any, Any], ...]) -> None:
    problem, hparams = unflatten(structure, (jax.ShapeDtypeStruct(*shape) for shape in shapes))
    _check_names(problem, hparams)
    with _noting("the start of the dynamics, init(params, hparams)", params=problem.init):
        s_0 = eqx.filter_eval_shape(lambda p, h: p.start(h), problem, hparams)
    with _noting("step(state, hparams, batch) of the dynamics", state=s_0, hparams=hparams):
        s_1 = eqx.filter_eval_shape(_first_step, problem, hparams)
    _check_same_state(s_0, s_1)
    for name in problem.objectives():
        label = "objective" if name is None else f"objective[{name!r}]"
        with _noting(
            f"{label}(state, hparams, validation)", state=s_0, validation=problem.validation
        ):
            value = eqx.filter_eval_shape(
                lambda p, s, h, name=name: p.objectives()[name](s, h, p.validation),
                problem,
                s_0,
                hparams,
            )
        _check_scalar(value, label)
    _check_dependence(problem, hparams)


@contextlib.contextmanager
def _noting(what: str, **arguments: PyTree):
    """Add to an error from the user's code what was called, and on what."""
    try:
        yield
    except Exception as error:
        shown = "\n".join(describe_tree(tree, name) for name, tree in arguments.items())
        error.add_note(f"foretune: this happened in {what}, with\n{shown}")
        raise


def _first_step(problem: Any, hparams: PyTree) -> PyTree:
    x_1 = jax.tree.map(lambda leaf: leaf[0], problem.batches.xs)
    return problem.dynamics.step(problem.start(hparams), hparams, problem.batches.batch(x_1))


def _check_names(problem: Any, hparams: PyTree) -> None:
    if not isinstance(problem.objective, dict):
        return
    if not isinstance(hparams, dict):
        raise TypeError(
            "a dict of objectives needs a dict of hyperparameters with the same top-level names; "
            f"hparams is {describe(hparams)}."
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
                f"`init` returns; it returned\n{describe_tree(after, 'state')}"
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
        remedy = "Reduce it, for instance with `jnp.mean`."
        if value is None:
            remedy = "Is a `return` missing?"
        elif not _is_abstract(value):
            remedy = "Return one array of shape ()."
        raise ValueError(
            f"the {name} must return one scalar, it returned\n{describe_tree(value, name)}\n{remedy}"
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
        if not used[i] and path not in getattr(
            problem.dynamics, "carried", ()
        ):  # the direction (or the hyperparameters) are the last inputs
            unused.append(path)
    if unused:
        remedy = (
            "Use it in the loss, the optimizer, the initial state or the objective (not only under "
            "`stop_gradient`, an integer cast or a comparison), or take it out of hparams."
        )
        if len(unused) == len(paths):
            remedy = (
                "Does the objective depend on the trained state, and smoothly? An accuracy, a sign "
                "or an argmax has no derivative."
            )
        raise ValueError(
            f"the response does not depend on {', '.join(unused)}: the hypergradient there would "
            f"be 0 whatever its value. {remedy}"
        )
