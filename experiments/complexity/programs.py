"""The programs of the experiment on time and memory, and how they are measured.

The hyperparameters are, as in the paper, the learning rate, the momentum and m - 2 weights in the
training error, here each of a group of the examples:

    (1/B) sum_i lambda_{g(i)} loss_i,      g(i) = i mod (m - 2).

Time: the median of a few rounds in which the programs take turns, without compilation; in plain
trainings, the median of the ratios within a round. Memory: what the compiler plans for a program's
temporary arrays and results; the data and the first weights, the same for all, are left out.
On a GPU the allocator's peak is read as well. It never falls within a process, so it is known only for
programs that raised it: points go from small to large, and so do the programs of a point.
"""

import itertools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from foretune import Forward, Minibatches, Problem, Reverse, Training
from foretune._engines.base import AbstractEngine
from foretune._engines.memory import free_bytes, show_bytes
from foretune._problem.problem import _response, validated

EXAMPLES = 5000
VALIDATION = 500
TRAINING = "training"
ENGINES: dict[str, AbstractEngine] = {
    "Forward()": Forward(),
    "Forward(chunk=1)": Forward(chunk=1),
    "Reverse()": Reverse(),
    'Reverse(store="segments")': Reverse(store="segments"),
    "Reverse(store=10)": Reverse(store=10),
}
"""What is measured, by the call that a user writes."""
Records = dict[str, dict[str, Any]]
"""What is known of each program, by its name."""


class Point(NamedTuple):
    """Where all programs are measured."""

    network: tuple[int, ...]
    hyperparameters: int
    steps: int

    @property
    def shape(self) -> str:
        """The network as a user writes it."""
        return "-".join(map(str, self.network))

    @property
    def weights(self) -> int:
        """How many weights and biases the network has."""
        return sum((a + 1) * b for a, b in itertools.pairwise(self.network))

    def __str__(self) -> str:
        return (
            f"{self.weights:,} weights, {self.hyperparameters:,} hyperparameters, "
            f"{self.steps:,} step{'s' if self.steps > 1 else ''}"
        )


class Program(NamedTuple):
    """A compiled program with what it is called on."""

    compiled: Any
    arguments: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """The memory of its temporary arrays and results."""
        memory = self.compiled.memory_analysis()
        return int(
            memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        )

    def run(self) -> Any:
        """Return its results, when they are there."""
        return jax.block_until_ready(self.compiled(*self.arguments))


def make_data(network: tuple[int, ...], seed: int) -> tuple[Array, Array, Array]:
    """Return random inputs of the network's shape, labels, and the examples' numbers."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((EXAMPLES + VALIDATION, network[0]), np.float32)
    y = random.integers(0, network[-1], len(x), np.int32)
    return jnp.asarray(x), jnp.asarray(y), jnp.arange(len(x), dtype=jnp.int32)


def losses(params: PyTree, x: Array, y: Array) -> Array:
    """Return the cross-entropy of each row.

    Weights are out x in: fewer of their tangents are then transposed between the products.
    """
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"].T + layer["b"])
    logits = x @ params[-1]["w"].T + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def loss(params: PyTree, hparams: PyTree, batch: tuple[Array, Array, Array]) -> Array:
    """Return the training error, with a weight for each group of examples where there are any."""
    x, y, i = batch
    each = losses(params, x, y)
    weight = hparams.get("weight")
    return jnp.mean(each if weight is None else weight[i % weight.size] * each)


def error(state: Any, hparams: PyTree, batch: tuple[Array, Array, Array]) -> Array:
    """Return the validation error."""
    x, y, _ = batch
    return jnp.mean(losses(state.params, x, y))


DYNAMICS = Training(loss, lambda h: optax.sgd(h["lr"], h["momentum"]))


def make_problem(point: Point, batch: int, seed: int, data: Any) -> tuple[Problem, PyTree]:
    """Return a point's problem and its m hyperparameters."""
    random = np.random.default_rng(seed)

    def layer(a: int, b: int) -> dict[str, Array]:
        w = (2 / a) ** 0.5 * random.standard_normal((b, a))
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(b)}

    problem = Problem(
        dynamics=DYNAMICS,
        objective=error,
        init=[layer(a, b) for a, b in itertools.pairwise(point.network)],
        batches=Minibatches(data, random.integers(0, EXAMPLES, (point.steps, batch), np.int32)),
        validation=tuple(array[EXAMPLES:] for array in data),
    )
    hparams = {"lr": jnp.array(0.01), "momentum": jnp.array(0.5)}
    if point.hyperparameters > 2:
        hparams["weight"] = jnp.ones(point.hyperparameters - 2)
    return problem, hparams


