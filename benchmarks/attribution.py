"""Exact attribution: what it costs, and how well it predicts.

    python -m benchmarks.attribution cost [--quick]     many queries, in hypergradients
    python -m benchmarks.attribution table [--quick]    the linear datamodelling score, beside others'

`cost` is on the network of `python -m experiments complexity`. `table` trains again without 50 random
parts of the data, a half or a tenth, and compares the errors of 50 queries with those predicted.
Options of other methods (damping, dimension) are those of a few that do best in the table itself.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks import attribution_methods as methods
from benchmarks import transformer
from benchmarks.harness import Table, command_line, record, time_in_turns
from benchmarks.retraining import validate
from experiments.complexity.programs import Point, losses, make_data, make_problem
from experiments.datasets import load
from experiments.language import model as language_model

QUERIES = 50
DROPS = (0.5, 0.1)
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)
DIMENSIONS = (64, 256, 1024)


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the time of K queries in hypergradients of the same weights."""
    steps, rounds = (20, 3) if arguments.quick else (1000, 5)
    steps = arguments.steps or steps
    network = (784, 200, 200, 10)
    problem, hparams = make_problem(
        Point(network, 2, steps), arguments.batch, 0, make_data(network, 0)
    )
    n = len(problem.batches.data[1])

    def weighted(params, hparams, batch):
        x, y, i = batch
        return jnp.mean(hparams["weight"][i] * losses(params, x, y))

    def queries(K):
        return tuple(leaf[:K] for leaf in problem.validation)

    written = problem.replace(
        dynamics=ft.Training(weighted, problem.dynamics.optimizer), validation=queries(1)
    )
    at = {**hparams, "weight": jnp.ones(n)}
    programs: dict[str, Callable[[], Any]] = {
        "training": lambda: problem.response(hparams),
        "hypergradient": lambda: ft.Reverse()(written, at).grad,
    }
    for K in arguments.queries:
        programs[f"{K} queries"] = lambda K=K: ft.attribute(problem, hparams, queries(K)).scores
    seconds, ratio = time_in_turns(programs, rounds)
    found, shown = {}, Table("program", "seconds", "hypergradients")
    for name in programs:
        found[name] = {"seconds": seconds[name], "hypergradients": ratio(name, "hypergradient")}
        shown.add(name, *found[name].values())
    grad = ft.Reverse()(written, at).grad["weight"]
    scores = ft.attribute(problem, hparams, queries(1)).scores[0]
    off = float(np.linalg.norm(scores - grad) / np.linalg.norm(grad))
    print(f"the scores and the hypergradient differ by {off:.1e} of its length")
    what = {"network": "-".join(map(str, network)), "steps": steps, "batch": arguments.batch}
    return {**what, "examples": n, "programs": found, "difference": off}


class Case(NamedTuple):
    """A problem, and what other methods need to know of it."""

    problem: ft.Problem
    hparams: dict[str, Any]
    queries: Any
    model: Callable[..., Any]  # params, examples -> logits, labels

    @property
    def train(self) -> Any:
        """The training examples."""
        return self.problem.batches.data


@functools.cache  # one for all seeds, so that they share their programs
def functions_of(model: Any) -> Any:
    """Return the mean cross-entropy of a model as a loss and as an objective."""

    def loss(params, h, batch):
        return methods.loss_of(*model(params, batch))

    return loss, lambda state, h, batch: loss(state.params, h, batch)


def momentum(h: Any) -> Any:
    """Return gradient descent with momentum."""
    return optax.sgd(h["lr"], 0.9)


@functools.cache
def adam(steps: int) -> Any:
    """Return AdamW with a warm-up over a fifth of the steps, then a cosine."""
    rates = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 5, steps)
    return lambda h: optax.adamw(lambda t: h["lr"] * rates(t), eps_root=1e-6)


def problem_of(model: Any, params: Any, optimizer: Any, batches: Any, validation: Any) -> Any:
    """Return a problem on the mean cross-entropy of a model."""
    loss, error = functions_of(model)
    return ft.Problem(ft.Training(loss, optimizer), error, params, batches, validation)


