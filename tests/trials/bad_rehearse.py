# ruff: noqa: E501, NPY002
# fmt: off
"""`rehearse` and `Mean.of_draws` given the wrong things."""

import jax
import jax.numpy as jnp
import numpy as np

import foretune as ft

from .given import INF, KEY, NAN, data, folder, minimized, problem

X, Y = data()


def make(steps, key, **changes):
    return problem(steps=steps, init={"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}, **changes)


class Unhashable:
    __hash__ = None

    def __call__(self, steps, key):
        return make(steps, key)


def rehearsed(make=make, hparams=None, **options):
    hparams = {"lr": 0.01, "decay": 0.1} if hparams is None else hparams
    usual = {"steps": 128, "cost": 2.0, "constraints": {"lr": ft.Log()}}
    return ft.rehearse(make, hparams, **(usual | options))


def changed(**changes):
    return rehearsed(lambda steps, key: make(steps, key, **changes))


def in_the_folder_of_another(first, second):
    where = [ft.Checkpoint(folder())]
    first(where)
    return second(where)


def drawn(key):
    return make(3, key)


def other_draw(key):
    return make(3, key).replace(init={"w": jnp.ones(3) + jax.random.normal(key, (3,)), "b": jnp.zeros(())})


def scaled(key, scale):
    return make(3, key, objective=lambda s, h, b: scale * jnp.sum(s.params["w"]))


def mean(draw, n=2, **key):
    return ft.Reverse()(ft.Mean.of_draws(draw, n), {"lr": 0.1, "decay": 0.1}, **({"key": KEY} | key))


ROWS = [
    ("make is a problem", lambda: rehearsed(problem()), TypeError, "`make(steps, key)` must be a function", "a Problem"),
    ("make is None", lambda: ft.rehearse(None, {"lr": 0.1}, steps=9), TypeError, "must be a function, got None"),
    ("make is a class", lambda: rehearsed(ft.Problem), TypeError, "`make(steps, key)` is how it is called"),
    ("make is a draw", lambda: rehearsed(lambda key: make(128, key)), TypeError, "`make(steps, key)` is how it is called"),
    ("make cannot be hashed", lambda: rehearsed(Unhashable()), TypeError, "cannot be hashed"),
    ("make returns nothing", lambda: rehearsed(lambda steps, key: None), TypeError, "make(16, key) returned None, not a problem"),
    ("make returns nothing for the performance", lambda: rehearsed(lambda steps, key: make(steps, key) if steps < 128 else None), TypeError, "make(128, key) returned None"),
    ("make returns a pair", lambda: rehearsed(lambda steps, key: (make(steps, key), {})), TypeError, "make(16, key) returned (", "not a problem"),
    ("make returns a draw", lambda: rehearsed(lambda steps, key: drawn), TypeError, "make(16, key) returned <function", "not a problem"),
    ("make returns a dynamics", lambda: rehearsed(lambda steps, key: make(steps, key).dynamics), TypeError, "not a problem"),
    ("make takes no heed of the steps", lambda: rehearsed(lambda steps, key: make(7, key)), ValueError, "make(16, key) returned a problem of 7 steps"),
    ("make takes the key first", lambda: rehearsed(lambda key, steps: make(steps, key)), Exception, "this happened in draw(key)"),
    ("make fails", lambda: rehearsed(lambda steps, key: 1 / 0), ZeroDivisionError, "this happened in draw(key)"),
    ("make by NumPy", lambda: rehearsed(lambda steps, key: make(steps, key, validation=(np.random.normal(size=X.shape).astype("f4"), Y))), TypeError, "random numbers from NumPy"),
    ("an `if` on the key", lambda: rehearsed(lambda steps, key: make(steps, key) if jax.random.bits(key) > 3 else None), Exception, "draw is compiled"),
    ("an error of three numbers", lambda: changed(objective=lambda s, h, b: s.params["w"]), ValueError, "float32[3]", "Reduce"),
    ("steps of 128.0", lambda: rehearsed(steps=128.0), ValueError, "rehearse(steps=128.0)"),
    ("steps of text", lambda: rehearsed(steps="128"), ValueError, "rehearse(steps='128')"),
    ("no steps", lambda: rehearsed(steps=0), ValueError, "rehearse(steps=0)"),
    ("steps None", lambda: rehearsed(steps=None), ValueError, "rehearse(steps=None)"),
    ("steps True", lambda: rehearsed(steps=True), ValueError, "rehearse(steps=True)"),
    ("2^31 steps", lambda: rehearsed(steps=2**31), ValueError, "steps=2147483648"),
    ("a cost of NaN", lambda: rehearsed(cost=NAN), ValueError, "rehearse(cost=nan)", "2 at least"),
    ("an infinite cost", lambda: rehearsed(cost=INF), ValueError, "rehearse(cost=inf)"),
    ("a cost of 10^9", lambda: rehearsed(cost=10**9), ValueError, "cost=1000000000", "10000 at most"),
    ("a cost of 1", lambda: rehearsed(cost=1), ValueError, "rehearse(cost=1)", "2 at least"),
    ("a cost of text", lambda: rehearsed(cost="4"), ValueError, "rehearse(cost='4')"),
    ("a cost of None", lambda: rehearsed(cost=None), ValueError, "rehearse(cost=None)"),
    ("a complex cost", lambda: rehearsed(cost=4j), ValueError, "rehearse(cost=4j)"),
    ("two costs", lambda: rehearsed(cost=np.array([3.0, 4.0])), ValueError, "rehearse(cost=array("),
    ("a training too short for its cost", lambda: rehearsed(steps=32), UserWarning, "16 steps or more of 32", "without a search"),
    ("a constraint of another name", lambda: rehearsed(constraints={"rate": ft.Log()}), ValueError, "constraints['rate'] names no"),
    ("a class for a constraint", lambda: rehearsed(constraints={"lr": ft.Log}), TypeError, "hparams['lr'] is a class"),
    ("text for constraints", lambda: rehearsed(constraints="log"), TypeError, "the str 'log'"),
    ("a rate of 0 under Log", lambda: rehearsed(hparams={"lr": 0.0, "decay": 0.1}), ValueError, "hparams['lr']: it starts at 0.0"),
    ("an integer rate", lambda: rehearsed(hparams={"lr": 1, "decay": 0.1}), TypeError, "hparams['lr'] is the int 1", "Write `1.0`"),
    ("an array of integer rates", lambda: rehearsed(hparams={"lr": jnp.array(1), "decay": 0.1}), TypeError, "hparams['lr'] is int32[]"),
    ("a rate of NaN", lambda: rehearsed(hparams={"lr": NAN, "decay": 0.1}), ValueError, "hparams['lr']: it starts at nan"),
    ("no hyperparameters", lambda: rehearsed(hparams={}), ValueError, "no hyperparameters"),
    ("hyperparameters that are not used", lambda: rehearsed(hparams={"lr": 0.1, "decay": 0.1, "x": 1.0}), ValueError, "does not depend on hparams['x']"),
    ("the key is a seed", lambda: rehearsed(key=0), TypeError, "the key of rehearse", "the int 0"),
    ("two keys", lambda: rehearsed(key=jax.random.split(KEY)), TypeError, "one random key"),
    ("the engine is text", lambda: rehearsed(engine="reverse"), TypeError, "engine must be an engine"),
    ("callbacks is one callback", lambda: rehearsed(callbacks=ft.Progress()), TypeError, "callbacks must be a list"),
    ("inside jit", lambda: jax.jit(lambda lr: rehearsed(hparams={"lr": lr, "decay": 0.1}).value)(0.1), TypeError, "rehearse is a loop in Python", "outside of jax.jit"),
    ("the checkpoints of a minimize", lambda: in_the_folder_of_another(lambda c: minimized(callbacks=c), lambda c: rehearsed(callbacks=c)), ValueError, "holds another run"),
    ("the checkpoints of another make", lambda: in_the_folder_of_another(lambda c: rehearsed(callbacks=c), lambda c: rehearsed(lambda steps, key: make(steps, jax.random.fold_in(key, 1)), callbacks=c)), ValueError, "holds another run", "the draw: other numbers"),
    ("the checkpoints of another draw", lambda: in_the_folder_of_another(lambda c: minimized(given=drawn, key=KEY, callbacks=c), lambda c: minimized(given=other_draw, key=KEY, callbacks=c)), ValueError, "holds another run", "the draw: other numbers"),
    ("of_draws: half a draw", lambda: mean(drawn, 2.5), ValueError, "Mean.of_draws(n=2.5)"),
    ("of_draws: no draws", lambda: mean(drawn, 0), ValueError, "Mean.of_draws(n=0)"),
    ("of_draws: a number of text", lambda: mean(drawn, "2"), ValueError, "Mean.of_draws(n='2')"),
    ("of_draws: a problem", lambda: mean(problem()), TypeError, "takes a function draw(key), got a Problem"),
    ("of_draws: the arguments swapped", lambda: mean(2, drawn), TypeError, "takes a function draw(key), got the int 2"),
    ("of_draws: a draw of nothing", lambda: mean(lambda key: None), TypeError, "draw(key) returned None", "this happened in draw(key)"),
    ("of_draws: a draw that takes nothing", lambda: mean(lambda: problem()), TypeError, "`draw(key)` is how it is called"),
    ("of_draws: means of means", lambda: mean(ft.Mean.of_draws(drawn, 2)), TypeError, "fold 0 is a Mean"),
    ("of_draws: without a key", lambda: mean(drawn, key=None), TypeError, "give the key too"),
    ("of_draws: a draw that does not use its key", lambda: mean(lambda key: problem()), UserWarning, "does not use its key"),
    ("of_draws: a draw by NumPy", lambda: mean(lambda key: problem(validation=(np.random.normal(size=X.shape).astype("f4"), Y))), TypeError, "random numbers from NumPy"),
    ("of_draws: an objective of what is drawn", lambda: mean(lambda key: scaled(key, jax.random.uniform(key))), TypeError, "closes over an array that is drawn"),
    ("of_draws: attribute", lambda: ft.attribute(ft.Mean.of_draws(drawn, 2), {"lr": 0.1, "decay": 0.1}, (X[:1], Y[:1]), key=KEY), TypeError, "explains one training"),
]
