# ruff: noqa: E501
# fmt: off
"""Problems whose parts are wrong, or do not fit each other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from ..problems import penalised, squared_error
from .given import INF, KEY, NAN, data, holed, problem, single, solve

X, Y = data()
W = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
BIG = 2**32
NO_ARRAYS = {"a list": [1.0, 2.0], "None": None, "a dict": {"a": X}, "text": "a", "integers": Y.astype(int), "objects": np.array([None])}


def trained(loss=penalised, optimizer=None, **changes):
    optimizer = optimizer or (lambda h: optax.sgd(h["lr"]))
    options = {name: changes.pop(name) for name in ("has_state", "key") if name in changes}
    return solve(dynamics=ft.Training(loss, optimizer, **options), **changes)


def batches(indices, rows=3, **options):
    return ft.Minibatches(np.zeros(rows, np.float32), indices, **options)


class Steps(ft.Dynamics):
    """A dynamics whose step returns what it is told to."""

    start: Any
    change: Any

    def init(self, params, hparams):
        return self.start

    def step(self, state, hparams, batch):
        return self.change(state, hparams["a"])


def stepped(start, change):
    made = ft.Problem(
        Steps(start, change), lambda s, h, b: jnp.sum(s["w"]), None, ft.FullBatch(None, 2)
    )
    return ft.Reverse()(made, {"a": 1.0})


def folds(changed=lambda k: {}):
    return ft.Mean([problem(**changed(k)) for k in range(2)])


class NoStep:
    def init(self, params, hparams):
        return params


SHUFFLED = functools.partial(ft.Minibatches.shuffled, np.zeros(3), key=KEY)
ROWS = [
    # The parts
    ("the objective is a number", lambda: problem(objective=3.0), TypeError, "objective", "3.0"),
    ("the objective is None", lambda: problem(objective=None), TypeError, "objective", "None"),
    ("no objectives", lambda: problem(objective={}), TypeError, "non-empty dict"),
    ("a number among objectives", lambda: problem(objective={"lr": 1}), TypeError, "['lr']"),
    ("an objective of two", lambda: problem(objective=lambda s, h: 0.0), TypeError, "(s, h)"),
    ("an objective of none", lambda: problem(objective=lambda: 0.0), TypeError, "objective(state"),
    ("an objective too few", lambda: solve(objective={"lr": squared_error}), ValueError, "'decay'] has no"),
    ("an objective too many", lambda: solve(objective=dict.fromkeys(("lr", "decay", "x"), squared_error)), ValueError, "objective['x'] names no"),
    ("objectives by number", lambda: solve(objective={0: squared_error}), ValueError, "objective[0]"),
    ("objectives and a list", lambda: solve([0.1], objective={"lr": squared_error}), TypeError, "needs a dict"),
    ("a vector from the objective", lambda: solve(objective=lambda s, h, b: s.params["w"]), ValueError, "float32[3]", "Reduce"),
    ("nothing from the objective", lambda: solve(objective=lambda s, h, b: None), ValueError, "`return`"),
    ("a dict from the objective", lambda: solve(objective=lambda s, h, b: {"a": 1.0}), ValueError, "one scalar"),
    ("a Python number from the objective", lambda: solve(objective=lambda s, h, b: 1.0), ValueError, "objective"),
    ("a count from the objective", lambda: solve(objective=lambda s, h, b: jnp.sum(s.params["w"] > 0)), TypeError, "count"),
    ("an accuracy", lambda: solve(objective=lambda s, h, b: jnp.mean((s.params["w"] > 0).astype(float))), ValueError, "accuracy"),
    ("a complex objective", lambda: solve(objective=lambda s, h, b: jnp.sum(s.params["w"]) * 1j), TypeError, "complex64[]"),
    ("`float` in the objective", lambda: solve(objective=lambda s, h, b: float(s.params["b"])), Exception, "objective is compiled", "objective(state, hparams, validation)"),
    ("NumPy in the objective", lambda: solve(objective=lambda s, h, b: np.sum(np.asarray(s.params["w"]))), Exception, "objective is compiled", "objective(state, hparams, validation)"),
    ("an `if` in the objective", lambda: solve(objective=lambda s, h, b: s.params["b"] if s.params["b"] > 0 else 0.0), Exception, "objective is compiled", "objective(state, hparams, validation)"),
    ("a name the objective does not find", lambda: solve(objective=lambda s, h, b: s.params["v"]), ValueError, "there is no 'v'", "objective"),
    ("an attribute the objective does not find", lambda: solve(objective=lambda s, h, b: s.weights), AttributeError, "objective(state", "state.params['w']"),
    ("trajectory is text", lambda: problem(trajectory="yes"), TypeError, "trajectory='yes'"),
    ("trajectory is a number", lambda: problem(trajectory=1), TypeError, "trajectory=1"),
    ("the dynamics is a function", lambda: problem(dynamics=penalised), TypeError, "a subclass of `foretune.Dynamics`"),
    ("the dynamics is a class", lambda: problem(dynamics=Steps), TypeError, "give an instance"),
    ("the dynamics is None", lambda: problem(dynamics=None), TypeError, "the dynamics is None"),
    ("the dynamics has no step", lambda: problem(dynamics=NoStep()), TypeError, "a subclass of `foretune.Dynamics`", "NoStep"),
    ("the dynamics is an optimizer", lambda: problem(dynamics=optax.sgd(0.1)), TypeError, "foretune.Training"),
    ("the start is a function of two", lambda: problem(init=lambda a, b: 0.0), TypeError, "`init(hparams)`"),
    ("the start is a function of none", lambda: problem(init=lambda: 0.0), TypeError, "`init(hparams)`"),
    ("replace a part that is none", lambda: problem().replace(bathces=1), TypeError, "bathces"),
    ("no steps of the response", lambda: problem(batches=ft.FullBatch((X, Y), 0)), ValueError, "steps=0"),
    ("masked validation", lambda: problem(validation=(np.ma.masked_less(X, 0), Y)), ValueError, "validation[0] has masked entries"),
    ("masked full batches", lambda: ft.FullBatch((np.ma.masked_less(X, 0), Y), 3), ValueError, "[0] has masked entries"),
    ("masked rows of minibatches", lambda: ft.Minibatches(np.ma.masked_less(X, 0), np.zeros((2, 1), int)), ValueError, "data has masked entries"),
    ("masked indices", lambda: batches(np.ma.array([[0], [1]], mask=[[False], [True]])), ValueError, "indices has masked entries"),
    ("masked parameters", lambda: solve(init={"w": np.ma.array(W["w"], mask=[1, 0, 0]), "b": W["b"]}), ValueError, "['w'] has masked entries"),
    # Training
    ("a loss of two", lambda: ft.Training(lambda p, h: 0.0, optax.sgd(0.1)), TypeError, "(p, h)"),
    ("a loss with a state, not said", lambda: ft.Training(lambda p, h, b, s: 0.0, optax.sgd(0.1)), TypeError, "(p, h, b, s)"),
    ("a loss without its key", lambda: ft.Training(penalised, optax.sgd(0.1), key=KEY), TypeError, "key="),
    ("the loss is a number", lambda: ft.Training(0.1, optax.sgd(0.1)), TypeError, "the float 0.1"),
    ("the optimizer is not called", lambda: ft.Training(penalised, optax.sgd), TypeError, "one of Optax's functions"),
    ("the optimizer is a number", lambda: ft.Training(penalised, 0.1), TypeError, "optimizer", "0.1"),
    ("the optimizer is None", lambda: ft.Training(penalised, None), TypeError, "optimizer", "None"),
    ("the optimizer is text", lambda: ft.Training(penalised, "sgd"), TypeError, "optimizer", "'sgd'"),
    ("the optimizer takes nothing", lambda: ft.Training(penalised, lambda: optax.sgd(0.1)), TypeError, "optimizer(hparams)"),
    ("the optimizer returns a number", lambda: trained(optimizer=lambda h: h["lr"]), TypeError, "must be an Optax"),
    ("the optimizer returns nothing", lambda: trained(optimizer=lambda h: None), TypeError, "must be an Optax", "None"),
    ("an optimizer of several steps", lambda: ft.Training(penalised, optax.MultiSteps(optax.sgd(0.1), 2)), TypeError, "MultiSteps"),
    ("a comparison in a schedule", lambda: trained(optimizer=lambda h: optax.sgd(optax.exponential_decay(0.1, 3, h["lr"]))), Exception, "schedule"),
    ("a name the optimizer does not find", lambda: trained(optimizer=lambda h: optax.sgd(h["rate"])), ValueError, "there is no 'rate'", "hparams['lr']"),
    ("the key is a seed", lambda: ft.Training(lambda p, h, b, key: 0.0, optax.sgd(0.1), key=0), TypeError, "key", "jax.random.key"),
    ("the key is floats", lambda: ft.Training(lambda p, h, b, key: 0.0, optax.sgd(0.1), key=jnp.zeros(2)), TypeError, "key", "jax.random.key"),
    ("has_state is text", lambda: ft.Training(penalised, optax.sgd(0.1), has_state="no"), TypeError, "has_state"),
    ("a vector from the loss", lambda: trained(lambda p, h, b: p["w"] * h["lr"]), TypeError, "scalar", "[3]"),
    ("nothing from the loss", lambda: trained(lambda p, h, b: None), TypeError, "loss: None"),
    ("a Python number from the loss", lambda: trained(lambda p, h, b: 1.0), TypeError, "loss"),
    ("an integer from the loss", lambda: trained(lambda p, h, b: jnp.sum(p["w"] > 0)), TypeError, "int32[]"),
    ("a pair from the loss", lambda: trained(lambda p, h, b: (penalised(p, h, b), 1)), TypeError, "has_state=True"),
    ("no pair of start and model state", lambda: trained(lambda p, h, b, s: (0.0, s), has_state=True), ValueError, "the pair (params, model_state)"),
    ("the model state does not return", lambda: trained(lambda p, h, b, s: penalised(p, h, b), has_state=True, init=(W, np.zeros(2))), TypeError, "the pair (value, model_state)"),
    ("nothing to train", lambda: solve(init={"w": np.zeros(3, int)}), ValueError, "nothing to train"),
    ("no parameters", lambda: solve(init={}), ValueError, "nothing to train"),
    ("parameters are None", lambda: solve(init=None), ValueError, "nothing to train"),
    ("parameters are text", lambda: solve(init="zeros"), ValueError, "nothing to train"),
    ("parameters of text", lambda: solve(init={"w": np.array(["a"])}), TypeError, "no numbers"),
    ("a parameter of another shape", lambda: solve(init={"w": np.zeros(2, np.float32), "b": W["b"]}), TypeError, "step(state", "float32[2]"),
    ("a parameter is missing", lambda: solve(init={"w": W["w"]}), ValueError, "there is no 'b'"),
    ("Python numbers as parameters", lambda: solve(init={"w": [0.0, 0.0, 0.0], "b": 0.0}), ValueError, "nothing to train"),
    # Other dynamics
    ("a step changes a shape", lambda: stepped({"w": jnp.zeros(2)}, lambda s, a: {"w": jnp.zeros(3) + a}), ValueError, "float32[2] to float32[3]"),
    ("a step adds a leaf", lambda: stepped({"w": jnp.zeros(2)}, lambda s, a: {"w": s["w"] + a, "v": a}), ValueError, "in s_1 but not in s_0"),
    ("a step loses a leaf", lambda: stepped({"w": jnp.zeros(2), "v": jnp.ones(2)}, lambda s, a: {"w": s["w"] + a}), ValueError, "in s_0 but not in s_1"),
    ("a step changes a type", lambda: stepped({"w": jnp.zeros(2), "n": jnp.array(0)}, lambda s, a: {"w": s["w"] + a, "n": s["n"] + a}), ValueError, "int32[] to float32[]"),
    ("a state of Python numbers", lambda: stepped({"w": 0.0}, lambda s, a: {"w": s["w"] + a}), ValueError, "as an array"),
    ("a step returns nothing", lambda: stepped({"w": jnp.zeros(2)}, lambda s, a: None), ValueError, "changes the structure"),
    ("an initial state of nothing", lambda: stepped(None, lambda s, a: s), Exception, "this happened in"),
    # Batches
    ("no batches", lambda: problem(batches=None), ValueError, "FullBatch(None, steps=T)"),
    ("an empty dict of batches", lambda: problem(batches={}), ValueError, "batches holds no array"),
    ("a list of batches", lambda: problem(batches=[(X, Y)] * 3), TypeError, "a list of 3 batches"),
    ("a generator of batches", lambda: problem(batches=(X for _ in range(3))), ValueError, "a generator"),
    ("text for batches", lambda: problem(batches="train.csv"), ValueError, "'train.csv'"),
    ("axes that differ", lambda: problem(batches={"x": X, "y": Y[:4]}), ValueError, "differ", "['y']: float32[4]"),
    ("a scalar among batches", lambda: problem(batches={"x": X, "t": np.float32(1)}), ValueError, "['t'] is float32[]"),
    ("text among batches", lambda: problem(batches={"x": X, "t": "a"}), ValueError, "the str 'a'"),
    ("an array of text among batches", lambda: problem(batches={"x": X, "t": np.array(list("abcdef"))}), TypeError, "no numbers", "['t']"),
    ("batches of no steps", lambda: problem(batches=np.zeros((0, 2))), ValueError, "holds no number"),
    ("a list of numbers as batches", lambda: problem(batches=[1.0, 2.0]), TypeError, "Python list"),
    ("rows for steps", lambda: problem(batches=(np.zeros((25, 3), np.float32), np.zeros(25, np.float32)), validation=data(25)), UserWarning, "whole data set"),
    ("a batch that does not fit the loss", lambda: solve(batches=ft.FullBatch((X[:, :2], Y), 3)), TypeError, "step(state", "float32[6,2]"),
    ("validation that does not fit", lambda: solve(validation=(X[:, :2], Y)), TypeError, "objective(state", "float32[6,2]"),
    ("no validation", lambda: solve(validation=None), TypeError, "validation: None"),
    ("a list as validation", lambda: problem(validation=[1.0, 2.0]), TypeError, "Python list", "validation"),
    ("text as validation", lambda: solve(validation="valid.csv"), Exception, "objective(state", "valid.csv"),
    ("validation of text", lambda: problem(validation=np.array(["a"])), TypeError, "no numbers", "validation"),
    ("stacked batches without rows", lambda: problem(batches=(np.zeros((3, 0, 3), np.float32), np.zeros((3, 0), np.float32))), ValueError, "batches[0] is float32[3,0,3]", "holds no number"),
    ("validation without rows", lambda: problem(validation=(X[:0], Y[:0])), ValueError, "validation[0] is float32[0,3]", "holds no number"),
    ("half a step", lambda: ft.FullBatch(X, 2.5), ValueError, "steps=2.5"),
    ("steps as text", lambda: ft.FullBatch(X, "3"), ValueError, "steps=3", "whole number"),
    ("a negative number of steps", lambda: ft.FullBatch(X, -1), ValueError, "steps=-1"),
    ("2^31 steps", lambda: ft.FullBatch(X, 2**31), ValueError, "steps=2147483648", "2**31 - 1"),
    ("True steps", lambda: ft.FullBatch(X, True), ValueError, "steps=True"),
    ("no steps given", lambda: ft.FullBatch(X, None), ValueError, "steps=None"),
    ("a full batch of nothing", lambda: ft.FullBatch(np.zeros((0, 3)), 3), ValueError, "holds no number"),
    ("a full batch of no columns", lambda: ft.FullBatch({"x": np.zeros((5, 0))}, 3), ValueError, "['x'] is"),
    ("lists in a full batch", lambda: ft.FullBatch({"x": [[1.0], [2.0]]}, 3), TypeError, "Python list"),
    ("text in a full batch", lambda: ft.FullBatch(np.array(["a"]), 3), TypeError, "no numbers"),
    # Minibatches
    ("indices of floats", lambda: batches(np.zeros((2, 1))), TypeError, "integer array", "float"),
    ("indices of booleans", lambda: batches(np.zeros((2, 3), bool)), TypeError, "integer array", "bool"),
    ("indices as a list", lambda: batches([[0, 1]]), TypeError, "integer array", "list"),
    ("indices of text", lambda: batches(np.array([["0"]])), TypeError, "indices", "no numbers"),
    ("a scalar index", lambda: batches(np.array(1)), ValueError, "give (T, batch size)"),
    ("no indices", lambda: batches(np.zeros((0, 2), int)), ValueError, "[0,2]", "not empty"),
    ("indices are None", lambda: batches(None), TypeError, "integer array", "None"),
    ("empty minibatches", lambda: batches(np.zeros((2, 0), int)), ValueError, "[2,0]", "not empty"),
    ("an index too high", lambda: batches(np.array([[0, 3]])), ValueError, "from 0 to 3", "3 examples"),
    ("a negative index", lambda: batches(np.array([[-1, 2]])), ValueError, "from -1 to 2"),
    ("a 64-bit index that would wrap to 0", lambda: batches(np.array([[BIG]], np.int64)), ValueError, str(BIG)),
    ("an unsigned index that would wrap", lambda: batches(np.array([[BIG + 1]], np.uint64)), ValueError, str(BIG + 1)),
    ("an unsigned -1", lambda: batches(np.array([[-1]]).astype(np.uint32)), ValueError, str(BIG - 1)),
    ("the largest unsigned index", lambda: batches(np.array([[2**64 - 1]], np.uint64)), ValueError, str(2**64 - 1)),
    ("an 8-bit index that is negative", lambda: batches(np.array([[200]], np.uint8).astype(np.int8), 300), ValueError, "-56"),
    ("a 64-bit index with gather", lambda: batches(np.array([[BIG + 1]], np.int64), gather=lambda d, i: d[i]), ValueError, str(BIG + 1)),
    ("rows that differ in number", lambda: ft.Minibatches((X, Y[:4]), np.zeros((2, 1), int)), ValueError, "differ"),
    ("no rows", lambda: ft.Minibatches(np.zeros((0, 3)), np.zeros((2, 1), int)), ValueError, "holds no number"),
    ("no data", lambda: ft.Minibatches(None, np.zeros((2, 1), int)), ValueError, "holds no array"),
    ("a list as data", lambda: ft.Minibatches([1.0, 2.0], np.zeros((2, 1), int)), TypeError, "Python list"),
    ("rows without columns", lambda: ft.Minibatches(np.zeros((4, 0)), np.zeros((2, 1), int)), ValueError, "holds no number"),
    ("gather is no function", lambda: batches(np.zeros((2, 1), int), gather=3), TypeError, "gather"),
    ("gather takes one", lambda: batches(np.zeros((2, 1), int), gather=lambda d: d), TypeError, "gather(data, indices)"),
    ("a batch larger than the data", lambda: SHUFFLED(batch_size=4, steps=1), ValueError, "batch_size=4", "3 examples"),
    ("a batch of none", lambda: SHUFFLED(batch_size=0, steps=1), ValueError, "batch_size=0"),
    ("half a row in a batch", lambda: SHUFFLED(batch_size=1.5, steps=1), ValueError, "batch_size=1.5"),
    ("a batch size of text", lambda: SHUFFLED(batch_size="2", steps=1), ValueError, "batch_size"),
    ("no steps to shuffle for", lambda: SHUFFLED(batch_size=1, steps=0), ValueError, "steps=0"),
    ("a shuffle by a seed", lambda: SHUFFLED(batch_size=1, steps=1, key=0), TypeError, "key", "jax.random.key"),
    ("a shuffle without a key", lambda: SHUFFLED(batch_size=1, steps=1, key=None), TypeError, "key", "jax.random.key"),
    ("a shuffle of an empty table", lambda: ft.Minibatches.shuffled(np.zeros((0, 2)), batch_size=1, steps=1, key=KEY), ValueError, "0 examples"),
    ("a shuffle of 10^12 steps", lambda: SHUFFLED(batch_size=1, steps=10**12), ValueError, "steps=1000000000000"),
    # Not finite
    ("NaN in the data", lambda: solve(batches=ft.FullBatch((holed(X), Y), 3)), ft.NonFiniteError, "The data hold NaN or infinity: batches", "[0]", "1 of 18"),
    ("infinity in the targets", lambda: solve(batches=ft.FullBatch((X, holed(Y, INF)), 3)), ft.NonFiniteError, "The data hold NaN or infinity: batches", "[1]", "1 of 6"),
    ("NaN in stacked batches", lambda: solve(batches=(np.stack([X, X, holed(X)]), np.stack([Y] * 3))), ft.NonFiniteError, "The data hold NaN or infinity: batches", "[0]", "1 of 54"),
    ("NaN in a minibatch's rows", lambda: solve(batches=ft.Minibatches((holed(X), Y), np.zeros((2, 2), int))), ft.NonFiniteError, "The data hold NaN or infinity: batches", "[0]", "1 of 18"),
    ("NaN in the start", lambda: solve(init=W | {"w": holed(W["w"])}), ft.NonFiniteError, "The initial parameters", "hold NaN or infinity", "['w']", "1 of 3"),
    ("infinity in the start", lambda: solve(init=W | {"b": np.float32(INF)}), ft.NonFiniteError, "The initial parameters", "hold NaN or infinity", "['b']"),
    ("NaN in a start made by a function", lambda: solve(init=lambda h: {"w": jnp.full(3, NAN) * h["lr"], "b": h["lr"]}), ft.NonFiniteError, "The initial parameters", "hold NaN or infinity", "['w']", "3 of 3"),
    ("NaN in the validation data", lambda: solve(validation=(holed(X), Y)), ft.NonFiniteError, "The validation data hold NaN or infinity: validation", "[0]", "1 of 18"),
    ("NaN in a validation target", lambda: solve(validation=(X, holed(Y))), ft.NonFiniteError, "The validation data hold NaN or infinity: validation", "[1]", "1 of 6"),
    ("NaN in the data, forward", lambda: solve(engine=ft.Forward(), batches=ft.FullBatch((holed(X), Y), 3)), ft.NonFiniteError, "The data hold NaN or infinity: batches", "[0]"),
    ("NaN in the data, truncated", lambda: solve(engine=ft.Truncated(2), batches=ft.FullBatch((holed(X), Y), 3)), ft.NonFiniteError, "The data hold NaN or infinity: batches", "[0]"),
    ("a rate that diverges", lambda: solve({"lr": 1e4, "decay": 0.0}, steps=40), ft.NonFiniteError, "diverges", "smaller learning rate"),
    # Folds
    ("no folds", lambda: ft.Mean([]), TypeError, "an empty one"),
    ("folds of a draw", lambda: ft.Mean(lambda key: problem(), 4), TypeError, "Mean.of_draws(draw, n)"),
    ("folds of one draw", lambda: ft.Mean(lambda key: problem()), TypeError, "Mean.of_draws(draw, n)"),
    ("folds that are draws", lambda: ft.Mean([lambda key: problem()] * 2), TypeError, "fold 0 is a function", "Mean.of_draws(draw, n)"),
    ("full batches drawn anew", lambda: problem().batches.reshuffled(KEY), TypeError, "FullBatch", "Minibatches.shuffled"),
    ("folds of a problem", lambda: ft.Mean(problem()), TypeError, "a list of problems"),
    ("a fold that is nothing", lambda: ft.Mean([problem(), None]), TypeError, "fold 1 is None"),
    ("draws by no key", lambda: ft.Mean.of_draws(lambda: problem(), 2), TypeError, "draw(key)"),
    ("no draws", lambda: ft.Mean.of_draws(lambda key: problem(), 0), ValueError, "n=0"),
    ("folds of folds", lambda: ft.Mean([folds(), folds()]), TypeError, "in one list"),
    ("folds of other lengths", lambda: folds(lambda k: {"steps": 3 + k}), ValueError, "number of steps"),
    ("folds of other shapes", lambda: folds(lambda k: {"validation": (X[k:], Y[k:])}), ValueError, "float32[5,3]", "mask"),
    ("folds with other functions", lambda: folds(lambda k: {"objective": lambda s, h, b: squared_error(s, h, b) * (k + 1)}), ValueError, "closes over"),
    ("folds of other kinds of batches", lambda: folds(lambda k: {"batches": ft.FullBatch((X, Y), 3) if k else (np.stack([X] * 3), np.stack([Y] * 3))}), ValueError, "differ in kind"),
    ("folds that differ in trajectory", lambda: folds(lambda k: {"trajectory": bool(k)}), ValueError, "trajectory"),
    ("folds that differ in objectives", lambda: folds(lambda k: {"objective": {"lr": squared_error, "decay": squared_error} if k else squared_error}), ValueError, "only one of them has objective"),
    ("folds that differ in structure", lambda: folds(lambda k: {"validation": (X, Y) if k else {"x": X}}), ValueError, "differ in structure"),
    ("another objective for folds", lambda: folds().replace(objective=squared_error), TypeError, "change the problems"),
    ("NaN in one fold's data", lambda: ft.Reverse()(folds(lambda k: {"batches": ft.FullBatch((holed(X) if k else X, Y), 3)}), {"lr": 0.1, "decay": 0.1}), ft.NonFiniteError, "The data hold NaN or infinity: batches"),
    # Devices
    ("a mesh of no device", lambda: ft.mesh(data=0), ValueError, "data=0"),
    ("a mesh of too many devices", lambda: ft.mesh(data=1000), ValueError, "1000 devices"),
    ("a mesh of text", lambda: ft.mesh(data="all"), ValueError, "data=all"),
    ("shard without a mesh", lambda: ft.shard(problem(), None), TypeError, "a mesh is"),
    ("shard on a number", lambda: ft.shard(problem(), 4), TypeError, "a mesh is"),
    ("parameters of a batch", lambda: ft.shard(X, ft.mesh(data=1), params=jax.P()), TypeError, "for a problem"),
    ("a single row for RealTime's loss", lambda: ft.Reverse()(ft.Problem(ft.Training(single, optax.sgd(0.1)), squared_error, {}, ft.FullBatch(X, 2)), {"lr": 0.1}), ValueError, "nothing to train"),
    # Dropout
    *((f"dropout of {name}", lambda x=x: ft.dropout(x, 0.1, key=KEY), TypeError, "dropout: x must be floating-point") for name, x in NO_ARRAYS.items()),
    ("dropout of an empty array", lambda: ft.dropout(X[:0], 0.1, key=KEY), ValueError, "dropout: x is float32[0,3]", "holds no number"),
    *((f"dropout at a rate of {rate!r}", lambda rate=rate: ft.dropout(X, rate, key=KEY), ValueError, "dropout: the rate must lie in [0, 1)") for rate in (None, {"a": 0.1}, "a", 1.0, -0.1, NAN, 0.1j, True)),
    ("dropout at no rates", lambda: ft.dropout(X, np.zeros(0), key=KEY), ValueError, "dropout: the rate is float64[0]"),
    ("dropout at rates of another shape", lambda: ft.dropout(X, np.zeros(5), key=KEY), ValueError, "dropout: the rate is float64[5]", "(6, 3)"),
    ("dropout at traced rates of another shape", lambda: jax.jit(lambda r: ft.dropout(X, r, key=KEY))(np.zeros(5)), ValueError, "dropout: the rate is float32[5]"),
    ("dropout without a key", lambda: ft.dropout(X, 0.1, key=None), TypeError, "the key of dropout"),
    ("dropout by a seed", lambda: ft.dropout(X, 0.1, key=0), TypeError, "the key of dropout"),
]
