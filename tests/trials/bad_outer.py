# ruff: noqa: E501, NPY002
# fmt: off
"""`minimize` with wrong arguments, and runs that cannot continue."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from ..problems import squared_error
from .given import INF, KEY, NAN, data, holed, hparams, minimized, problem

X, Y = data()
RNG = np.random.default_rng(0)


def drawn(key):
    return problem()


def generated(key):
    return problem(init={"w": RNG.normal(size=3).astype("f4") + jax.random.normal(key, (3,)), "b": jnp.zeros(())})


def _scaled(scale):
    return problem(objective=lambda s, h, b: scale * squared_error(s, h, b))


ROWS = [
    ("no steps", lambda: minimized(steps=0), ValueError, "steps=0"),
    ("a negative number of steps", lambda: minimized(steps=-3), ValueError, "steps=-3"),
    ("half a step", lambda: minimized(steps=1.5), ValueError, "steps=1.5"),
    ("steps as text", lambda: minimized(steps="5"), ValueError, "steps='5'"),
    ("steps None", lambda: minimized(steps=None), ValueError, "steps=None"),
    ("steps True", lambda: minimized(steps=True), ValueError, "steps=True"),
    ("steps NaN", lambda: minimized(steps=NAN), ValueError, "steps=nan"),
    ("no problem", lambda: ft.minimize(None, hparams(), steps=1), TypeError, "must be a `foretune.Problem`"),
    ("the arguments swapped", lambda: ft.minimize(hparams(), problem(), steps=1), TypeError, "hparams.", "function"),
    ("inside jit", lambda: jax.jit(lambda h: minimized(h).hparams)(hparams()), TypeError, "outside of jax.jit"),
    ("inside vmap", lambda: jax.vmap(lambda lr: minimized(hparams(lr=lr)).hparams)(jnp.ones(2)), TypeError, "outside of jax.jit"),
    ("the engine is text", lambda: minimized(engine="reverse"), TypeError, "engine must be an engine"),
    ("the engine is a function", lambda: minimized(engine=lambda p, h: None), TypeError, "engine must be an engine"),
    ("the optimizer is text", lambda: minimized(optimizer="adam"), TypeError, "optimizer must be"),
    ("the optimizer is not called", lambda: minimized(optimizer=optax.adam), TypeError, "optimizer must be"),
    ("the optimizer is a rate", lambda: minimized(optimizer=0.1), TypeError, "optimizer must be"),
    ("the optimizer is a function of hparams", lambda: minimized(optimizer=lambda h: optax.adam(0.1)), TypeError, "optimizer must be"),
    ("callbacks is one callback", lambda: minimized(callbacks=ft.Progress()), TypeError, "callbacks must be a list"),
    ("callbacks holds a class", lambda: minimized(callbacks=[ft.Progress]), TypeError, "callbacks must be a list"),
    ("callbacks holds a function", lambda: minimized(callbacks=[print]), TypeError, "callbacks must be a list"),
    ("callbacks is None", lambda: minimized(callbacks=None), TypeError, "callbacks must be a list"),
    ("callbacks is text", lambda: minimized(callbacks="progress"), TypeError, "callbacks must be a list"),
    ("stop is text", lambda: minimized(stop="never"), TypeError, "stop must be"),
    ("stop is a number", lambda: minimized(stop=10), TypeError, "stop must be"),
    ("stop is a class", lambda: minimized(stop=ft.NoImprovement), TypeError, "the class NoImprovement"),
    ("stop holds a class", lambda: minimized(stop=[ft.NoImprovement]), TypeError, "the class NoImprovement"),
    ("stop holds a number", lambda: minimized(stop=[10]), TypeError, "stop must be a function"),
    ("stop takes nothing", lambda: minimized(stop=lambda: None), TypeError, "`stop(run)`"),
    ("stop is a dict", lambda: minimized(stop={"patience": 3}), TypeError, "stop must be"),
    ("score is text", lambda: minimized(score="value"), TypeError, "score must be a function"),
    ("score takes two", lambda: minimized(score=lambda a, b: 0.0), TypeError, "`score(record)`"),
    ("score does not find a name", lambda: minimized(score=lambda r: r["accuracy"]), KeyError, "'accuracy'", "score(record) at step 0; the record has ['gradient_norm'"),
    ("score returns nothing", lambda: minimized(score=lambda r: None), TypeError, "one real number", "None"),
    ("score returns text", lambda: minimized(score=lambda r: "good"), TypeError, "one real number"),
    ("score returns a complex number", lambda: minimized(score=lambda r: 1j), TypeError, "one real number"),
    ("score returns a vector", lambda: minimized(score=lambda r: np.zeros(2)), TypeError, "one real number"),
    ("score returns NaN", lambda: minimized(score=lambda r: NAN), Warning, "is NaN", "never counts as the best"),
    ("evaluate is text", lambda: minimized(evaluate="accuracy"), TypeError, "evaluate must be a function"),
    ("evaluate takes one", lambda: minimized(evaluate=lambda s: {}), TypeError, "`evaluate(state, hparams)`"),
    ("evaluate returns a number", lambda: minimized(evaluate=lambda s, h: 1.0), ValueError, "a dict of scalars"),
    ("evaluate returns nothing", lambda: minimized(evaluate=lambda s, h: None), ValueError, "a dict of scalars"),
    ("evaluate returns numbers by number", lambda: minimized(evaluate=lambda s, h: {0: 1.0}), ValueError, "names (strings)"),
    ("evaluate takes a name of a record", lambda: minimized(evaluate=lambda s, h: {"value": 1.0}), ValueError, "other than", "'value'"),
    ("evaluate uses float", lambda: minimized(evaluate=lambda s, h: {"a": float(s.params["b"])}), TypeError, "evaluate is compiled"),
    ("evaluate uses NumPy", lambda: minimized(evaluate=lambda s, h: {"a": np.sum(np.asarray(s.params["w"]))}), TypeError, "is compiled"),
    ("evaluate does not find a name", lambda: minimized(evaluate=lambda s, h: {"a": s.params["v"]}), ValueError, "evaluate(state, hparams)", "'v'"),
    ("evaluate does not find an attribute", lambda: minimized(evaluate=lambda s, h: {"a": s.weights}), AttributeError, "evaluate(state, hparams)"),
    ("a key for a problem", lambda: minimized(key=KEY), TypeError, "key=... is for a draw"),
    ("a draw without a key", lambda: minimized(given=drawn), TypeError, "give the key too"),
    ("a draw with a seed", lambda: minimized(given=drawn, key=0), TypeError, "one random key"),
    ("a draw with two keys", lambda: minimized(given=drawn, key=jax.random.split(KEY)), TypeError, "one random key"),
    ("a draw that takes nothing", lambda: minimized(given=lambda: problem(), key=KEY), TypeError, "`draw(key)`"),
    ("a draw that returns nothing", lambda: minimized(given=lambda key: None, key=KEY), TypeError, "draw(key) returned None"),
    ("a draw of data that do not fit", lambda: minimized(given=lambda key: problem(batches=ft.FullBatch((X[:, :2], Y), 3)), key=KEY), TypeError, "step(state", "float32[6,2]"),
    ("a draw of two", lambda: minimized(given=lambda key: (problem(), hparams()), key=KEY), TypeError, "draw(key) returned a tuple"),
    ("a draw of a draw", lambda: minimized(given=lambda key: drawn, key=KEY), TypeError, "draw(key) returned a function"),
    ("a draw by NumPy", lambda: minimized(given=lambda key: problem(batches=ft.FullBatch((np.random.normal(size=X.shape).astype("f4"), Y), 3)), key=KEY), TypeError, "random numbers from NumPy", "from the key"),
    ("a draw by Python", lambda: minimized(given=lambda key: problem(batches=ft.FullBatch((np.float32(random.random()) * X, Y), 3)), key=KEY), UserWarning, "does not use its key"),
    ("a draw by a generator", lambda: minimized(given=generated, key=KEY), TypeError, "random numbers from NumPy"),
    ("a draw that does not use its key", lambda: minimized(given=lambda key: problem(), key=KEY), UserWarning, "does not use its key"),
    ("a draw by a generator with the key's seed", lambda: minimized(given=lambda key: problem(init=np.random.default_rng(int(key))), key=KEY), Exception, "draw is compiled", "this happened in draw(key)"),
    ("a draw of as many rows as it draws", lambda: minimized(given=lambda key: problem(validation=(X[: int(jax.random.randint(key, (), 1, 5))], Y)), key=KEY), Exception, "draw is compiled", "this happened in draw(key)"),
    ("a draw whose objective holds what is drawn", lambda: minimized(given=lambda key: _scaled(jax.random.uniform(key)), key=KEY), TypeError, "closes over an array that is drawn"),
    ("a draw that fails", lambda: minimized(given=lambda key: 1 / 0, key=KEY), ZeroDivisionError, "this happened in draw(key)"),
    ("a draw of NaN", lambda: minimized(given=lambda key: problem(validation=(NAN * jax.random.normal(key, X.shape), Y)), key=KEY), ft.NonFiniteError, "The validation data hold NaN"),
    ("a start at NaN", lambda: minimized(hparams(lr=NAN)), ft.NonFiniteError, "hparams['lr'] itself is not finite", "step 0 of minimize"),
    ("a start at infinity", lambda: minimized(hparams(lr=INF)), ft.NonFiniteError, "hparams['lr'] itself"),
    ("a start at NaN inside a set", lambda: minimized(hparams(lr=NAN), constraints={"lr": ft.Box(0.0, 1.0)}), ft.NonFiniteError, "hparams['lr'] itself"),
    ("an outer step that diverges", lambda: minimized(optimizer=optax.sgd(1e30), steps=3), RuntimeWarning, "step 1 of minimize", "not finite", "rejected"),
    ("an outer optimizer at NaN", lambda: minimized(optimizer=optax.sgd(NAN)), RuntimeWarning, "itself is not finite", "step 1 of minimize"),
    ("NaN in the data", lambda: minimized(given=problem(batches=ft.FullBatch((holed(X), Y), 3))), ft.NonFiniteError, "The data hold NaN"),
    ("NaN in the validation data", lambda: minimized(given=problem(validation=(holed(X), Y))), ft.NonFiniteError, "The validation data hold NaN"),
    ("an argument that is none", lambda: minimized(iterations=3), TypeError, "iterations"),
]
