"""Whose hypergradients hold over a step of tuning, and does `foretune.trust` know?

    python -m benchmarks.trust [--size small|large] [--only NAME ...] [--out FILE.json]

The truth is measured: each hyperparameter moves along random signs, and all of them along an engine's
own descent, by a scale s of their natural size (of log(x) under `Log`),

    measured = (f(+) - f(-)) / 2,    predicted = <gradient, u(+) - u(-)> / 2,

with u the variable that is searched. A difference counts where it exceeds twice the noise, the spread
of f over perturbations of s / 1000. For each engine and scale: how many signs are right, how many
sizes as well (up to a factor of 2), of how many directions that count. The cost is in plain
trainings. `large` is a transformer for a large GPU, judged by the trainings that `trust` itself makes.
Results are written after every problem.
"""

import functools
import time
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

import foretune as ft
from benchmarks import transformer
from benchmarks.harness import Table, command_line, record, timed
from benchmarks.responses import ALL, LARGE, Response
from foretune._constraints.base import (
    check_constraints,
    from_unconstrained,
    moved,
    scales,
    to_unconstrained,
)
from foretune._diagnostics.slopes import unconstrained
from foretune._problem.arguments import flatten
from foretune._problem.checks import named_leaves
from foretune._problem.problem import validated

SCALES = (0.01, 0.1, 0.3)
STEP = SCALES.index(0.1)  # of tuning
SIGNS, NOISE = 8, 4  # directions of each leaf, perturbations of each scale


class Direction(NamedTuple):
    """A change of a leaf, or along an engine's descent, in natural sizes."""

    leaf: str  # or "descent"
    engine: str | None
    change: Any


class Truth(NamedTuple):
    """What the response does along directions, and what engines say: scales x directions."""

    directions: list[Direction]
    measured: np.ndarray
    noise: np.ndarray
    predicted: dict[str, np.ndarray]  # by engine


@eqx.filter_jit
def trained(problem: Any, points: Any, chunk: int) -> Any:
    """Return the error at each point, `chunk` trainings side by side."""
    return lax.map(lambda hparams: problem.response(hparams)[0], points, batch_size=chunk)


def hypergradient(engine: Any, problem: Any, hparams: Any) -> tuple[Any, float]:
    """Return an engine's gradient, finite or not, and its seconds without compilation."""
    program = engine.lower(problem, hparams).compile()
    arrays, _ = validated(problem, hparams, smooth=engine.differentiates)
    (_, grad, *_), seconds = timed(lambda: program(flatten(engine)[0], arrays))
    return grad, seconds


