# ruff: noqa: E501, NPY002
# fmt: off
"""Engines and the gradient check with wrong options, or given the wrong things."""

import jax
import numpy as np
import optax

import foretune as ft

from ..problems import penalised
from .given import INF, KEY, NAN, data, hparams, problem, solve

CLASSES = {"Reverse": ft.Reverse, "Forward": ft.Forward, "Truncated": ft.Truncated, "Implicit": ft.Implicit, "Auto": ft.Auto}
ENGINES = {name: make(2) if name == "Truncated" else make() for name, make in CLASSES.items()}
SMOOTH = {"Smoothed": ft.Smoothed(), "Evolution": ft.Evolution()}
X, Y = data()


def drawn(key):
    return problem(validation=(jax.random.normal(key, X.shape), Y))


def trusted(draw):
    return ft.trust(draw, hparams(), key=KEY, advice=False, verbose=False)


def check(**options):
    return ft.check_hypergradient(problem(), hparams(), **({"verbose": False} | options))


def tangled(h):
    """A state that is no function of its derivative: the wrong gradient of a custom rule."""

    @jax.custom_jvp
    def wrong(x):
        return x**2

    wrong.defjvp(lambda p, t: (wrong(*p), 7.0 * t[0]))
    return wrong(h)


WRONG = problem(dynamics=ft.Training(lambda p, h, b: penalised(p, h, b) * tangled(h["lr"]), optax.sgd(0.1)))

