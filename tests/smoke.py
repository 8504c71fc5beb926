"""A first use of an installed foretune, by its public names: `make smoke` runs it on the built wheel.

It is copied to an empty folder and needs nothing of the repository. What belongs to an extra is tried
where the extra is installed; where it is not, the message must say which one to install.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft


def tuned_sgd(h):
    return optax.sgd(h["lr"], h["momentum"])


def problem(optimizer=tuned_sgd, steps=10):
    """Return a ridge regression by gradient descent, and its hyperparameters."""
    x, x_val = jax.random.normal(jax.random.key(0), (2, 30, 4))
    y, y_val = jnp.sin(x.sum(1)), jnp.sin(x_val.sum(1))
    found = ft.Problem(
        dynamics=ft.Training(loss, optimizer),
        objective=error,
        init=jnp.zeros(4),
        batches=ft.FullBatch((x, y), steps=steps),
        validation=(x_val, y_val),
    )
    return found, {"lr": jnp.array(0.1), "momentum": jnp.array(0.5), "decay": jnp.array(0.2)}


def loss(w, hparams, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) + hparams["decay"] * jnp.sum(w**2)


def error(state, hparams, batch):
    x, y = batch
    return jnp.mean((x @ state.params - y) ** 2)


def command(*arguments: str) -> str:
    """Run `foretune ...` as it was installed, and return what it prints."""
    script = Path(sys.executable).with_name("foretune")
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def check_version(folder: Path) -> None:
    assert Path(ft.__file__).is_relative_to(sys.prefix), f"not the installed one: {ft.__file__}"
    assert Path(ft.__file__).with_name("py.typed").is_file()
    version = importlib.metadata.version("foretune")
    assert ft.__version__ == version
    assert command("--version") == f"{version}\n"


def check_hypergradients(folder: Path) -> None:
    with jax.enable_x64(True):
        task, hparams = problem()
        reverse, forward = ft.Reverse()(task, hparams), ft.Forward()(task, hparams)
        for name, middle in hparams.items():
            values = [ft.Forward()(task, hparams | {name: middle + h}).value for h in (1e-5, -1e-5)]
            difference = (values[0] - values[1]) / 2e-5
            np.testing.assert_allclose(forward.grad[name], difference, rtol=1e-6)
            np.testing.assert_allclose(reverse.grad[name], forward.grad[name], rtol=1e-10)
        settled, decay = problem(optax.sgd(0.1), steps=500)[0], {"decay": hparams["decay"]}
        exact, implicit = (engine(settled, decay).grad for engine in (ft.Reverse(), ft.Implicit()))
        np.testing.assert_allclose(implicit["decay"], exact["decay"], rtol=1e-6)


def check_minimize(folder: Path) -> None:
    task, hparams = problem()
    sets = {"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.99), "decay": ft.NonNegative()}
    result = ft.minimize(task, hparams, optimizer=optax.adam(0.02), steps=5, constraints=sets)
    assert result.history[-1]["value"] < result.history[0]["value"]


def check_real_time(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 8, 4)).astype(np.float32)
    stream = [(row, row.sum(1)) for row in x]
    tuner = ft.RealTime(
        ft.Training(loss, tuned_sgd),
        objective=error,
        constraints={"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.99), "decay": ft.Box(0, 1)},
    )

    def run(name: str, steps: int) -> ft.Result:
        return tuner.run(
            stream, stream[:1], params=jnp.zeros(4), hparams=problem()[1], window=5, steps=steps,
            callbacks=[ft.Checkpoint(folder / name)],
        )  # fmt: skip

    whole = run("whole", 6)
    run("parts", 3)
    resumed = run("parts", 6)
    assert len(whole.history) > 3
    assert whole.history == resumed.history
    assert jax.tree.all(jax.tree.map(np.array_equal, whole.hparams, resumed.hparams))


def labelled_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 60 rows, their labels, and those labels with 6 of them wrong."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    right = x.sum(1) > 0
    return x, right, np.where(np.arange(60) < 6, ~right, right)


def use_command_line(folder: Path) -> None:
    x, right, given = labelled_rows()
    np.savez(folder / "train.npz", x=x[:40], y=given[:40])
    np.savez(folder / "checked.npz", x=x[40:], y=right[40:])
    files = str(folder / "train.npz"), "--clean", str(folder / "checked.npz")
    out = folder / "run"
    command("clean", *files, "--out", str(out))
    assert (out / "suspects.csv").is_file()
    (out / "report.html").unlink()
    command("report", str(out))
    assert "<html" in (out / "report.html").read_text()


def use_apps(folder: Path) -> None:
    from foretune.apps import LabelCleaner

    x, right, given = labelled_rows()
    cleaner = LabelCleaner(random_state=0)
    cleaner.fit(x[:40], given[:40], X_clean=x[40:], y_clean=right[40:])
    assert cleaner.score(x, right) > 0.8


def use_tables(folder: Path) -> None:
    x, right, given = labelled_rows()
    for name, rows, labels in (("train", x[:40], given[:40]), ("checked", x[40:], right[40:])):
        lines = [f"{a},{b},{c},{label}" for (a, b, c), label in zip(rows, labels, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,c,label", *lines]))
    files = str(folder / "train.csv"), "--clean", str(folder / "checked.csv")
    command("clean", *files, "--out", str(folder / "run"))
    assert (folder / "run" / "suspects.csv").is_file()


def use_optuna(folder: Path) -> None:
    import foretune.optuna as fo

    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    task, hparams = problem()

    def objective(trial):
        hparams["decay"] = jnp.array(trial.suggest_float("decay", 0.0, 1.0))
        start = fo.warm_start(trial, hparams)
        callbacks = [fo.Pruning(trial)]
        return fo.keep(trial, ft.minimize(task, start, steps=2, callbacks=callbacks))

    study = optuna.create_study()
    study.optimize(objective, n_trials=2)
    assert study.best_value < 1


def use_torch(folder: Path) -> None:
    import foretune.torch as fot

    torch = importlib.import_module("torch")
    model = fot.bridge(torch.nn.Linear(3, 2))
    assert model.apply(model.params, jnp.ones((1, 3))).shape == (1, 2)


# What is tried, with the modules without which it cannot be done and the extra that installs them.
EXTRAS: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (use_command_line, ("typer", "sklearn"), "apps"),
    (use_apps, ("sklearn",), "apps"),
    (use_tables, ("typer", "sklearn", "pandas"), "data"),
    (use_optuna, ("optuna",), "optuna"),
    (use_torch, ("torch", "torchax"), "torch"),
]


def says_what_to_install(use: Callable[[Path], None], folder: Path, extra: str) -> None:
    try:
        use(folder)
    except Exception as error:
        message = str(error).strip()
        named = re.findall(r"foretune\[([\w,]+)", message)
        assert any(extra in n.split(",") for n in named), f"names no extra {extra}: {message}"
        assert len(message.splitlines()) == 1, f"not one sentence: {message}"
    else:
        raise AssertionError(f"{use.__name__} works without the extra {extra}")


def main() -> None:
    begun = time.monotonic()
    checks = [check_version, check_hypergradients, check_minimize, check_real_time]
    with tempfile.TemporaryDirectory() as parent:
        for check, modules, extra in [*((check, (), "") for check in checks), *EXTRAS]:
            folder = Path(parent, check.__name__)
            folder.mkdir()
            if all(map(importlib.util.find_spec, modules)):
                check(folder)
                print(f"  {check.__name__}: passed")
            else:
                says_what_to_install(check, folder, extra)
                print(f"  {check.__name__}: says that it needs foretune[{extra}]")
    python, seconds = sys.version.split()[0], time.monotonic() - begun
    print(f"foretune {ft.__version__}, JAX {jax.__version__}, Python {python}: {seconds:.0f} s")


if __name__ == "__main__":
    main()
