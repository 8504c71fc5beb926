"""What the drivers check of their arguments before anything is compiled."""

from collections.abc import Callable, Iterable

import equinox as eqx
import optax
from jaxtyping import PyTree

from .._problem.checks import check_signature, describe
from .._problem.validation import noting
from .callbacks import Callback


def check_optimizer(optimizer: object) -> None:
    """Raise unless it is an Optax optimizer or None."""
    if not isinstance(optimizer, optax.GradientTransformation | None):
        raise TypeError(f"optimizer must be like `optax.adam(0.01)`, got {optimizer!r:.100}.")


def check_callbacks(callbacks: object) -> None:
    """Raise unless it is a list of callbacks."""
    listed = isinstance(callbacks, list | tuple)
    if not listed or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TypeError(f"callbacks must be a list like `[ft.Progress()]`; got {callbacks!r:.100}.")


def check_functions(stop: object, evaluate: object, score: object) -> list[Callable]:
    """Raise unless they can be called as the drivers do; return the stopping rules as a list."""
    rules = [] if stop is None else [stop] if callable(stop) else stop
    if isinstance(rules, str | dict) or not isinstance(rules, Iterable):
        needed = "a rule like `ft.NoImprovement(10)`, a function of the run, or a list of them"
        raise TypeError(f"stop must be {needed}; got {describe(stop)}.")
    rules = list(rules)
    optional = [("evaluate(state, hparams)", evaluate), ("score(record)", score)]
    given = [(form, function) for form, function in optional if function is not None]
    for form, function in [*given, *(("stop(run)", rule) for rule in rules)]:
        is_class = isinstance(function, type)
        if is_class or not callable(function):
            found = f"the class {function.__name__}" if is_class else describe(function)
            name = form.split("(")[0]
            raise TypeError(f"{name} must be a function, called as `{form}`; got {found}.")
        check_signature(function, form)
    return rules


def check_evaluate(
    evaluate: Callable[..., object], state: PyTree, hparams: PyTree, names: Iterable[str]
) -> None:
    """Raise where `evaluate` cannot be traced on the shapes of a state, or returns no metrics."""
    with noting("evaluate(state, hparams)", state=state, hparams=hparams):
        metrics = eqx.filter_eval_shape(evaluate, state, hparams)
    named = isinstance(metrics, dict) and all(
        isinstance(name, str)
        and (isinstance(metric, int | float) or getattr(metric, "shape", None) == ())
        for name, metric in metrics.items()
    )
    if not named or set(metrics) & set(names):
        needed = f"a dict of scalars with names (strings) other than {sorted(names)}"
        raise ValueError(f"evaluate must return {needed}, got {metrics!r:.200}.")