def engines_of(response: Response) -> dict[str, Any]:
    m = sum(leaf.size for leaf in jax.tree.leaves(response.hparams))
    engines = {
        "Reverse": ft.Reverse(),
        "Truncated": ft.Truncated(response.problem.steps // 10),
        "Smoothed": ft.Smoothed(ft.Reverse(), 0.1, 4),
        "Evolution": ft.Evolution(0.1, max(8, min(2 * m, 24)), chunk=response.chunk),
    }
    return {name: engine.within(response.constraints) for name, engine in engines.items()}


def _signs(rng: np.random.Generator, leaf: Any) -> Any:
    return jnp.asarray(rng.choice([-1.0, 1.0], leaf.shape), leaf.dtype)


def directions_of(hparams: Any, slopes: dict[str, Any]) -> list[Direction]:
    """Return random signs of each leaf, and the descents of slopes in natural sizes, at most 1."""
    rng, names = np.random.default_rng(0), list(named_leaves(hparams, "hparams"))
    leaves, structure = jax.tree.flatten(hparams)
    directions = []
    for i, leaf in enumerate(leaves):
        for _ in range(min(leaf.size, SIGNS)):
            change = [jnp.zeros_like(other) for other in leaves]
            change[i] = _signs(rng, leaf)
            directions.append(Direction(names[i], None, structure.unflatten(change)))
    for name, slope in slopes.items():
        flat, unravel = ravel_pytree(jax.tree.map(jnp.nan_to_num, slope))
        descent = unravel(-flat / jnp.maximum(jnp.max(jnp.abs(flat)), 1e-30))
        directions.append(Direction("descent", name, descent))
    return directions


def measure(response: Response, grads: dict[str, Any]) -> Truth:
    """Train at both ends of every direction, and beside what engines' gradients predict."""
    hparams = response.hparams
    constraints = check_constraints(response.constraints, hparams)
    u = to_unconstrained(constraints, hparams)
    back = jax.vjp(lambda u: from_unconstrained(constraints, u), u)[1]
    searched = {name: back(grad)[0] for name, grad in grads.items()}
    slope = functools.partial(jax.tree.map, jnp.multiply, scales(constraints, u))
    directions = directions_of(hparams, {name: slope(g) for name, g in searched.items()})
    signed = [(sign * s, d.change) for s in SCALES for d in directions for sign in (1, -1)]
    changes = [jax.tree.map(lambda leaf, s=s: s * leaf, change) for s, change in signed]
    rng, n = np.random.default_rng(1), len(changes)
    for s in np.repeat(SCALES, NOISE):
        changes.append(jax.tree.map(lambda leaf, s=s: 1e-3 * float(s) * _signs(rng, leaf), hparams))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *changes)
    points = jax.vmap(lambda change: moved(constraints, hparams, change))(stacked)
    values = np.asarray(trained(response.problem, points, response.chunk or len(changes)), float)
    measured = (values[:n:2] - values[1:n:2]).reshape(len(SCALES), -1) / 2
    noise = np.std(values[n:].reshape(len(SCALES), NOISE), 1, ddof=1, keepdims=True) / 2**0.5
    noise = np.maximum.accumulate(noise)  # what a small perturbation does, a larger one does too
    U = jax.vmap(lambda h: ravel_pytree(to_unconstrained(constraints, h))[0])(points)

    def predicted(gradient):
        products = (U[:n:2] - U[1:n:2]) / 2 * ravel_pytree(gradient)[0]
        return np.asarray(products, float).sum(1).reshape(measured.shape)

    return Truth(directions, measured, noise, {k: predicted(g) for k, g in searched.items()})


