"""Discrete hyperparameters around gradient-tuned ones, with Optuna.

Optuna proposes depth, width and the like, one choice d per trial. Each trial tunes its own learning
rates and decays lambda, from the best trial's: the search is min over d of f_d(lambda_d).
"""

import contextlib
from collections.abc import Iterator
from typing import SupportsFloat, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ._engines.nonfinite import NonFiniteError
from ._files.records import Record
from ._outer.callbacks import Callback
from ._outer.run import Result, Run
from ._problem.checks import check_count, check_hparams, named_leaves
from ._problem.warn import warn

try:
    import optuna
except ImportError as error:
    raise ImportError("foretune.optuna needs optuna: pip install 'foretune[optuna]'.") from error

# User attributes of a trial: its tuned hyperparameters, by path; the number of the trial that it was
# started from; where and why it was not finite.
HPARAMS, SOURCE, NONFINITE = "foretune:hparams", "foretune:warm_start", "foretune:not_finite"
Trial: TypeAlias = optuna.trial.BaseTrial


def warm_start(trial: Trial | optuna.Study, default: PyTree) -> PyTree:
    """Return the hyperparameters to start from: those of the study's best trial so far, or `default`.

    A trial whose value or hyperparameters are not finite is never the best.

    Args:
        trial: the trial, or a study. The finished trials of its study are looked through.
        default: where to start when there are none. Its structure, shapes and types are kept: a leaf
            that the best trial lacks, or has in another shape, is taken from here.

    >>> import foretune.optuna as fo, jax.numpy as jnp, optuna
    >>> study = optuna.create_study()
    >>> trial = study.ask()
    >>> study.tell(trial, fo.keep(trial, {"lr": jnp.array(0.25)}, value=0.5)).value
    0.5
    >>> start = fo.warm_start(study.ask(), {"lr": jnp.array(0.1), "layers": jnp.ones(2)})
    >>> print(start["lr"], start["layers"])
    0.25 [1. 1.]
    """
    default = check_hparams(default)
    study = trial if isinstance(trial, optuna.Study) else getattr(trial, "study", None)
    if study is None:  # a FixedTrial, which stands alone
        return default
    sign = -1 if _maximizes(study, "warm_start") else 1
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    kept = [t for t in complete if HPARAMS in t.user_attrs and np.isfinite(t.values[0])]
    ours, structure = named_leaves(default, ""), jax.tree.structure(default)
    for best in sorted(kept, key=lambda other: sign * other.values[0]):
        stored = best.user_attrs[HPARAMS]
        leaves = [_like(leaf, np.asarray(stored.get(path, []))) for path, leaf in ours.items()]
        if all(np.isfinite(numbers).all() for numbers in [*stored.values(), *leaves]):
            if not isinstance(trial, optuna.Study):
                trial.set_user_attr(SOURCE, best.number)
            return structure.unflatten(leaves)
    return default


def _like(leaf: Array, numbers: np.ndarray) -> Array:
    """Return the numbers in the leaf's type, or the leaf where the shape is another."""
    with np.errstate(over="ignore"):  # beyond the range of the type: not finite
        return jnp.asarray(numbers, leaf.dtype) if numbers.shape == leaf.shape else leaf


class Pruning(Callback):
    """Reports the validation curve of a run to Optuna, and ends the trial when its pruner says so.

    Args:
        trial: the trial.
        metric: the entry of the records to report: the error, `value`, or a metric of `evaluate`.
        every: the steps (in real time: windows) between two reports.

    It is a callback of `minimize` and of `RealTime.run`. A window that was rolled back counts with the
    value before it. Pruners compare trials at the same step: give all the same number of windows.

    >>> import foretune as ft, foretune.optuna as fo, jax.numpy as jnp, optax, optuna
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - 1.0) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=5))
    >>> trial = optuna.create_study().ask()
    >>> result = ft.minimize(problem, {"lr": jnp.array(0.1)}, steps=3,
    ...                      callbacks=[fo.Pruning(trial)])
    >>> sorted(trial.study.trials[0].intermediate_values)
    [0, 1, 2, 3]
    """

    def __init__(self, trial: Trial, metric: str = "value", every: int = 1):
        check_count(every, f"Pruning(every={every!r})")
        self.trial, self.metric, self.every = trial, metric, every
        self._reported = False

    def start(self, run: Run) -> None:
        """Refuse a study that would maximize an error."""
        if self.metric == "value":
            _check_minimizes(self.trial, "Pruning", "name another `metric`, of `evaluate`")

    def step(self, run: Run) -> None:
        """Report, and prune."""
        if run.step % self.every:
            return
        value = next((r[self.metric] for r in reversed(_sound(run)) if self.metric in r), None)
        if value is None:
            return
        value = _number(value, f"the records' {self.metric!r}", "name another `metric`")
        self._reported = True
        self.trial.report(value, run.step)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"{self.metric} {value:.6g} at step {run.step}")

    def end(self, run: Run) -> None:
        """Warn where there was nothing to report."""
        if run.history and not self._reported and self.metric not in run.history[-1]:
            names = sorted(run.record)
            warn(f"Pruning(metric={self.metric!r}) had nothing to report; records have {names}.")


