"""Several devices, on JAX's own machinery: XLA splits a program by how its inputs lie on a mesh.

Two axes of a mesh have a meaning here, any other is for parameters that are split:

    data       examples. Each device has its share of every batch, and all of s and Z; the sums over
               examples are exchanged at every step.
    tangents   columns of Z in forward mode. Nothing is exchanged until the end.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .batches import Batches, FullBatch, Minibatches, Stacked
from .checks import as_arrays, check_count, check_mesh, describe, describe_tree
from .mean import Mean, PerFold, is_per_fold
from .problem import Problem

DATA, TANGENTS = "data", "tangents"


def mesh(**axes: int) -> Mesh:
    """Return a mesh of the devices of all processes, from its axes and their sizes.

    Without arguments, all devices are on the axis `data`. Axes are of JAX's type `Auto`.

    >>> import foretune as ft
    >>> dict(ft.mesh(data=1, tangents=1).shape)  # (data=4, tangents=2) on 8 devices
    {'data': 1, 'tangents': 1}
    """
    devices = jax.devices()
    axes = axes or {DATA: len(devices)}
    given = ", ".join(f"{name}={size}" for name, size in axes.items())
    for size in axes.values():
        check_count(size, f"mesh({given})")
    needed = math.prod(axes.values())
    if needed > len(devices) or (needed < len(devices) and jax.process_count() > 1):
        what = f"mesh({given}) has {needed} devices, but there are {len(devices)}"
        sizes = "the sizes must multiply to that number, or less where there is one process"
        raise ValueError(f"{what}: {sizes}.")
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices[:needed])


def shard(what: Any, mesh: Any, params: PyTree = None) -> Any:
    """Place a problem, or batches, on the devices of a mesh; then everything runs there.

    Args:
        what: a `Problem`; or for `RealTime`, a batch (a pytree of arrays with a leading axis of
            examples), `Minibatches` or `FullBatch`.
        mesh: the mesh, as `foretune.mesh` makes it.
        params: for a problem, how its initial parameters are split: a `PartitionSpec`, or a pytree of
            them that is a prefix of the parameters. By default every device has them all.

    Examples are split over the axis `data`, where the mesh has it: the rows of `FullBatch` and of
    `validation`, the second axis of stacked batches (T, examples, ...), and the indices of
    `Minibatches`. Of `Mean`, the folds are split instead. Every device has all else, but an array
    that lies on this mesh already stays as you placed it. Results change by rounding only.

    In a run of several processes, each gives the same arrays; where each has its own share of the
    examples, make them with `jax.make_array_from_process_local_data`.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, x: jnp.mean((state.params - x) ** 2),
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.ones(4), steps=1),
    ...     validation=jnp.ones(2))
    >>> problem = ft.shard(problem, ft.mesh(data=1))
    >>> problem.batches.data.sharding.is_equivalent_to(problem.validation.sharding, ndim=1)
    True
    >>> float(ft.Reverse()(problem, {"lr": jnp.array(0.25)}).grad["lr"])
    -2.0
    """
    check_mesh(mesh, "shard(what, mesh)")
    placement = Placement(mesh)
    if not isinstance(what, Problem):
        if params is not None:
            raise TypeError(f"shard(..., params=...) is for a problem; this is {describe(what)}.")
        if isinstance(what, Batches):
            return _batches(placement, what)
        return placement.examples(as_arrays(what), 0, "the batch")
    new = {name: placement.whole(getattr(what, name)) for name in ("dynamics", "objective")}
    new["init"] = placement.parameters(what.init, params)
    new["batches"] = _batches(placement, what.batches)
    v, folds = what.validation, isinstance(what, Mean)
    new["validation"] = placement.whole(v) if folds else placement.examples(v, 0, "validation")
    return _replaced(lambda p: [getattr(p, name) for name in new], what, list(new.values()))


def _batches(placement: "Placement", batches: Batches) -> Batches:
    if isinstance(batches, FullBatch):
        return FullBatch(placement.examples(batches.data, 0, "batches.data"), batches.steps)
    if isinstance(batches, Minibatches):
        indices = placement.examples(batches.indices, 1, "batches.indices")
        return placement.whole(batches.at(None)).at(indices)
    if isinstance(batches, Stacked):
        return Stacked(placement.examples(batches.xs, 1, "batches"))
    scanned = placement.whole(batches.xs, axis=1)  # of folds: the steps come first
    rest = placement.whole(_replaced(lambda b: b.xs, batches, None))
    return _replaced(lambda b: b.xs, rest, scanned)


def _replaced(where: Callable[[Any], PyTree], module: Any, new: PyTree) -> Any:
    return eqx.tree_at(where, module, new, is_leaf=lambda node: node is None)


class Placement:
    """How arrays are placed on a mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.size = mesh, mesh.shape.get(DATA, 1)

    def holds(self, leaf: object) -> bool:
        sharding = getattr(leaf, "sharding", None)
        return isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh

    def put(self, leaf: Array, *spec: str | None) -> Array:
        if self.holds(leaf):
            return leaf
        return jax.device_put(leaf, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def split(self, leaf: Array, axis: int, path: str) -> Array:
        if DATA not in self.mesh.shape or leaf.ndim <= axis or self.holds(leaf):
            return self.put(leaf)
        if leaf.shape[axis] % self.size:
            raise ValueError(
                f"{path} is {describe(leaf)}: axis {axis} cannot be split evenly over the {self.size} "
                "devices of the mesh's axis 'data'. Drop rows, or pad them with weight 0 in the loss."
            )
        return self.put(leaf, *[None] * axis, DATA)

    def examples(self, tree: PyTree, axis: int, name: str) -> PyTree:
        """Split the axis of examples over `data`; what has no such axis goes to every device."""

        def place(path, leaf):
            path = name + jax.tree_util.keystr(path)
            return self.split(leaf, axis, path) if eqx.is_array(leaf) else leaf

        return jax.tree_util.tree_map_with_path(place, tree)

    def whole(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Give every device all arrays; but folds, where arrays differ by fold, are split."""

        def place(node):
            if is_per_fold(node):
                return PerFold(self.split(node.array, axis, "the arrays of the folds"))
            return self.put(node) if eqx.is_array(node) else node

        return jax.tree.map(place, tree, is_leaf=is_per_fold)

    def parameters(self, init: PyTree, specs: PyTree) -> PyTree:
        """Split parameters as a prefix of specs says, if there is one."""
        if specs is None:
            return self.whole(init)

        def is_spec(node):
            return node is None or isinstance(node, PartitionSpec)

        given = jax.tree.leaves(specs, is_leaf=is_spec)
        if not all(map(is_spec, given)) or not any(map(eqx.is_array, jax.tree.leaves(init))):
            given, needed = describe_tree(specs, "params"), describe_tree(init, "init")
            what = "a `jax.sharding.PartitionSpec` for each initial parameter"
            raise TypeError(f"shard(..., params=...) takes {what}; got\n{given}\nfor\n{needed}")

        def place(spec, part):
            sharding = NamedSharding(self.mesh, spec or PartitionSpec())
            arrays, rest = eqx.partition(part, eqx.is_array)
            return eqx.combine(jax.device_put(arrays, sharding), rest)

        return jax.tree.map(place, specs, init, is_leaf=is_spec)
