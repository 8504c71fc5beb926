"""Checks of single arguments, and the words in which they are reported."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, PyTree

NO_NUMBERS = "OUSmM"  # kinds of NumPy's arrays: objects, text, dates


def as_arrays(tree: PyTree, name: str = "the data") -> PyTree:
    """Put NumPy arrays on the device, once; drop weak types, which would compile a second time."""

    def convert(leaf):
        if isinstance(leaf, np.ndarray | np.generic):
            if leaf.dtype.kind in NO_NUMBERS or np.ma.is_masked(leaf):
                check_numbers(tree, name)
            with jax.ensure_compile_time_eval():  # known inside a trace too
                return jnp.asarray(leaf)
        if getattr(leaf, "weak_type", False):
            return jax.lax.convert_element_type(leaf, leaf.dtype)
        return leaf

    return jax.tree.map(convert, tree)


def as_data(tree: PyTree, name: str) -> PyTree:
    """Return the data as arrays, or raise where a list stands for one or none holds a number."""
    check_data(tree, name)
    arrays = as_arrays(tree, name)
    check_some_number(arrays, name)
    return arrays


def check_numbers(tree: PyTree, name: str) -> None:
    """Raise for a NumPy array of text, dates or objects, or with masked entries."""
    for path, leaf in named_leaves(tree, name).items():
        if np.ma.is_masked(leaf):
            raise ValueError(f"{path} has masked entries, which JAX would use: fill them first.")
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in NO_NUMBERS:
            what = f"{path} is {describe(leaf)}, which holds no numbers: encode it first"
            raise TypeError(f"{what}, by `np.unique(labels, return_inverse=True)` say.")


def describe(leaf: object) -> str:
    """Return `float32[5,3]` for an array, `a function` or the like for anything else."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    if leaf is None:
        return "None"
    simple = isinstance(leaf, int | float | complex | str | bytes)
    return f"the {type(leaf).__name__} {leaf!r:.60}" if simple else f"a {type(leaf).__name__}"


def describe_tree(tree: PyTree, name: str, most: int = 6) -> str:
    """Return the leaves of a tree by path, in a line each, the first few of them."""
    leaves = [f"  {path}: {describe(leaf)}" for path, leaf in named_leaves(tree, name).items()]
    rest = [f"  ... and {len(leaves) - most} more"] if len(leaves) > most else []
    return "\n".join(leaves[:most] + rest) or f"  {name}: {describe(tree)}, no leaf"


def shown(hparams: PyTree, most: int = 6, name: str = "hparams") -> str:
    """Return the hyperparameters' values, or their range, the first few of them."""
    parts = []
    for path, leaf in named_leaves(jax.device_get(hparams), name).items():
        if isinstance(leaf, np.ndarray | np.generic | float | int):
            low, high = float(np.min(leaf)), float(np.max(leaf))
            parts.append(f"{path} = {low:.4g}" + ("" if np.size(leaf) == 1 else f" to {high:.4g}"))
        else:  # of a result whose leaves were replaced, by their shapes say
            parts.append(f"{path} = {leaf!r:.60}")
    return ", ".join(parts[:most] + ["..."] * (len(parts) > most))


