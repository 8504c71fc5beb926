"""Small calls that rows of the table share; what a row changes in them is what is wrong."""

import itertools
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from ..problems import regression

USUAL = object()  # an argument that is as it should be
KEY = jax.random.key(0)
NAN, INF = float("nan"), float("inf")


def problem(**changes):
    return regression(**({"steps": 3} | changes))[0]


def hparams(**changes):
    return regression(steps=3)[1] | changes


def solve(hparams=USUAL, engine=None, **changes):
    made, usual = regression(**({"steps": 3} | changes))
    return (engine or ft.Reverse())(made, usual if hparams is USUAL else hparams)


def minimized(hparams=USUAL, given=None, **options):
    made, usual = regression(steps=3)
    chosen = usual if hparams is USUAL else hparams
    return ft.minimize(given or made, chosen, **({"steps": 2} | options))


def constrained(**constraints):
    return minimized(constraints=constraints, optimizer=optax.sgd(0.01))


def single(w, h, x):
    return jnp.mean((w - x) ** 2)


def rate(h):
    return optax.sgd(h["lr"])


def error(state, h, x):
    return jnp.mean((state.params - x) ** 2)


WINDOW, VALIDATION = np.ones((2, 4), np.float32), np.ones(4, np.float32)


def tuner(**options):
    arguments = {"dynamics": ft.Training(single, rate), "objective": error}
    return ft.RealTime(**(arguments | options))


def begun(params=USUAL, hparams=USUAL, **options):
    params = jnp.zeros(()) if params is USUAL else params
    return tuner(**options).init(params, {"lr": 0.1} if hparams is USUAL else hparams)


def updated(window=WINDOW, validation=VALIDATION, state=USUAL, **options):
    chosen = tuner(**options)
    start = chosen.init(jnp.zeros(()), {"lr": 0.1}) if state is USUAL else state
    return chosen.update(start, window, validation)


def ran(train=USUAL, validation=USUAL, **options):
    train = [VALIDATION] * 4 if train is USUAL else train
    validation = itertools.repeat(VALIDATION) if validation is USUAL else validation
    usual = {"params": jnp.zeros(()), "hparams": {"lr": 0.01}, "window": 2}
    return tuner().run(train, validation, **(usual | options))


def tuned(optimizer=optax.sgd, loss=USUAL, **options):
    loss = (lambda w, x: jnp.mean((w - x) ** 2)) if loss is USUAL else loss
    return ft.tuned(optimizer, loss, **({"learning_rate": 0.1} | options))


def tuned_step(batch=VALIDATION, validation=VALIDATION, calls=1, params=0.0):
    optimizer = tuned(every=1)
    state = optimizer.init(jnp.array(params))
    for _ in range(calls):
        state, _ = optimizer.update(state, batch, validation)


def replaced(**leaves):
    """Return the usual hyperparameters with some of them replaced, or absent where None is given."""
    return solve({**hparams(), **leaves})


def data(n=6, d=3):
    """Return rows and targets of the usual problem."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, d)).astype(np.float32), rng.normal(size=n).astype(np.float32)


def holed(array, value=NAN, at=0):
    """Return a copy with one entry that is not a number."""
    array = np.array(array, copy=True)
    array.reshape(-1)[at] = value
    return array


def folder():
    """Return a new empty folder."""
    return Path(tempfile.mkdtemp(dir=os.environ.get("FORETUNE_TRIALS")))


def file(name, content):
    """Return the path of a new file."""
    path = folder() / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class Failed(Exception):
    """A command that ended with a message and an exit status."""


class Refused(Failed):
    """Exit status 1: something is wrong with what was given."""


class WrongUse(Failed):
    """Exit status 2: a wrong use of the command."""


def command(app, *arguments):
    """Run a command; raise what it says where it does not succeed."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = " ".join(result.output.replace("│", " ").split())
    if result.exit_code:
        raise {1: Refused, 2: WrongUse}.get(result.exit_code, Failed)(said)
    return said