def judged(truth: Truth, engine: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what counts for an engine, where its sign is right, and where its size is, too."""
    own = np.array([d.engine in (None, engine) for d in truth.directions])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = truth.predicted[engine] / truth.measured
    # A training that diverges measures nothing; a gradient that is not finite is wrong.
    counts = own & (np.abs(truth.measured) > 2 * truth.noise)
    return counts, ratio > 0, (ratio >= 0.5) & (ratio <= 2)


def agreement(truth: Truth, engine: str) -> dict[str, list[int]]:
    """Return, for each scale, how many directions count, and how many signs and sizes are right."""
    counts, signs, fits = judged(truth, engine)
    rows = {"count": counts, "sign": counts & signs, "size": counts & fits}
    return {name: row.sum(1).tolist() for name, row in rows.items()}


def verdicts(truth: Truth, engine: str) -> dict[str, str]:
    """Return what holds of an engine, leaf by leaf, over a step of tuning."""
    counts, signs, fits = (rows[STEP] for rows in judged(truth, engine))
    size = np.abs(truth.measured[STEP])

    def verdict(leaf):
        here = counts & np.array([d.leaf == leaf for d in truth.directions])
        here &= size > np.max(size[here], initial=0.0) / 10
        if not here.any():
            return "unclear"  # all is noise
        return "misleads" if not signs[here].all() else "trust" if fits[here].all() else "size"

    return {leaf: verdict(leaf) for leaf in dict.fromkeys(d.leaf for d in truth.directions)}


def examined(response: Response) -> dict[str, Any]:
    """Return the agreement and cost of each engine on one problem, and what `trust` reports."""
    problem, hparams, began = response.problem, response.hparams, time.perf_counter()
    said = ft.trust(
        problem, hparams, constraints=response.constraints, key=jax.random.key(1),
        verbose=False,
    )  # fmt: skip
    asked, one = time.perf_counter() - began, jax.tree.map(lambda leaf: leaf[None], hparams)
    engines = engines_of(response) | {"advised": said.engine.within(response.constraints)}
    trained(problem, one, 1)
    error, training = timed(lambda: trained(problem, one, 1))
    found = {name: hypergradient(engine, problem, hparams) for name, engine in engines.items()}
    truth = measure(response, {name: grad for name, (grad, _) in found.items()})
    engines_agree = {
        name: agreement(truth, name) | {"cost": seconds / training}
        for name, (_, seconds) in found.items()
    }
    leaves = verdicts(truth, "Reverse")
    return {
        "error": float(error[0]),
        "seconds of a training": training,
        "noise": truth.noise[:, 0].tolist(),
        "directions": [[d.leaf, d.engine] for d in truth.directions],
        "measured": truth.measured.tolist(),
        "engines": engines_agree,
        "predicted": {name: rows.tolist() for name, rows in truth.predicted.items()},
        "truth": leaves,
        "trust": {
            "verdicts": {leaf: str(said.verdicts[leaf]) for leaf in leaves},
            "engine": repr(said.engine),
            "trainings": said.trainings,
            "seconds": asked,
            "report": str(said),
        },
        "seconds": time.perf_counter() - began,
    }


def from_trust(response: Response, directions: int, radius: float | None) -> dict[str, Any]:
    """Return the agreement, where trainings are dear, on those that `trust` makes anyway."""
    began = time.perf_counter()
    engine = None if radius is None else ft.Evolution(radius, 32, chunk=response.chunk)
    said = ft.trust(
        response.problem, response.hparams, engine=engine, constraints=response.constraints,
        key=jax.random.key(1), directions=directions,
    )  # fmt: skip
    constraints = check_constraints(response.constraints, response.hparams)
    advised = said.around.slopes(unconstrained(constraints, response.hparams, said.grad))
    result: dict[str, Any] = {"engines": {}, "error": said.value, "report": str(said)}
    first = "Reverse" if engine is None else "Evolution"
    for name, slopes in {first: said.slopes, "advised": advised}.items():
        scales = sorted({slope.scale for slope in slopes})
        rows = [
            [s for s in slopes if s.scale == x and abs(s.measured) > 2 * s.noise] for x in scales
        ]
        result["engines"][name] = {
            "scales": scales,
            "count": list(map(len, rows)),
            "sign": [sum(s.measured * s.predicted > 0 for s in row) for row in rows],
            "size": [sum(0.5 <= s.predicted / s.measured <= 2 for s in row) for row in rows],
            "slopes": [slope._asdict() for slope in slopes],
        }
    seconds = time.perf_counter() - began
    return result | {"trainings": said.trainings, "seconds": seconds, "engine": repr(said.engine)}


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: error {result['error']:.4f}, {result['seconds']:.0f} s\n")
    table = Table("engine", "cost", *map(str, result.get("scales", SCALES)))
    for engine, row in result["engines"].items():
        cells = zip(row["count"], row["sign"], row["size"], strict=True)
        table.add(engine, row.get("cost", ""), *(f"{b} {c} of {a}" for a, b, c in cells))
    if said := result.get("trust", {}).get("verdicts"):
        table = Table("leaf", "measured", "`trust`")
        for leaf, truth in result["truth"].items():
            table.add(leaf, truth, said[leaf])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, or parts, of problems")
    parser.add_argument("--directions", type=int, default=3, help="large: of each leaf")
    parser.add_argument("--radius", type=float, help="large: `Evolution`, not `Reverse`")
    parser.add_argument("--batch", type=int, default=64, help="large: of the transformer")
    arguments = parser.parse_args()
    large, results, pairs = arguments.size == "large", {}, []
    transformer.LARGE["batch"] = arguments.batch
    print("cost in trainings; right signs and sizes of the differences that count, by scale")
    for name, make in (LARGE if large else ALL).items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of trainings that diverge
            if large:
                result = from_trust(make(), arguments.directions, arguments.radius)
            else:
                result = examined(make())
        results[name] = result
        show(name, result)
        record(arguments.out, results)
        if not large:
            said = result["trust"]["verdicts"]
            truths = result["truth"].items()
            pairs += [(said[leaf], truth) for leaf, truth in truths if truth != "unclear"]
        jax.clear_caches()
    if pairs:
        right, danger = sum(a == b for a, b in pairs), pairs.count(("trust", "misleads"))
        print(f"\ntrust agrees on {right} of {len(pairs)} leaves, and trusts {danger} that mislead")


if __name__ == "__main__":
    main()