@contextlib.contextmanager
def prune_nonfinite(trial: Trial) -> Iterator[None]:
    """Turn a `NonFiniteError` into a pruned trial, with the reason among its user attributes.

    The study continues, and its sampler learns to stay away (a failed trial would teach it nothing).

    >>> import foretune as ft, foretune.optuna as fo, optuna
    >>> def objective(trial):
    ...     with fo.prune_nonfinite(trial):
    ...         raise ft.NonFiniteError("not finite: the value")
    >>> study = optuna.create_study()
    >>> study.optimize(objective, n_trials=1)
    >>> study.trials[0].state.name, study.trials[0].user_attrs["foretune:not_finite"]
    ('PRUNED', 'not finite: the value')
    """
    if not hasattr(trial, "set_user_attr"):  # only a training that is not finite would show it
        raise TypeError(f"prune_nonfinite takes the trial, got {type(trial).__name__}.")
    try:
        yield
    except NonFiniteError as error:
        trial.set_user_attr(NONFINITE, str(error))
        raise optuna.TrialPruned(str(error)) from error


def keep(trial: Trial, result: Result | PyTree, value: object = None) -> float:
    """Keep what a trial has tuned for `warm_start`, and return the number for Optuna.

    Args:
        trial: the trial.
        result: what `RealTime.run` or `minimize` returned; or, of your own loop, the hyperparameters.
        value: the number that the study compares, an accuracy say. By default the error: after
            `RealTime.run` that of the trained weights, after `minimize` the lowest score.

    After `minimize` the hyperparameters of the lowest score are kept; after `RealTime.run` their mean
    over the windows up to the one with the lowest error, without those that were rolled back: at its
    end a learning rate has often gone to 0. They are stored as JSON, for some thousands of numbers.

    >>> import foretune.optuna as fo, jax.numpy as jnp, optuna
    >>> trial = optuna.create_study().ask()
    >>> fo.keep(trial, {"lr": jnp.array(0.25)}, value=0.5)
    0.5
    >>> trial.user_attrs
    {'foretune:hparams': {"['lr']": 0.25}}
    """
    tuned = isinstance(result, Result)
    error, hparams = _tuned(result) if tuned else (None, check_hparams(result))
    if value is None:
        _check_minimizes(trial, "keep", "give `value=`")
        if error is None:
            raise ValueError("keep(trial, hparams) needs `value=`, the number to compare.")
        value = error
    value = _number(value, "keep's value", "give `value=`")
    numbers = named_leaves(jax.device_get(hparams), "")
    trial.set_user_attr(HPARAMS, {path: leaf.tolist() for path, leaf in numbers.items()})
    return value


def _tuned(result: Result) -> tuple[PyTree, PyTree]:
    """Return a run's error, and the hyperparameters that another trial should start from."""
    if "hparams" not in result.history[-1]:  # of `minimize`
        return result.best.score, result.best.hparams
    leaves, structure = jax.tree.flatten(result.hparams)

    def leaves_of(hparams):  # of a record, which has arrays as lists of numbers
        try:
            return structure.flatten_up_to(hparams)
        except ValueError:
            return list(hparams.values())  # by path, where JSON cannot hold the structure

    sound, best = _sound(result), int(result.best.step)
    error = sound[-1]["value"] if sound else result.value
    rows = [leaves_of(record["hparams"]) for record in sound if record["step"] <= best]
    if not rows:
        return error, result.hparams
    columns = zip(leaves, *rows, strict=True)
    means = [np.mean(np.asarray(x), axis=0).astype(leaf.dtype) for leaf, *x in columns]
    return error, structure.unflatten(means)


def _sound(run: Run | Result) -> list[Record]:
    """Return the records of a run or result, less those of windows that were rolled back."""
    return [record for record in run.history if not record.get("rolled_back")]


def _number(value: object, what: str, remedy: str) -> float:
    if not isinstance(value, SupportsFloat) or np.ndim(value):  # pyright: ignore
        several = "several errors" if isinstance(value, dict) else "not one number"
        raise ValueError(f"{what} is {several}, {value!r:.100}: Optuna compares one. {remedy}.")
    return float(value)


def _check_minimizes(trial: Trial, name: str, remedy: str) -> None:
    study = getattr(trial, "study", None)
    if study and _maximizes(study, name):
        raise ValueError(
            f'{name}: the study maximizes an error; give it `direction="minimize"`, or {remedy}.'
        )


def _maximizes(study: optuna.Study, name: str) -> bool:
    if len(study.directions) > 1:
        raise ValueError(f"{name}: {len(study.directions)} objectives have no best trial.")
    return study.direction == optuna.study.StudyDirection.MAXIMIZE
