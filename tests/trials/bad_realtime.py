# ruff: noqa: E501
# fmt: off
"""Real-time tuning with wrong options, states, windows and streams."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from .given import (
    INF,
    NAN,
    VALIDATION,
    WINDOW,
    begun,
    error,
    holed,
    ran,
    single,
    tuned,
    tuned_step,
    tuner,
    updated,
)

ROWS_OF_DATA = np.ones(4, np.float32)
TWO = {"lr": 0.1, "momentum": 0.5}


def two(**options):
    """A tuner of two constants."""
    dynamics = ft.Training(single, lambda h: optax.sgd(h["lr"], h["momentum"]))
    return tuner(dynamics=dynamics, **options)


def donated():
    chosen = tuner(donate=True)
    state = chosen.init(jnp.zeros(()), {"lr": 0.1})
    chosen.update(state, WINDOW, VALIDATION)
    return chosen.update(state, WINDOW, VALIDATION)


def then(window=WINDOW, validation=VALIDATION):
    """A second update, of something else."""
    chosen = tuner()
    state, _ = chosen.update(chosen.init(jnp.zeros(()), {"lr": 0.1}), WINDOW, VALIDATION)
    return chosen.update(state, window, validation)


def minibatches(window=2, **options):
    return ran(ft.Minibatches(ROWS_OF_DATA, np.zeros((4, 2), int)), window=window, **options)


LR = "hparams['lr']"
ROWS = [
    # Options
    ("discount 0", lambda: tuner(discount=0), ValueError, "discount=0", "(0, 1]"),
    ("discount 2", lambda: tuner(discount=2), ValueError, "discount=2"),
    ("discount NaN", lambda: tuner(discount=NAN), ValueError, "discount=nan"),
    ("rollback 1", lambda: tuner(rollback=1.0), ValueError, "rollback=1.0"),
    ("rollback infinite", lambda: tuner(rollback=INF), ValueError, "rollback=inf"),
    ("chunk 0", lambda: tuner(chunk=0), ValueError, "chunk=0"),
    ("a mesh that is none", lambda: tuner(mesh=4), TypeError, "a mesh is"),
    ("an optimizer that is none", lambda: tuner(optimizer=0.1), TypeError, "optimizer must be"),
    ("a dynamics that is none", lambda: tuner(dynamics=single), TypeError, "the dynamics is a function"),
    ("no dynamics", lambda: tuner(dynamics=None), TypeError, "the dynamics is None"),
    ("an objective that is none", lambda: tuner(objective=None), TypeError, "objective", "None"),
    ("an objective of two", lambda: tuner(objective=lambda s, h: 0.0), TypeError, "(s, h)"),
    ("the paper's, with a class", lambda: ft.RealTime.paper(ft.Training, error), TypeError, "a class"),
    ("constraints of another name", lambda: begun(constraints={"rate": ft.NonNegative()}), ValueError, "constraints['rate']"),
    ("a class for a constraint", lambda: begun(constraints={"lr": ft.NonNegative}), TypeError, "is a class"),
    ("a start outside its set", lambda: begun(constraints={"lr": ft.Box(1.0, 2.0)}), UserWarning, f"{LR} starts outside"),
    ("a log from 0", lambda: begun(hparams={"lr": 0.0}, constraints={"lr": ft.Log()}), ValueError, LR, "Start inside"),
    # init
    ("no hyperparameters", lambda: begun(hparams={}), ValueError, "no hyperparameters"),
    ("None for hyperparameters", lambda: begun(hparams=None), ValueError, "no hyperparameters"),
    ("None for the rate", lambda: begun(hparams={"lr": None}), ValueError, LR, "None"),
    ("an integer rate", lambda: begun(hparams={"lr": 1}), TypeError, LR, "Write `1.0`"),
    ("a rate of NaN", lambda: begun(hparams={"lr": NAN}), ft.NonFiniteError, LR, "is not finite"),
    ("an infinite rate", lambda: begun(hparams={"lr": INF}), ft.NonFiniteError, LR, "is not finite"),
    ("a rate that is missing", lambda: begun(hparams={"rate": 0.1}), ValueError, "there is no 'lr'"),
    ("parameters of NaN", lambda: begun(jnp.array([0.0, NAN])), ft.NonFiniteError, "params", "1 of 2"),
    ("parameters of infinity", lambda: begun({"w": jnp.array(INF)}), ft.NonFiniteError, "params['w']", "is not finite"),
    ("no parameters", lambda: begun(None), ValueError, "nothing to train"),
    ("integer parameters", lambda: begun(jnp.array(1)), ValueError, "nothing to train"),
    ("a Python number as parameters", lambda: begun(0.0), ValueError, "nothing to train"),
    ("parameters of text", lambda: begun(np.array(["a"])), TypeError, "no numbers"),
    ("the arguments of init swapped", lambda: begun({"lr": 0.1}, jnp.zeros(2)), Exception, "hparams"),
    # update
    ("the state is None", lambda: updated(state=None), TypeError, "takes a state of `init`"),
    ("the state is the parameters", lambda: updated(state=jnp.zeros(())), TypeError, "takes a state of `init`"),
    ("the state is the result of update", lambda: updated(state=(begun(), {})), TypeError, "takes a state of `init`", "tuple"),
    ("the state of another tuner", lambda: tuner().update(two().init(jnp.zeros(()), TWO), WINDOW, VALIDATION), ValueError, "does not"),
    ("the state of another optimizer", lambda: tuner(optimizer=optax.sgd(0.1)).update(begun(), WINDOW, VALIDATION), ValueError, "this state does not fit this tuner"),
    ("a state that was donated", donated, ValueError, "`donate=True`"),
    ("an empty window", lambda: updated(np.zeros((0, 4), np.float32)), ValueError, "the window is empty"),
    ("a window of nothing", lambda: updated(None), ValueError, "the window is empty"),
    ("a window of an empty dict", lambda: updated({}), ValueError, "the window is empty"),
    ("a window of minibatches without rows", lambda: updated(np.zeros((2, 0), np.float32)), ValueError, "window", "holds no number"),
    ("a window of a scalar", lambda: updated(np.float32(1)), ValueError, "window", "leading axis"),
    ("a window of lists", lambda: updated([[1.0, 2.0]]), TypeError, "window is a Python list"),
    ("a window of text", lambda: updated(np.array(["a"])), TypeError, "no numbers"),
    ("a window of text itself", lambda: updated("window"), ValueError, "window", "'window'"),
    ("a window of axes that differ", lambda: updated((np.ones((2, 4)), np.ones((3, 4)))), ValueError, "differ"),
    ("a window that does not fit the loss", lambda: updated({"x": WINDOW}), Exception, "step(state", "batch['x']"),
    ("a window of an empty Minibatches", lambda: updated(ft.Minibatches(ROWS_OF_DATA, np.zeros((0, 2), int))), ValueError, "(T, batch size)", "not empty"),
    ("indices out of range in a window", lambda: updated(ft.Minibatches(ROWS_OF_DATA, np.full((2, 2), 4))), ValueError, "4 examples"),
    ("no validation", lambda: updated(validation=None), Exception, "objective(state", "validation"),
    ("validation of lists", lambda: updated(validation=[1.0, 2.0]), TypeError, "validation is a Python list"),
    ("validation of text", lambda: updated(validation=np.array(["a"])), TypeError, "no numbers"),
    ("validation that does not fit", lambda: updated(validation={"x": VALIDATION}), Exception, "objective(state"),
    ("another window than before", lambda: then({"x": WINDOW}), Exception, "step(state", "batch['x']"),
    ("other validation than before", lambda: then(validation={"x": VALIDATION}), Exception, "objective(state"),
    ("NaN in the window", lambda: updated(holed(WINDOW)), ft.NonFiniteError, "The data hold NaN", "step 1 of 2", "1 of 8"),
    ("NaN in the last minibatch", lambda: updated(holed(WINDOW, at=-1)), ft.NonFiniteError, "The data hold NaN", "step 2 of 2"),
    ("infinity in the window", lambda: updated(holed(WINDOW, INF)), ft.NonFiniteError, "The data hold NaN"),
    ("NaN in the validation data", lambda: updated(validation=holed(VALIDATION)), ft.NonFiniteError, "window 0", "The validation data hold NaN", "1 of 4"),
    ("NaN in the rows of Minibatches", lambda: updated(ft.Minibatches(holed(ROWS_OF_DATA), np.zeros((2, 2), int))), ft.NonFiniteError, "The data hold NaN"),
    ("NaN in the state's parameters", lambda: updated(state=begun()._replace(train=begun().train._replace(params=jnp.array(NAN)))), ft.NonFiniteError, "state.train.params", "begins with"),
    ("NaN in the state's rate", lambda: updated(state=begun()._replace(hparams={"lr": jnp.array(NAN)})), ft.NonFiniteError, LR, "begins with"),
    ("a rate that diverges, not rolled back", lambda: updated(np.ones((60, 4), np.float32), state=begun(hparams={"lr": 1e30}), rollback=None), ft.NonFiniteError, "diverges"),
    # windows and run
    ("windows of 0", lambda: list(ft.windows([VALIDATION], 0)), ValueError, "n=0"),
    ("windows of 1.5", lambda: list(ft.windows([VALIDATION], 1.5)), ValueError, "n=1.5"),
    ("windows of None", lambda: list(ft.windows([VALIDATION], None)), ValueError, "n=None"),
    ("windows of one batch", lambda: list(ft.windows((WINDOW, VALIDATION), 2)), TypeError, "looks like one batch"),
    ("windows of an array", lambda: list(ft.windows(WINDOW, 2)), TypeError, "looks like one batch"),
    ("windows of a number", lambda: list(ft.windows(3, 2)), TypeError, "an iterable of batches"),
    ("windows of None at all", lambda: list(ft.windows(None, 2)), TypeError, "an iterable of batches"),
    ("windows of text", lambda: list(ft.windows("train", 2)), TypeError, "an iterable of batches"),
    ("windows of text batches", lambda: list(ft.windows(["a", "b"], 2)), TypeError, "minibatch 0 is <U1[]", "no numbers"),
    ("windows of lists", lambda: list(ft.windows([[1.0, 2.0]], 1)), TypeError, "is a Python list"),
    ("windows of shapes that change", lambda: list(ft.windows(iter([VALIDATION, VALIDATION[:3]]), 2)), ValueError, "minibatch 1", "drop_last"),
    ("windows of types that change", lambda: list(ft.windows([VALIDATION, VALIDATION.astype(int)], 2)), ValueError, "minibatch 1"),
    ("windows of structures that change", lambda: list(ft.windows([VALIDATION, {"x": VALIDATION}], 2)), ValueError, "minibatch 1"),
    ("a run of no steps", lambda: ran(steps=0), ValueError, "steps=0"),
    ("a run of half a step", lambda: ran(steps=0.5), ValueError, "steps=0.5"),
    ("a run of windows of 0", lambda: ran(window=0), ValueError, "window=0"),
    ("a run over one batch", lambda: ran(VALIDATION), TypeError, "looks like one batch"),
    ("a run over nothing", lambda: ran([]), ValueError, "the training stream is empty"),
    ("a run over None", lambda: ran(None), TypeError, "an iterable of batches"),
    ("a run without validation", lambda: ran(validation=[]), ValueError, "the validation stream is empty"),
    ("a run with one validation batch", lambda: ran(validation=VALIDATION), TypeError, "looks like one batch"),
    ("a run with None for validation", lambda: ran(validation=None), TypeError, "an iterable of batches"),
    ("a run whose validation has None", lambda: ran(validation=itertools.repeat(None)), Exception, "objective(state"),
    ("a run from NaN", lambda: ran(hparams={"lr": NAN}), ft.NonFiniteError, LR),
    ("a run with NaN in a batch", lambda: ran([VALIDATION, holed(VALIDATION)]), ft.NonFiniteError, "The data hold NaN", "step 2 of 2", "attribute `run`"),
    ("a run with NaN in validation", lambda: ran(validation=itertools.repeat(holed(VALIDATION))), ft.NonFiniteError, "The validation data hold NaN"),
    ("a run with a callback that is none", lambda: ran(callbacks=[print]), TypeError, "callbacks must be a list"),
    ("a run with a rule that is none", lambda: ran(stop=3), TypeError, "stop must be"),
    ("a run with a score that is none", lambda: ran(score="value"), TypeError, "score must be a function"),
    ("a run with a metric of a record's name", lambda: ran(evaluate=lambda s, h: {"loss": 0.0}), ValueError, "other than"),
    ("a run with a metric of a name that is not there", lambda: ran(evaluate=lambda s, h: {"a": h["rate"]}), ValueError, "evaluate(state, hparams)", "'rate'"),
    ("a run in jit", lambda: jax.jit(lambda lr: ran(hparams={"lr": lr}).value)(0.1), TypeError, "outside of jax.jit"),
    ("a run over minibatches in windows of 0", lambda: minibatches(window=0), ValueError, "window=0"),
    ("a run that is rolled back all the time", lambda: ran([VALIDATION] * 24, hparams={"lr": 1e6}, params=jnp.zeros(()), callbacks=[]), RuntimeWarning, "windows were rolled back"),
    # tuned
    ("tuned every 0", lambda: tuned(every=0), ValueError, "every=0"),
    ("tuned every 2^31", lambda: tuned(every=2**31), ValueError, "every=2147483648", "2**31 - 1"),
    ("tuned of an optimizer that is made", lambda: tuned(optax.sgd(0.1)), TypeError, "give `optax.sgd`"),
    ("tuned of text", lambda: tuned("sgd"), TypeError, "optimizer", "'sgd'"),
    ("tuned of nothing", lambda: ft.tuned(optax.sgd, lambda w, x: 0.0), ValueError, "nothing to tune"),
    ("tuned of a loss of three", lambda: tuned(loss=lambda w, h, x: 0.0), TypeError, "loss(params, batch)"),
    ("tuned of a loss of text", lambda: tuned(loss="mse"), TypeError, "loss"),
    ("tuned of an error of one", lambda: tuned(error=lambda w: 0.0), TypeError, "error(params, validation)"),
    ("tuned of a constant of text", lambda: tuned(momentum="0.9"), TypeError, "momentum='0.9'"),
    ("tuned of a constant of None", lambda: tuned(momentum=None), TypeError, "momentum=None"),
    ("tuned of a constant of True", lambda: tuned(nesterov=True), TypeError, "nesterov=True"),
    ("tuned of a constant of NaN", lambda: tuned(momentum=NAN), ValueError, "momentum=nan"),
    ("tuned of a constant of infinity", lambda: tuned(momentum=INF), ValueError, "momentum=inf"),
    ("tuned of an empty constant", lambda: tuned(momentum=np.zeros(0)), ValueError, "momentum"),
    ("tuned of a complex constant", lambda: tuned(momentum=1j), TypeError, "momentum=1j"),
    ("tuned of a constant that is none", lambda: tuned(rate=0.1), TypeError, "`sgd` cannot be called", "rate"),
    ("tuned without what the optimizer needs", lambda: ft.tuned(optax.sgd, lambda w, x: 0.0, momentum=0.9), TypeError, "learning_rate"),
    ("tuned with constraints of another name", lambda: tuned(constraints={"rate": ft.NonNegative()}).init(jnp.zeros(())), ValueError, "constraints['rate']"),
    ("tuned from NaN", lambda: tuned().init(jnp.array(NAN)), ft.NonFiniteError, "params"),
    ("tuned from None", lambda: tuned().init(None), ValueError, "nothing to train"),
    ("tuned, the state is None", lambda: tuned().update(None, VALIDATION, VALIDATION), TypeError, "takes a state of `init`"),
    ("tuned, a batch of lists", lambda: tuned_step([1.0, 2.0]), TypeError, "batch is a Python list"),
    ("tuned, a batch of text", lambda: tuned_step("batch"), TypeError, "batch", "no numbers"),
    ("tuned, validation of text", lambda: tuned_step(validation=np.array(["a"])), TypeError, "validation", "no numbers"),
    ("tuned, a batch of None", lambda: tuned_step(None), ValueError, "holds no array"),
    ("tuned, a batch that does not fit", lambda: tuned_step({"x": VALIDATION}), Exception, "step(state", "batch['x']"),
    ("tuned, NaN in a batch", lambda: tuned_step(holed(VALIDATION), calls=3), RuntimeWarning, "data['batch']"),
    ("tuned, NaN in validation", lambda: tuned_step(validation=holed(VALIDATION), calls=3), RuntimeWarning, "data['validation']"),
    ("validation without rows", lambda: updated(validation=np.zeros(0, np.float32)), ValueError, "validation is float32[0]", "holds no number"),
    ("tuned, a batch without rows", lambda: tuned_step(np.zeros(0, np.float32)), ValueError, "holds no number"),
    ("tuned, validation without rows", lambda: tuned_step(validation=np.zeros(0, np.float32)), ValueError, "validation is float32[0]", "holds no number"),
]