def named_leaves(
    tree: PyTree, name: str, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """Return the leaves by path, `hparams['lr']` and the like."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def check_signature(function: object, form: str, keywords: tuple[str, ...] = ()) -> None:
    """Raise unless `function` can be called as `form` says, `loss(params, hparams, batch)` say."""
    if not callable(function):
        raise TypeError(f"`{form}` must be a function, got {describe(function)}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin: nothing to see
    names = form[form.rindex("(") + 1 : form.rindex(")")].split(", ")
    try:
        signature.bind(*(n for n in names if "=" not in n), **dict.fromkeys(keywords))
    except TypeError as error:
        message = f"`{form}` is how it is called, but it takes `{signature}` ({error})."
        raise TypeError(message) from None


def check_objective(objective: object) -> Callable[..., Array] | dict[str, Callable[..., Array]]:
    """Return the objective, a function or a dict of functions, or raise."""
    form = "(state, hparams, validation)"
    if not isinstance(objective, Mapping):
        check_signature(objective, f"objective{form}")
        return cast(Callable[..., Array], objective)
    if not objective:
        raise TypeError("the objective must be a function, or a non-empty dict of functions.")
    for name, function in objective.items():
        check_signature(function, f"objective[{name!r}]{form}")
    return dict(objective)


def check_leading_axis(tree: PyTree, name: str, meaning: str = "the examples") -> int:
    """Return the length of the leading axis that all leaves share, or raise."""
    leaves = named_leaves(tree, name)
    if isinstance(tree, list) and tree and not any(eqx.is_array(element) for element in tree):
        stack = f"jax.tree.map(lambda *leaves: jnp.stack(leaves), *{name})"
        raise TypeError(f"{name} is a list of {len(tree)} batches. Stack them: `{stack}`.")
    if not leaves:
        raise ValueError(f"{name} holds no array; for none, give `FullBatch(None, steps=T)`.")
    for path, leaf in leaves.items():
        if not eqx.is_array(leaf) or leaf.ndim == 0:
            needs = f"it needs a leading axis ({meaning}). Give arrays, not lists of numbers."
            raise ValueError(f"{path} is {describe(leaf)}; {needs}")
    lengths = {leaf.shape[0] for leaf in leaves.values()}
    if len(lengths) > 1:
        listed = describe_tree(tree, name, most=len(leaves))
        raise ValueError(f"the leading axes ({meaning}) of {name} differ:\n{listed}")
    return lengths.pop()


def check_data(tree: PyTree, name: str) -> None:
    """Raise for a list of Python numbers where an array is meant: each would be a constant."""

    def numbers(node):
        if not isinstance(node, list):
            return False
        return bool(node) and all(isinstance(x, int | float | complex) or numbers(x) for x in node)

    for path, leaf in named_leaves(tree, name, is_leaf=numbers).items():
        if numbers(leaf):
            raise TypeError(f"{path} is a Python list of {len(leaf)} numbers: give an array.")


def check_count(count: object, given: str) -> int:
    """Return `count`, a positive integer that programs can count to, or raise."""
    if isinstance(count, int | np.integer) and not isinstance(count, bool) and 1 <= count < 2**31:
        return int(count)
    raise ValueError(f"{given}: it must be a whole number, from 1 to 2**31 - 1.")


def check_some_number(tree: PyTree, name: str) -> None:
    """Raise where there are arrays, and none of them holds a number."""
    arrays = {path: leaf for path, leaf in named_leaves(tree, name).items() if eqx.is_array(leaf)}
    if arrays and not any(leaf.size for leaf in arrays.values()):
        path, leaf = next(iter(arrays.items()))
        raise ValueError(f"{path} is {describe(leaf)}: it holds no number, and no other does.")


def check_flag(flag: object, given: str) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{given}={flag!r:.60}: give True or False.")


def check_key(key: object, given: str) -> None:
    try:
        jax.eval_shape(jax.random.fold_in, key, 0)
    except Exception as error:
        what = f"{given} must be one random key, `jax.random.key(0)` say"
        raise TypeError(f"{what}; got {describe(key)}.") from error


def check_outside_programs(name: str, *given: PyTree) -> None:
    """Raise where a driver is called inside `jax.jit` and the like."""
    # Inside `jit` every array is traced, a new one too; inside `vmap` and `grad` those given are.
    leaves = [jnp.zeros(()), *jax.tree.leaves(given)]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        loop = f"{name} is a loop in Python: call it outside of jax.jit, jax.vmap and jax.grad"
        raise TypeError(f"{loop}. Inside a program use an engine, or `RealTime.update`.")


def check_mesh(mesh: object, given: str, axis: str | None = None) -> None:
    """Raise unless `mesh` is a mesh that leaves placement to the compiler, with the axis `axis`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{given}: a mesh is `foretune.mesh(data=...)`, got {describe(mesh)}.")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        found = f"axes of the types {mesh.axis_types}; engines need `Auto`"
        raise ValueError(f"{given}: the mesh has {found}, as `foretune.mesh(...)` makes them.")
    if axis is not None and axis not in mesh.axis_names:
        found = f"the axes {mesh.axis_names}, but no {axis!r}"
        raise ValueError(f"{given}: the mesh has {found}. Give `foretune.mesh({axis}=...)`.")


def check_hparams(hparams: PyTree) -> PyTree[Float[Array, "..."]]:
    """Return the hyperparameters as arrays, or raise for a leaf that is not a float (array)."""
    _check_container(hparams, "hparams")
    hparams = as_arrays(hparams, "hparams")
    hparams = jax.tree.map(lambda x: jnp.asarray(x, float) if isinstance(x, float) else x, hparams)
    if not jax.tree.leaves(hparams):
        raise ValueError("there are no hyperparameters: hparams has no leaf.")
    for path, leaf in named_leaves(hparams, "hparams").items():
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            number = isinstance(leaf, int | float)
            remedy = f"Write `{float(leaf)!r}`" if number else "Convert it, or leave it out"
            raise TypeError(f"{path} is {describe(leaf)}; only floats have a gradient. {remedy}.")
        if leaf.size == 0:
            raise ValueError(f"{path} is {describe(leaf)}: it holds no number.")
    return hparams


def _check_container(tree: object, path: str) -> None:
    """Raise for names that cannot be put in order, and for a None in dicts, lists and tuples.

    To JAX a None is no leaf. In other containers, as `equinox.filter` makes them, it is meant.
    """
    if isinstance(tree, dict):
        try:
            sorted(tree)
        except TypeError:
            kinds = ", ".join(sorted({type(key).__name__ for key in tree}))
            raise TypeError(f"names in {path} have no order ({kinds}): give strings.") from None
        parts = {f"[{key!r}]": part for key, part in tree.items()}
    elif isinstance(tree, list | tuple):
        fields = getattr(tree, "_fields", None)  # of a NamedTuple
        parts = {f".{fields[i]}" if fields else f"[{i}]": part for i, part in enumerate(tree)}
    else:
        return
    for name, part in parts.items():
        if part is None:
            raise ValueError(f"{path}{name} is None: give a number, or leave it out.")
        _check_container(part, path + name)