def mnist(seed: int, rows: int, queries: int) -> tuple[Any, Any]:
    """Return random training rows and queries: pixels between 0 and 1, and labels."""
    data = load("mnist")
    order = np.random.default_rng(seed).permutation(len(data.y))[: rows + queries]
    x, y = np.asarray(data.x[order], np.float32), np.asarray(data.y[order], np.int32)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def linear(params: Any, batch: Any) -> Any:
    """Softmax regression."""
    return batch[0] @ params["w"] + params["b"], batch[1]


def network(params: Any, batch: Any) -> Any:
    """A smooth network."""
    hidden = jnp.tanh(batch[0] @ params["a"] + params["c"])
    return hidden @ params["w"] + params["b"], batch[1]


def initial(seed: int, hidden: int) -> dict[str, Any]:
    """Return the parameters of `network`, or of `linear` where there are no hidden units."""
    last = {"w": jnp.zeros((hidden or 784, 10)), "b": jnp.zeros(10)}
    if not hidden:
        return last
    a, w = jax.random.split(jax.random.key(seed))
    normal = jax.random.normal
    first = {"a": normal(a, (784, hidden)) / 28, "c": jnp.zeros(hidden)}
    return {**first, **last, "w": normal(w, (hidden, 10)) / hidden**0.5}


def of_mnist(model: Any, hidden: int, seed: int, quick: bool) -> Case:
    """Return a classifier of MNIST: 1,000 rows, ten epochs of momentum."""
    rows, steps = (300, 30) if quick else (1000, 100)
    train, queries = mnist(seed, rows, QUERIES)
    key = jax.random.key(seed)
    batches = ft.Minibatches.shuffled(train, batch_size=100, steps=steps, key=key)
    problem = problem_of(model, initial(seed, hidden), momentum, batches, queries)
    return Case(problem, {"lr": jnp.array(0.02)}, queries, model)


def language(params: Any, windows: Any) -> Any:
    """A transformer with two heads."""
    return language_model.logits(params, windows[:, :-1], 2), windows[:, 1:]


def of_text(seed: int, quick: bool) -> Case:
    """Return a byte-level transformer: 400 windows of eight sources, a warm-up and a cosine."""
    context, rows, steps, batch, width = 16, 400, 20 if quick else 100, 32, 16
    sources, target = transformer.text()
    rng = np.random.default_rng(seed)

    def windows(row, count):
        starts = rng.integers(0, len(row) - context - 1, count)
        return row[starts[:, None] + np.arange(context + 1)].astype(np.int32)

    each = rows // len(sources)
    train = np.concatenate([windows(row, each) for row in sources])
    queries = windows(target, QUERIES)

    key = jax.random.key(seed)
    batches = ft.Minibatches.shuffled(train, batch_size=batch, steps=steps, key=key)
    start = language_model.initial(jax.random.fold_in(key, 1), 2, width, context)
    problem = problem_of(language, start, adam(steps), batches, queries)
    return Case(problem, {"lr": jnp.array(3e-3)}, queries, language)


CASES = {
    "softmax regression": lambda seed, quick: of_mnist(linear, 0, seed, quick),
    "tanh network": lambda seed, quick: of_mnist(network, 32, seed, quick),
    "transformer": of_text,
}


def others(case: Case, params: Any, seed: int) -> dict[str, Callable[[], dict[str, np.ndarray]]]:
    """Return other methods, each with the scores for the options that are tried."""
    given = case.model, params, case.train, case.queries

    def influence():
        found = methods.influence(*given, DAMPINGS)
        return {f"damping {damping:g}": scores for damping, scores in found.items()}

    def trak(dimension):
        return {f"dimension {dimension}": methods.trak(*given, dimension, seed)}

    return {
        "influence functions": influence,
        **{f"TRAK {d}": lambda d=d: trak(d) for d in DIMENSIONS},
        "gradient cosine": lambda: {"": methods.cosine(*given)},
    }


