"""What the pictures of the documentation are drawn from: the examples are run, as they are.

    python -m benchmarks.gallery --out benchmarks/results/gallery-cpu.json [--only schedule digits]

Some minutes in all on two CPU cores. `--only` leaves the other parts of the file as they are.
`docs/_figures.py` draws the pictures.
"""

import contextlib
import io
import itertools
import json
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import foretune as ft

from . import trust
from .harness import command_line, record, recorded

EXAMPLES = Path(__file__).parent.parent / "examples"
Found = dict[str, Any]


class Seen(ft.Callback):
    """Remembers the hyperparameters of each step of the last run."""

    def start(self, run: Any) -> None:
        """Forget the run before."""
        self.hparams: list[Any] = []

    def step(self, run: Any) -> None:
        """Keep the hyperparameters."""
        self.hparams.append(jax.tree.map(np.asarray, run.hparams))


@contextlib.contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Let `minimize` call one more callback."""
    minimize = ft.minimize

    def watching(*args: Any, callbacks: Any = (), **options: Any) -> ft.Result:
        return minimize(*args, callbacks=[*callbacks, seen], **options)

    ft.minimize = watching
    try:
        yield
    finally:
        ft.minimize = minimize


def example(name: str, *options: str) -> tuple[Found, Seen, str]:
    """Run an example, and return its variables, what its last descent did, and what it printed."""
    sys.argv, before = [name, *options], sys.argv
    seen, said = Seen(), io.StringIO()
    try:
        with watched(seen), contextlib.redirect_stdout(said):
            found = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before
    print(name, said.getvalue(), sep="\n", flush=True)
    return found, seen, said.getvalue()


def short(values: Any, digits: int = 4) -> Any:
    """Return numbers as lists with a few significant digits."""
    values = np.asarray(values, float)
    return np.vectorize(lambda x: float(f"{x:.{digits}g}"), otypes=[float])(values).tolist()


def schedule() -> Found:
    """The learnt rate of each step beside the best constant and the best cosine, with losses."""
    found, _, _ = example("transformer_schedule", "--iterations", "100")
    problem, steps = found["problem"], found["arguments"].steps
    t = np.arange(steps)
    cosines = {peak: 0.5 * peak * (1 + np.cos(np.pi * t / steps)) for peak in found["grid"]}
    peak = min(cosines, key=lambda peak: float(problem.response(_rates(cosines[peak]))[0]))
    rates = {
        "learnt": found["learnt"],
        "best cosine of a grid": cosines[peak],
        "best constant of a grid": np.full(steps, found["best"]),
    }

    @jax.jit
    def losses(hparams: Any) -> jax.Array:
        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            state = problem.dynamics.step(state, hparams, batch)
            return state, found["error"](state, hparams, found["test"])

        rows = problem.batches
        batches = jax.tree.map(lambda x: jnp.asarray(x)[rows.indices], rows.data)
        return jax.lax.scan(step, problem.dynamics.init(problem.init, hparams), batches)[1]

    return {
        name: {"rate": short(rate), "test loss": short(losses(_rates(rate)))}
        for name, rate in rates.items()
    }


def _rates(rate: np.ndarray) -> Found:
    return {"lr": jnp.asarray(rate, jnp.float32)}


def digits() -> Found:
    """Digits whose weight went to 0, and how many of the wrong labels they are."""
    found, _, _ = example("digits_cleaning")
    x, labels = found["train"]
    weight, wrong = np.asarray(found["result"].hparams["weight"]), found["wrong"]
    first = np.flatnonzero(weight < 1e-3)[:12]
    return {
        "pixels": (16 * x[first]).astype(int).tolist(),
        "labels": labels[first].tolist(),
        "wrong": wrong[first].tolist(),
        "weights": {
            name: np.histogram(weight[rows], 20, (0.0, 1.0))[0].tolist()
            for name, rows in (("right labels", ~wrong), ("wrong labels", wrong))
        },
    }


def attribution() -> Found:
    """Digits that came out wrong, with the training digits that did most harm."""
    found, _, _ = example("attribution", "--subsets", "30")
    harmful = np.stack([found["found"].bottom(3)[k] for k in range(len(found["missed"]))])
    return {
        "digits": (16 * found["test"][0][found["missed"]]).astype(int).tolist(),
        "truth": found["test"][1][found["missed"]].tolist(),
        "harmful": (16 * found["x"][harmful]).astype(int).tolist(),
        "labels": found["labels"][harmful].tolist(),
        "wrong": found["wrong"][harmful].tolist(),
        "change": short([found["predicted"], found["measured"]]),
    }


def mixture() -> Found:
    """The share of each source, step by step."""
    found, seen, _ = example("language_mixture")
    shares = np.stack([h["sources"] / h["sources"].sum() for h in seen.hparams])
    return {"sources": list(found["texts"]), "shares": short(shares)}


def stream() -> Found:
    """A rate that follows the noise of a stream."""
    found, _, said = example("drifting_stream")
    tuner, steps = found["tuner"], found["arguments"].steps
    state = tuner.init(jnp.zeros(found["SIZE"]), {"lr": jnp.array(0.02)})
    rates = []
    windows = list(ft.windows(found["stream"](steps), found["WINDOW"]))
    for window, following in itertools.pairwise(windows):
        ahead = {name: part.reshape(-1, *part.shape[2:]) for name, part in following.items()}
        state, log = tuner.update(state, window, ahead)
        rates.append(float(log["hparams"]["lr"]))
    errors = {name: float(x) for name, x in re.findall(r"(.+): ([\d.]+)\n", said)}
    return {"window": found["WINDOW"], "rates": short(rates), "errors": errors}


def stars() -> Found:
    """The path of a planet, as observed, guessed and fitted."""
    found, seen, _ = example("custom_dynamics")

    def path(hparams: Any) -> list[Any]:
        state, places = found["Leapfrog"]().init(found["problem"].init, hparams), []
        for _ in range(found["STEPS"]):
            state = found["step"](state, hparams, jnp.zeros(2))
            places.append(state["x"])
        return short(places)

    return {
        "observed": short(found["observed"]),
        "guess": path(found["guess"]),
        "fitted": path(found["result"].best.hparams),
        "masses": short([h["mass"] for h in seen.hparams]),
        "truth": short(found["truth"]["mass"]),
    }


def maml() -> Found:
    """A sinusoid from ten points after five steps, from learnt weights and from random ones."""
    found, seen, _ = example("maml_sinusoids", "--iterations", "2000")
    x = jnp.linspace(-5.0, 5.0, 81)[:, None]
    learnt = jax.tree.map(jnp.asarray, seen.hparams[-1])
    starts = {"learnt weights": learnt, "random weights": found["start"](jax.random.key(0))}
    shown = []
    for seed in (5, 9):
        inner = found["task"](jax.random.key(seed))
        points = inner.batches.data
        shown.append({"points": short([points[0][:, 0], points[1][:, 0]])})
        for name, weights in starts.items():
            state = inner.response(weights)[1]
            shown[-1][name] = short(found["network"](state.params, x)[:, 0])
        shown[-1]["before"] = short(found["network"](learnt, x)[:, 0])
    return {"x": short(x[:, 0]), "tasks": shown}


def optimizer() -> Found:
    """Losses of a learnt update rule beside tuned Adam and SGD."""
    _, _, said = example("learnt_optimizer")
    rows = re.findall(r"after (\d+) steps, (\d+) wide: (.*)\n", said)
    return {
        f"{steps} steps, {width} wide": {
            name: float(loss) for name, loss in re.findall(r"(\w+) ([\d.]+)", losses)
        }
        for steps, width, losses in rows
    }


def penalties() -> Found:
    """The penalty of each feature."""
    found, _, _ = example("penalties_implicit")
    return {"penalty": short(found["learnt"]), "useful": found["USEFUL"], "one": found["best"]}


def loop() -> Found:
    """Learning rate and momentum of a training loop that tunes them."""
    tuned = ft.tuned
    rows: list[dict[str, float]] = []

    def watched_tuned(*args: Any, **options: Any) -> Any:
        made = tuned(*args, **options)

        class Watched:
            init = staticmethod(made.init)

            @staticmethod
            def update(*arguments: Any) -> Any:
                state, value = made.update(*arguments)
                rows.append({name: float(h) for name, h in state.hparams.items()})
                return state, value

        return Watched

    ft.tuned = watched_tuned
    try:
        example("realtime_jax")
    finally:
        ft.tuned = tuned
    return {name: short([row[name] for row in rows[::10]]) for name in rows[0]}


def distilled() -> Found:
    """The learnt images of a short run of the experiment."""
    from experiments.distillation.experiment import QUICK, run, stage_file

    with tempfile.TemporaryDirectory() as folder:
        run(folder, QUICK)
        kept = json.loads(Path(folder, stage_file(1, 0)).read_text())
    images = np.asarray(kept["images"])
    return {"images": short(images.reshape(len(images), 28, 28), 2), "accuracy": kept["accuracy"]}


def responses() -> Found:
    """A smooth and a chaotic response, with the tangent that the exact hypergradient is."""
    change = np.linspace(-0.3, 0.3, 121)
    shown: Found = {"change": short(change)}
    for name in ("tanh network", "recurrent"):
        problem, hparams, *_ = trust.ALL[name]()
        rates = hparams["lr"] * jnp.exp(change)
        errors = [float(problem.response(hparams | {"lr": rate})[0]) for rate in rates]
        value, grad, _ = ft.Reverse()(problem, hparams)
        slope = float(grad["lr"] * hparams["lr"])
        shown[name] = {"error": short(errors, 6), "value": float(value), "slope": slope}
    return shown


PARTS = {
    part.__name__: part
    for part in (
        *(schedule, digits, attribution, mixture, stream, stars, maml, optimizer, penalties, loop),
        *(distilled, responses),
    )
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    arguments = parser.parse_args()
    found = recorded(arguments.out) if arguments.out and Path(arguments.out).exists() else {}
    for name in arguments.only:
        found[name] = PARTS[name]()
        record(arguments.out, found)


if __name__ == "__main__":
    main()