ROWS = [
    *((f"{name}: the problem and hparams swapped", lambda e=e: e(hparams(), problem()), TypeError, "must be a `foretune.Problem`") for name, e in ENGINES.items()),
    *((f"{name}: no problem", lambda e=e: e(None, hparams()), TypeError, "must be a `foretune.Problem`", "None") for name, e in ENGINES.items()),
    *((f"{name}: an integer", lambda e=e: e(problem(), hparams(lr=1)), TypeError, "hparams['lr']") for name, e in ENGINES.items()),
    ("check_finite of text", lambda: ft.check_finite("yes").__enter__(), TypeError, "check_finite('yes')"),
    ("check_finite of a number", lambda: ft.check_finite(3).__enter__(), TypeError, "check_finite(3)"),
    ("a draw without a key", lambda: ft.Reverse()(lambda key: problem(), hparams()), TypeError, "give the key too"),
    ("a draw by a seed", lambda: ft.Reverse()(lambda key: problem(), hparams(), key=0), TypeError, "the key of a draw", "jax.random.key"),
    ("a draw by two keys", lambda: ft.Reverse()(lambda key: problem(), hparams(), key=jax.random.split(KEY)), TypeError, "one random key"),
    ("a key for a problem", lambda: ft.Reverse()(problem(), hparams(), key=KEY), TypeError, "a problem already"),
    ("a draw of nothing", lambda: ft.Reverse()(lambda key: None, hparams(), key=KEY), TypeError, "draw(key) returned None"),
    ("a draw of none", lambda: ft.Reverse()(lambda: problem(), hparams(), key=KEY), TypeError, "`draw(key)` is how it is called"),
    ("a class for a draw", lambda: ft.Reverse()(ft.Problem, hparams(), key=KEY), TypeError, "must be a `foretune.Problem`"),
    ("an `if` in a draw", lambda: ft.Reverse()(lambda key: problem() if jax.random.bits(key) > 3 else None, hparams(), key=KEY), Exception, "draw is compiled", "this happened in draw(key)"),
    ("an error in a draw", lambda: ft.Reverse()(lambda key: problem(steps=-1), hparams(), key=KEY), ValueError, "steps=-1", "this happened in draw(key)"),
    ("the problem given to Reverse", lambda: ft.Reverse(problem()), TypeError, "Reverse()(problem, hparams)"),
    ("the problem given to Forward", lambda: ft.Forward(problem()), TypeError, "Forward()(problem, hparams)"),
    ("the problem given to Truncated", lambda: ft.Truncated(problem()), TypeError, "Truncated"),
    ("the problem given to Implicit", lambda: ft.Implicit(problem()), TypeError, "Implicit"),
    ("the problem given to Auto", lambda: ft.Auto(problem()), TypeError, "Auto"),
    ("an engine's class", lambda: ft.minimize(problem(), hparams(), steps=1, engine=ft.Reverse), TypeError, "engine must be an engine"),
    ("chunk 0", lambda: ft.Forward(chunk=0), ValueError, "chunk=0"),
    ("chunk -1", lambda: ft.Forward(chunk=-1), ValueError, "chunk=-1"),
    ("chunk 1.5", lambda: ft.Forward(chunk=1.5), ValueError, "chunk=1.5"),
    ("chunk as text", lambda: ft.Forward(chunk="2"), ValueError, "chunk=2"),
    ("chunk True", lambda: ft.Forward(chunk=True), ValueError, "chunk=True"),
    ("a number for a mesh", lambda: ft.Forward(mesh=2), TypeError, "a mesh is"),
    ("a mesh without tangents", lambda: ft.Forward(mesh=ft.mesh(data=1)), ValueError, "'tangents'"),
    ("unroll 0", lambda: ft.Reverse(unroll=0), ValueError, "unroll=0"),
    ("unroll as text", lambda: ft.Reverse(unroll="2"), ValueError, "unroll=2"),
    ("store 0", lambda: ft.Reverse(store=0), ValueError, "store=0"),
    ("store of another name", lambda: ft.Reverse(store="all"), ValueError, "store='all'", "'states'"),
    ("store True", lambda: ft.Reverse(store=True), ValueError, "store=True"),
    ("store 2.5", lambda: ft.Reverse(store=2.5), ValueError, "store=2.5"),
    ("store None", lambda: ft.Reverse(store=None), ValueError, "store=None"),
    ("an option that is none of Reverse", lambda: ft.Reverse(chunk=2), TypeError, "chunk"),
    ("truncated to 0", lambda: ft.Truncated(0), ValueError, "steps=0"),
    ("truncated to half a step", lambda: ft.Truncated(1.5), ValueError, "steps=1.5"),
    ("truncated to nothing", lambda: ft.Truncated(None), ValueError, "steps=None"),
    ("truncated, store of another name", lambda: ft.Truncated(2, store="all"), ValueError, "store='all'"),
    ("no implicit iterations", lambda: ft.Implicit(iterations=0), ValueError, "iterations=0"),
    ("an implicit engine far from a minimum", lambda: solve({"decay": 0.1}, ft.Implicit(), dynamics=ft.Training(penalised, optax.sgd(0.01))), Warning, "Implicit"),
    ("an implicit tolerance of NaN", lambda: ft.Implicit(tolerance=NAN), ValueError, "tolerance=nan"),
    ("an implicit tolerance of text", lambda: ft.Implicit(tolerance="small"), ValueError, "tolerance='small'"),
    ("an implicit stationarity of 0", lambda: ft.Implicit(stationarity=0), ValueError, "stationarity=0"),
    ("an implicit rate", lambda: solve(engine=ft.Implicit()), ValueError, "hparams['lr'] has no influence"),
    ("memory 0", lambda: ft.Auto(memory=0), ValueError, "memory=0"),
    ("memory -1", lambda: ft.Auto(memory=-1), ValueError, "memory=-1"),
    ("memory NaN", lambda: ft.Auto(memory=NAN), ValueError, "memory=nan"),
    ("memory without end", lambda: ft.Auto(memory=INF), ValueError, "memory=inf"),
    ("memory True", lambda: ft.Auto(memory=True), ValueError, "memory=True"),
    ("memory of another unit", lambda: ft.Auto(memory="4 sheep"), ValueError, "'4 sheep'", "4GiB"),
    ("memory without a number", lambda: ft.Auto(memory="GiB"), ValueError, "'GiB'"),
    ("memory of two points", lambda: ft.Auto(memory="1.2.3GB"), ValueError, "1.2.3GB"),
    ("memory of a list", lambda: ft.Auto(memory=[4]), ValueError, "memory=[4]"),
    ("memory of one byte", lambda: ft.Auto(memory=1)(problem(), hparams()), MemoryError, "no exact engine fits"),
    ("to explain no problem", lambda: ft.Auto().explain(None, hparams()), TypeError, "must be a `foretune.Problem`"),
    ("no directions to check", lambda: check(directions=0), ValueError, "directions=0"),
    ("half a direction to check", lambda: check(directions=1.5), ValueError, "directions=1.5"),
    ("a tolerance of text", lambda: check(tolerance="small"), ValueError, "tolerance='small'"),
    ("a tolerance of NaN", lambda: check(tolerance=NAN), ValueError, "tolerance=nan"),
    ("a negative tolerance", lambda: check(tolerance=-1.0), ValueError, "tolerance=-1.0"),
    ("a tolerance of 0", lambda: check(tolerance=0.0), ValueError, "tolerance=0.0"),
    ("a key to check that is a seed", lambda: check(key=0), TypeError, "key", "jax.random.key"),
    ("two keys to check with", lambda: check(key=jax.random.split(KEY)), TypeError, "one random key"),
    ("a wrong derivative", lambda: ft.check_hypergradient(WRONG, {"lr": 0.5, "decay": 0.1}, verbose=False), ft.HypergradientMismatch, "hparams['lr']", "finite differences"),
    ("a check at NaN", lambda: ft.check_hypergradient(problem(), hparams(lr=NAN), verbose=False), ft.NonFiniteError, "itself is not finite"),
    ("a check of no problem", lambda: ft.check_hypergradient(None, hparams()), TypeError, "must be a `foretune.Problem`"),
    ("the response at nothing", lambda: problem().response({}), ValueError, "no hyperparameters"),
    *((f"{name}: a hyperparameter of NaN", lambda e=e: e(problem(), hparams(lr=NAN)), ft.NonFiniteError, "hparams['lr'] itself is not finite") for name, e in SMOOTH.items()),
    *((f"{name}: NaN in the data", lambda e=e: e(problem(validation=(NAN * X, Y)), hparams()), ft.NonFiniteError, "The validation data hold NaN") for name, e in SMOOTH.items()),
    ("Smoothed: an engine of text", lambda: ft.Smoothed("reverse"), TypeError, "the str 'reverse'"),
    ("Smoothed: a radius of NaN", lambda: ft.Smoothed(radius=NAN), ValueError, "radius=nan"),
    ("Smoothed: one sample", lambda: ft.Smoothed(samples=1), ValueError, "two samples"),
    ("Evolution: a radius of 0", lambda: ft.Evolution(0.0), ValueError, "radius=0.0"),
    ("Evolution: a key of text", lambda: ft.Evolution(key="a"), TypeError, "Evolution(key=...)", "the str 'a'"),
    ("trust: a draw without a key", lambda: ft.trust(drawn, hparams()), TypeError, "give the key too"),
    ("trust: a draw of nothing", lambda: trusted(lambda key: None), TypeError, "draw(key) returned None"),
    ("trust: a draw of two", lambda: trusted(lambda key: (problem(), hparams())), TypeError, "draw(key) returned a tuple"),
    ("trust: a draw that takes nothing", lambda: trusted(lambda: problem()), TypeError, "`draw(key)`"),
    ("trust: a draw by NumPy", lambda: trusted(lambda key: problem(validation=(np.random.normal(size=X.shape).astype("f4"), Y))), TypeError, "random numbers from NumPy", "from the key"),
    ("trust: a draw that does not use its key", lambda: trusted(lambda key: problem()), UserWarning, "does not use its key"),
    ("trust: a draw by a seed", lambda: ft.trust(drawn, hparams(), key=0), TypeError, "the key of trust"),
    ("trust: a draw of NaN", lambda: trusted(lambda key: problem(validation=(NAN * jax.random.normal(key, X.shape), Y))), ft.NonFiniteError, "The validation data hold NaN"),
    ("trust: a scale of NaN", lambda: ft.trust(problem(), hparams(), scale=NAN), ValueError, "scale=nan"),
    ("trust: no problem", lambda: ft.trust(None, hparams()), TypeError, "must be a `foretune.Problem`"),
]