def seconds_of(program: Callable[[], Any], first: bool) -> tuple[Any, float]:
    """Return a program's result, and its seconds without those of its compilation."""
    if first:
        program()
    began = time.perf_counter()
    found = jax.block_until_ready(program())
    return found, time.perf_counter() - began


def validated(make: Any, seed: int, quick: bool, first: bool) -> dict[str, Any]:
    """Return the scores of all methods on one problem, and what they cost."""
    case = make(seed, quick)
    problem, hparams, queries = case.problem, case.hparams, case.queries
    found, seconds = seconds_of(lambda: ft.attribute(problem, hparams, queries), first)
    half, again = seconds_of(lambda: ft.attribute(problem, hparams, queries, share=0.5), first)
    one = jax.tree.map(lambda leaf: leaf[:1], queries)
    _, unit = seconds_of(lambda: ft.attribute(problem, hparams, one).scores, first)
    (_, state), training = seconds_of(lambda: problem.response(hparams), first)
    result: dict[str, Any] = {
        "error": float(found.errors.mean()),
        "seconds of a training": training,
    }
    result |= {"seconds of a hypergradient": unit, "methods": {}}
    subsets = 10 if quick else 50
    key = jax.random.key(seed)
    exact = {
        drop: validate(found, problem, hparams, queries, subsets=subsets, drop=drop, key=key)
        for drop in DROPS
    }

    def noted(method, option, scores, seconds):
        lds = {str(drop): exact[drop].of(scores).mean for drop in DROPS}
        kept = result["methods"].setdefault(method, {})
        kept[option] = {"lds": lds, "seconds": seconds, "hypergradients": seconds / unit}
        print(f"  {method} {option}: {lds}, {seconds:.2f} s", flush=True)

    noted("attribute", "share=1", found.scores, seconds)
    noted("attribute", "share=0.5", half.scores, again)
    for method, program in others(case, state.params, seed).items():
        options, seconds = seconds_of(program, first)
        for option, scores in options.items():
            noted(method.split(" ")[0] if "TRAK" in method else method, option, scores, seconds)
    return result


def table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the linear datamodelling scores of all methods: means over seeds, the best options."""
    results: dict[str, Any] = {"subsets": 10 if arguments.quick else 50, "queries": QUERIES}
    for name, make in CASES.items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        runs = []
        for seed in range(1 if arguments.quick else arguments.seeds):
            print(f"{name}, seed {seed}", flush=True)
            runs.append(validated(make, seed, arguments.quick, not runs))
            results[name] = {"runs": runs, "summary": summary(runs)}
            record(arguments.out, results)
        for method, row in results[name]["summary"].items():
            print(f"{name}: {method}: {row}")
    return results


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each method's mean and standard deviation over seeds with its best option."""
    rows = {}
    for method, options in runs[0]["methods"].items():
        for drop in map(str, DROPS):
            values = {
                option: [run["methods"][method][option]["lds"][drop] for run in runs]
                for option in options
            }
            best = max(values, key=lambda option: float(np.mean(values[option])))
            cost = [run["methods"][method][best]["hypergradients"] for run in runs]
            seconds = [run["methods"][method][best]["seconds"] for run in runs]
            rows.setdefault(method, {})[drop] = {
                "lds": float(np.mean(values[best])),
                "deviation": float(np.std(values[best])),
                "option": best,
                "seconds": float(np.median(seconds)),
                "hypergradients": float(np.median(cost)),
            }
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("part", choices=("cost", "table"))
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--steps", type=int, help="cost: of the training; by default 1000")
    parser.add_argument("--batch", type=int, default=100, help="cost: examples of a minibatch")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 64], help="cost: K")
    parser.add_argument("--seeds", type=int, default=5, help="table")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="table: parts of problems' names")
    arguments = parser.parse_args()
    parts = {"cost": cost, "table": table}
    record(arguments.out, parts[arguments.part](arguments))


if __name__ == "__main__":
    main()
