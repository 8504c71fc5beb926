"""Predicted and measured changes of the error, over steps of the size that tuning takes.

Along a direction d of unit size, in the unconstrained variable u, and at a scale h,

    predicted  = grad_u f . (u+ - u-) / 2,    measured = (f(u+) - f(u-)) / 2,    u+- = P(u +- h c d)

with c the scale of each entry and P the projection.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, DTypeLike, Float, PyTree

from .._constraints.base import from_unconstrained, moved, scales, to_unconstrained
from .._engines.memory import free_bytes
from .._problem.arguments import filtered
from .._problem.checks import named_leaves
from .._problem.problem import Problem
from .._problem.system import make_system, owners, rows_of

TRUST, SIZE, MISLEADS = "trust", "size", "misleads"  # from good to bad
DESCENT = "descent"
JITTER, PAIRS = 0.1, 3  # of the scale; pairs of points by which noise is measured
FACTOR = 2.0  # by which a size may be off
DOUBT = 2.0  # standard deviations within which a change may be noise
MOST_BESIDE = 32  # trainings side by side
SMALL_ON_CPU = 1e4  # numbers of a state with which trainings side by side gain on a few cores


class Probe(NamedTuple):
    """A direction: of one leaf, or that of descent."""

    leaf: str
    row: int  # the number of the error that it is about
    change: PyTree  # in units of the entries' scales


class Slope(NamedTuple):
    """What the error does along a direction, over one scale."""

    leaf: str
    scale: float
    predicted: float
    measured: float
    noise: float  # standard deviation of the measured change

    @property
    def verdict(self) -> str:
        """Whether the predicted change has the right sign and, up to a factor of 2, size."""
        return self.judged(DOUBT)

    def judged(self, deviations: float) -> str:
        """Return the verdict where a change of this many standard deviations may be noise."""
        p, m, doubt = self.predicted, self.measured, deviations * self.noise
        if not (math.isfinite(m) and math.isfinite(p)):
            return MISLEADS
        if abs(p - m) <= doubt:
            return TRUST
        if abs(m) <= doubt or p * m <= 0:  # what was predicted did not happen, or the contrary did
            return MISLEADS
        return TRUST if abs(m) / FACTOR <= abs(p) <= FACTOR * abs(m) else SIZE


def random_probes(problem: Problem, hparams: PyTree, count: int, key: Array) -> list[Probe]:
    """Return directions of random signs in each leaf; one for a single number."""
    leaves, treedef = jax.tree.flatten(hparams)
    names, rows = list(named_leaves(hparams, "hparams")), rows_of(problem)
    probes = []
    for i, owner in enumerate(owners(problem, hparams)):
        shape, dtype = leaves[i].shape, leaves[i].dtype
        for j in range(min(count, leaves[i].size)):
            key_ij = jax.random.fold_in(jax.random.fold_in(key, i), j)
            change = [jnp.zeros_like(leaf) for leaf in leaves]
            sign = jax.random.rademacher(key_ij, shape, dtype)
            change[i] = sign if shape else jnp.ones_like(sign)
            probes.append(Probe(names[i], rows[owner], treedef.unflatten(change)))
    return probes


def descent_probes(
    problem: Problem, hparams: PyTree, constraints: PyTree, grad_u: PyTree
) -> list[Probe]:
    """Return the direction of steepest descent, and that within each leaf of several numbers."""
    c = scales(constraints, to_unconstrained(constraints, hparams))
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda g, c: -g * c, grad_u, c))
    names, rows = list(named_leaves(hparams, "hparams")), rows_of(problem)
    ways = []
    for i, owner in enumerate(owners(problem, hparams)):
        if len(leaves) > 1 and leaves[i].size > 1:
            alone = [leaf if i == j else jnp.zeros_like(leaf) for j, leaf in enumerate(leaves)]
            ways.append(Probe(names[i], rows[owner], alone))
    if None in rows:  # several errors have no common descent
        ways.append(Probe(DESCENT, rows[None], leaves))
    probes = []
    for way in ways:
        largest = max(float(jnp.max(jnp.abs(part))) for part in way.change)
        if 0 < largest < math.inf:
            unit = [part / jnp.asarray(largest, part.dtype) for part in way.change]
            probes.append(way._replace(change=treedef.unflatten(unit)))
    return probes


def unconstrained(constraints: PyTree, hparams: PyTree, grad: PyTree) -> PyTree:
    """Return a gradient as that of the unconstrained variable."""
    u = to_unconstrained(constraints, hparams)
    _, pull = jax.vjp(lambda u: from_unconstrained(constraints, u), u)
    return pull(jax.tree.map(lambda g, h: g.astype(h.dtype), grad, hparams))[0]


@filtered
def _points(constraints: PyTree, hparams: PyTree, changes: PyTree) -> tuple[PyTree, PyTree]:
    def pair(change):
        back = jax.tree.map(jnp.negative, change)
        ends = [moved(constraints, hparams, way) for way in (change, back)]
        high, low = (to_unconstrained(constraints, end) for end in ends)
        return tuple(ends), jax.tree.map(lambda a, b: (a - b) / 2, high, low)

    (high, low), way = jax.vmap(pair)(changes)
    return jax.tree.map(lambda a, b: jnp.stack([a, b]), high, low), way


def points_of(
    constraints: PyTree, hparams: PyTree, probes: list[Probe], scales: Iterable[float]
) -> tuple[PyTree[Float[Array, "2 n ..."]], PyTree[Float[Array, "n ..."]]]:
    """Return hyperparameters on both sides, for each probe and scale, and half of the way between.

    The way is that of the unconstrained variable. Raises where a hyperparameter cannot be moved.
    """
    changes = [optax.tree.scale(float(s), probe.change) for probe in probes for s in scales]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *changes)
    points, half = _points(constraints, hparams, stacked)
    ways = [np.asarray(way).reshape(len(changes), -1) for way in jax.tree.leaves(half)]
    still = ~np.any([way.any(1) for way in ways], 0)
    if still.any():
        leaf = probes[int(still.argmax()) * len(probes) // len(changes)].leaf
        why = "its constraint leaves no room, or the scale is below its digits"
        fixed = "To hold it fixed, leave it out of the hyperparameters"
        raise ValueError(f"{leaf} cannot be moved: {why}. {fixed}.")
    return points, half


def side_by_side(problem: Problem, hparams: PyTree) -> int:
    """Return how many trainings fit side by side; on a CPU one, unless it is small."""
    if jax.default_backend() == "cpu":
        state = eqx.filter_eval_shape(problem.start, hparams)
        numbers = sum(leaf.size for leaf in jax.tree.leaves(state) if hasattr(leaf, "size"))
        return 8 if numbers < SMALL_ON_CPU else 1
    single = jax.tree.map(lambda leaf: leaf[None], hparams)
    lowered = errors_at.lower(problem, single)  # pyright: ignore[reportFunctionMemberAccess]
    held = getattr(lowered.compile().memory_analysis(), "temp_size_in_bytes", 0)
    return max(1, min(MOST_BESIDE, int(0.5 * free_bytes() / max(held, 1))))


@filtered
def errors_at(problem: Problem, points: PyTree) -> Float[Array, "n K"]:
    """Return the errors at points that are stacked on a leading axis."""

    def at(hparams):
        system = make_system(problem, hparams)
        return jnp.stack(system.errors(system.run(hparams), hparams))

    if len(jax.tree.leaves(points)[0]) == 1:  # a training of one, without a batch axis
        return at(jax.tree.map(lambda leaf: leaf[0], points))[None]
    return jax.vmap(at)(points)


def noise_of(
    middle: Float[np.ndarray, " K"], pairs: Float[np.ndarray, "2 n K"], dtype: DTypeLike
) -> Float[np.ndarray, " K"]:
    """Return the standard deviation of a measured change, half the difference of two errors.

    It is taken from what is even in a change, (f+ + f-) / 2 - f: of a smooth response next to nothing,
    of noise with deviation d its square has the mean 1.5 d^2. What is not finite is left out.
    """
    even = pairs.mean(0) - middle
    even = even[np.isfinite(even).all(1)]
    if not len(even):
        return np.full_like(middle, np.inf)
    rounding = float(jnp.finfo(dtype).eps) * np.abs(middle)
    return np.maximum(np.sqrt(np.mean(even**2, 0) / 1.5), rounding) / math.sqrt(2)


class Measured(NamedTuple):
    """The errors on both sides of the middle, for each probe and scale."""

    probes: list[Probe]
    scales: list[float]
    half: PyTree  # of the way between both sides, in the unconstrained variable
    values: Float[np.ndarray, "2 n K"]
    noise: Float[np.ndarray, " K"]

    def slopes(self, grad_u: PyTree) -> list[Slope]:
        """Return what a gradient of the unconstrained variable predicts, beside these."""
        flat = [np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grad_u)]
        ways = [np.asarray(way, np.float64) for way in jax.tree.leaves(self.half)]
        products = [way.reshape(len(way), -1) @ g for way, g in zip(ways, flat, strict=True)]
        predicted = np.sum(products, 0)
        places = ((probe, scale) for probe in self.probes for scale in self.scales)
        rows = []
        for i, (probe, scale) in enumerate(places):
            high, low = self.values[:, i, probe.row]
            numbers = predicted[i], (high - low) / 2, self.noise[probe.row]
            rows.append(Slope(probe.leaf, scale, *map(float, numbers)))
        return rows


def judged(slopes: list[Slope], scale: float) -> str:
    """Return the verdict on directions of one leaf over one scale: the worst of those that matter.

    A direction along which ten times less happens than along another does not: its sign is an accident.
    Below `scale`, where one of many looks wrong by chance, the doubt is twice as large.
    """
    if not all(math.isfinite(s.measured) and math.isfinite(s.predicted) for s in slopes):
        return MISLEADS
    largest = max(abs(slope.measured) for slope in slopes)
    counts = [s for s in slopes if max(abs(s.measured), abs(s.predicted) / FACTOR) >= largest / 10]
    doubts = (DOUBT if s.scale >= scale * (1 - 1e-6) else 2 * DOUBT for s in counts)
    return worst(s.judged(doubt) for s, doubt in zip(counts, doubts, strict=True))


def worst(verdicts: Iterable[str]) -> str:
    return max(verdicts, key=[TRUST, SIZE, MISLEADS].index, default=TRUST)


@dataclasses.dataclass
class Study:
    """What the error of a problem does around some hyperparameters."""

    problem: Problem
    hparams: PyTree
    constraints: PyTree
    scale: float
    probes: list[Probe]  # of random signs
    key: Array
    trainings: int = 0  # run so far

    @functools.cached_property
    def beside(self) -> int:
        """How many trainings run side by side."""
        return side_by_side(self.problem, self.hparams)

    def errors(self, problem: Problem, points: PyTree) -> Float[np.ndarray, "n K"]:
        """Return the errors at points that are stacked on a leading axis."""
        n = len(jax.tree.leaves(points)[0])
        chunk, values = min(n, self.beside), []
        for i in range(0, n, chunk):
            rows = np.minimum(np.arange(i, i + chunk), n - 1)  # the last chunk is filled up
            part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], points)
            values.append(np.asarray(errors_at(problem, part), np.float64)[: n - i])
        self.trainings += n
        return np.concatenate(values)

    def here(self, problem: Problem) -> Float[np.ndarray, " K"]:
        """Return the errors of this problem, or another, at the hyperparameters themselves."""
        return self.errors(problem, jax.tree.map(lambda x: x[None], self.hparams))[0]

    def measured(
        self, probes: list[Probe], scales: list[float], noise: Float[np.ndarray, " K"]
    ) -> Measured:
        """Return what the error does along some directions."""
        points, half = points_of(self.constraints, self.hparams, probes, scales)
        both = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), points)
        values = self.errors(self.problem, both).reshape(2, len(probes) * len(scales), -1)
        return Measured(probes, scales, half, values, noise)

    def around(self, scales: list[float]) -> Measured:
        """Return what the error does along the random directions, and its noise."""
        middle = self.here(self.problem)
        none = np.zeros_like(middle)
        keys = jax.random.split(jax.random.fold_in(self.key, 3), PAIRS)
        signs = [optax.tree.random_like(key, self.hparams, jax.random.rademacher) for key in keys]
        near = self.measured([Probe("", 0, s) for s in signs], [JITTER * self.scale], none)
        measured = self.measured(self.probes, scales, none)
        nearest = measured.values[:, :: len(scales)]  # as near as those
        pairs = np.concatenate([near.values, nearest], 1)
        noise = noise_of(middle, pairs, jax.tree.leaves(self.hparams)[0].dtype)
        return measured._replace(noise=noise)

    def slopes(self, grad: PyTree, around: Measured, scales: list[float]) -> list[Slope]:
        """Return what a gradient predicts, and what happens: around, and in its own descents."""
        grad_u = unconstrained(self.constraints, self.hparams, grad)
        found = [slope for slope in around.slopes(grad_u) if slope.scale in scales]
        probes = descent_probes(self.problem, self.hparams, self.constraints, grad_u)
        if probes:
            found += self.measured(probes, scales, around.noise).slopes(grad_u)
        return found