def lowered(engine: AbstractEngine | None, problem: Problem, hparams: PyTree) -> Any:
    """Return the program of an engine's call, or of plain training."""
    if engine is not None:
        return engine.lower(problem, hparams)
    arrays, structure = validated(problem, hparams)
    return _response.lower(structure, arrays)


def engines_of(point: Point, settings: Any) -> dict[str, AbstractEngine]:
    """Return the engines that are measured at a point: forward mode not beyond `settings.forward`."""
    few = point.hyperparameters <= settings.forward
    return {n: e for n, e in ENGINES.items() if few or not isinstance(e, Forward)}


def measure_point(point: Point, settings: Any, data: Any) -> list[dict[str, Any]]:
    """Return a record for each program: seconds, plain trainings, bytes, or why it was skipped."""
    problem, hparams = make_problem(point, settings.batch, settings.seed, data)
    engines = engines_of(point, settings)
    at = {"network": point.shape, "weights": point.weights}
    at |= {"hyperparameters": point.hyperparameters, "steps": point.steps}
    records: Records = {name: {"series": name, **at} for name in (TRAINING, *engines)}
    programs: dict[str, Program] = {}
    arrays, _ = validated(problem, hparams)
    for name in records:
        try:
            compiled = lowered(engines.get(name), problem, hparams).compile()
            own = () if name == TRAINING else ([],)  # the arrays of the engine
            programs[name] = Program(compiled, (*own, arrays))
        except RuntimeError as e:
            records[name]["skipped"] = out_of_memory(e)
    first_runs(programs, records)
    time_in_turns(programs, records, settings.rounds)
    return list(records.values())


def first_runs(programs: dict[str, Program], records: Records) -> None:
    """Run each program that fits once, the smallest first; note its memory and its result."""
    first = None
    for name in sorted(programs, key=lambda name: programs[name].bytes):
        program, record = programs[name], records[name]
        record["bytes"] = program.bytes
        if program.bytes > (free := free_bytes()):
            record["skipped"] = f"needs {show_bytes(program.bytes)}, {show_bytes(free)} are free"
            continue
        before, peak = allocated()
        try:
            results = program.run()
        except RuntimeError as e:
            record["skipped"] = out_of_memory(e)
            continue
        if allocated()[1] > peak:
            record["allocator_bytes"] = allocated()[1] - before
        if name != TRAINING:
            grad = np.asarray(ravel_pytree(results[1])[0])
            first = grad if first is None else first
            record["difference"] = float(np.linalg.norm(grad - first) / np.linalg.norm(first))
        del results  # before the next one runs


def time_in_turns(programs: dict[str, Program], records: Records, rounds: int) -> None:
    """Note the seconds of each program that was not skipped, and the plain trainings they make."""
    kept = {name: p for name, p in programs.items() if "skipped" not in records[name]}
    seconds: dict[str, list[float]] = {name: [] for name in kept}
    for _ in range(rounds):
        for name, program in kept.items():
            began = time.perf_counter()
            program.run()
            seconds[name].append(time.perf_counter() - began)
    for name, times in seconds.items():
        records[name]["seconds"] = statistics.median(times)
        if TRAINING in seconds:
            pairs = zip(times, seconds[TRAINING], strict=True)
            records[name]["trainings"] = statistics.median(a / b for a, b in pairs)


def allocated() -> tuple[int, int]:
    """Return the bytes in use on the device and their peak; zeros where it does not tell."""
    stats: Any = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use", 0)


def out_of_memory(error: RuntimeError) -> str:
    """Return why a program was skipped, or raise what is no lack of memory."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return "out of memory"
