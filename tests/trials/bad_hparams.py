# ruff: noqa: E501
# fmt: off
"""Hyperparameters that are none."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from .given import INF, KEY, NAN, hparams, minimized, problem, replaced, solve, tuner


class Pair(NamedTuple):
    lr: Any
    decay: Any


def of_attributes(container):
    """Solve a problem whose hyperparameters are attributes."""
    return solve(
        container,
        dynamics=ft.Training(
            lambda p, h, b: jnp.mean((b[0] @ p["w"] - b[1]) ** 2), lambda h: optax.sgd(h.lr)
        ),
    )


LR, DECAY = "hparams['lr']", "hparams['decay']"
ROWS = [
    ("None for the learning rate", lambda: replaced(lr=None), ValueError, LR, "None"),
    ("None for a penalty", lambda: replaced(decay=None), ValueError, DECAY, "None"),
    ("None in a subtree", lambda: replaced(decay={"a": None}), ValueError, "['a']", "None"),
    ("None beside all others", lambda: replaced(x=None), ValueError, "hparams['x']", "None"),
    ("None in a NamedTuple", lambda: of_attributes(Pair(0.1, None)), ValueError, "decay", "None"),
    ("None in a list", lambda: solve([jnp.array(0.1), None]), ValueError, "hparams[1]", "None"),
    ("None at all", lambda: solve(None), ValueError, "no hyperparameters"),
    ("an empty dict", lambda: solve({}), ValueError, "no hyperparameters"),
    ("an empty list", lambda: solve([]), ValueError, "no hyperparameters"),
    ("an empty tuple", lambda: solve(()), ValueError, "no hyperparameters"),
    ("a dict of empty dicts", lambda: solve({"lr": {}, "decay": {}}), ValueError, "no hyperpar"),
    ("an integer", lambda: replaced(lr=1), TypeError, LR, "Write `1.0`"),
    ("a boolean", lambda: replaced(lr=True), TypeError, LR, "the bool True"),
    ("a NumPy integer", lambda: replaced(lr=np.int64(1)), TypeError, LR, "only floats"),
    ("an integer array", lambda: replaced(lr=jnp.array(1)), TypeError, LR, "int32[]"),
    ("unsigned integers", lambda: replaced(lr=np.zeros(2, np.uint8)), TypeError, LR, "uint8[2]"),
    ("an array of booleans", lambda: replaced(lr=jnp.array([True])), TypeError, LR, "bool[1]"),
    ("a complex number", lambda: replaced(lr=1j), TypeError, LR, "the complex 1j"),
    ("a complex array", lambda: replaced(lr=jnp.array(1j)), TypeError, LR, "complex64[]"),
    ("text", lambda: replaced(lr="0.1"), TypeError, LR, "the str '0.1'"),
    ("bytes", lambda: replaced(lr=b"0.1"), TypeError, LR, "the bytes"),
    ("a function", lambda: replaced(lr=optax.constant_schedule(0.1)), TypeError, LR, "a function"),
    ("a class", lambda: replaced(lr=float), TypeError, LR, "a type"),
    ("an optimizer", lambda: replaced(lr=optax.sgd(0.1)), TypeError, LR, "function"),
    ("a set", lambda: replaced(lr={0.1}), TypeError, LR, "a set"),
    ("an object", lambda: replaced(lr=object()), TypeError, LR, "a object"),
    ("an array of objects", lambda: replaced(lr=np.array([None])), TypeError, LR, "object[1]"),
    ("an array of text", lambda: replaced(lr=np.array(["a"])), TypeError, LR, "no numbers"),
    ("an array of dates", lambda: replaced(lr=np.array(["2020"], "M8")), TypeError, LR, "no numb"),
    ("a random key", lambda: replaced(lr=KEY), TypeError, LR, "key<fry>[]"),
    ("a shape without numbers", lambda: replaced(lr=jax.ShapeDtypeStruct((), float)), TypeError, LR),
    ("no number in an array", lambda: replaced(lr=jnp.zeros(0)), ValueError, LR, "holds no number"),
    ("no number in a matrix", lambda: replaced(lr=jnp.zeros((3, 0))), ValueError, LR, "float32[3,0]"),
    ("NaN", lambda: replaced(lr=NAN), ft.NonFiniteError, LR, "itself is not finite"),
    ("infinity", lambda: replaced(lr=INF), ft.NonFiniteError, LR, "itself is not finite"),
    ("NaN in an array", lambda: replaced(decay=jnp.array(NAN)), ft.NonFiniteError, DECAY, "itself"),
    ("a masked array", lambda: replaced(lr=np.ma.array(0.1, mask=True)), ValueError, LR, "masked entries"),
    ("one that is not used", lambda: replaced(x=0.1), ValueError, "does not depend", "['x']"),
    ("one that is missing", lambda: solve({"lr": 0.1}), ValueError, "there is no 'decay'", LR),
    ("none of the right names", lambda: solve({"rate": 0.1}), ValueError, "there is no", "['rate']"),
    ("a number for a dict", lambda: solve(0.1), TypeError, "this happened in", "hparams"),
    ("a list for a dict", lambda: solve([0.1, 0.2]), TypeError, "this happened in", "hparams[0]"),
    ("the problem", lambda: solve(problem()), TypeError, "hparams.dynamics.loss", "a function"),
    ("a generator", lambda: solve(x for x in [0.1]), TypeError, "a generator"),
    ("a namespace", lambda: solve(types.SimpleNamespace(lr=0.1)), TypeError, "SimpleNamespace"),
    ("a vector for a scalar", lambda: replaced(lr=jnp.full(2, 0.1)), TypeError, "step(state", LR),
    ("a vector for a penalty", lambda: replaced(decay=jnp.zeros(2)), TypeError, "scalar", "float32[2]"),
    ("names of two types", lambda: solve({"lr": 0.1, 1: 0.1}), TypeError, "names", "int, str"),
    ("tuples beside strings as names", lambda: solve({"lr": 0.1, ("a", "b"): 0.1}), TypeError, "names", "str, tuple"),
    ("tuples for names", lambda: solve({("a", "lr"): 0.1}), ValueError, "there is no", "('a', 'lr')"),
    ("names of two types in minimize", lambda: minimized({"lr": 0.1, 2: 0.1}), TypeError, "names"),
    ("names of two types in real time", lambda: tuner().init(0.0, {"lr": 0.1, 2: 0.1}), TypeError, "names"),
    ("None in minimize", lambda: minimized(hparams(decay=None)), ValueError, DECAY, "None"),
    ("None in real time", lambda: tuner().init(jnp.zeros(()), {"lr": None}), ValueError, LR, "None"),
    ("None in the check", lambda: ft.check_hypergradient(problem(), hparams(lr=None)), ValueError, LR),
    ("None in the response", lambda: problem().response(hparams(lr=None)), ValueError, LR, "None"),
    ("an integer in the check", lambda: ft.check_hypergradient(problem(), hparams(lr=1)), TypeError, LR),
    ("an integer in the response", lambda: problem().response(hparams(lr=1)), TypeError, LR),
    ("an integer for Auto", lambda: ft.Auto().explain(problem(), hparams(lr=1)), TypeError, LR),
    ("an integer in lower", lambda: ft.Reverse().lower(problem(), hparams(lr=1)), TypeError, LR),
    ("an unused one in lower", lambda: ft.Reverse().lower(problem(), hparams(x=1.0)), ValueError, "['x']"),
]
