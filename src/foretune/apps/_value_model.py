"""From predictions of a number to the probability that a given value is right.

C regressors predict each row's value, f_c(x), trained without the row. They are pooled by weights that
sum to 1, f = sum_c softmax(a)_c f_c, and the residual r = y - f(x) of a given value y is a mixture:

    p(y | x) = (1 - pi) t_nu(r / s(x)) / s(x)  +  pi [ t_2((y - m) / 2) / 2 + t_2(r / w) / w ] / 2.

Right values have a Student t around the prediction, whose scale depends on the row through a few
numbers g(x) that say how far predictions err there (`local_spread`): log s = b_0 + b . g(x). Its tails
are heavy, so that an honest outlier is not called wrong at once. Wrong values come from anywhere: from
the spread of all values (y is scaled to median 0 and quartiles of a normal distribution: m = 0), or
from around the prediction with a wide scale w. The parameters theta = (a, b, nu, w, pi) minimise

    mean over given values of -log p(y | x)  +  mean over checked values of -log t_nu(r / s) / s
    + sum_g l2_g ||theta_g - start_g||^2

by T steps of Adam; a checked row whose given value is known adds the surprise at its being right or
wrong. As in `_posterior`, the regularisers l2 descend on checked rows held out in folds, by the exact
hypergradient through those T steps. A value's weight is the posterior probability of "right".
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, PyTree

from .._constraints.sets import Box
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training

STEPS, HYPER_STEPS, FOLDS = 300, 15, 5
MOST_TUNED, MOST_FITTED = 1_000, 20_000
"""Rows with given values that the regularisers, and the final parameters, are fitted on."""
FEW_CHECKED = 20
"""With fewer checked rows the regularisers stay where they start."""
FAR = 30.0
"""Scaled values and predictions are cut off here, so that no regressor is carried away by one value."""
CLOSE = 1e-3
"""No scale s is below this share of the values' own: regressors repeat the value of a repeated row."""
LEAST_NU, START_NU, START_WRONG = 4.0, 20.0, 0.1
"""Tails of right values, and the share of wrong ones: what both start with, and are drawn to."""
MOST_WRONG = 0.5
HEAVY = 2.2
"""Values whose outer octiles are this much farther apart than their quartiles are squashed: a normal
distribution has 1.7, a lognormal one with standard deviation 1 has 2.0, a Cauchy distribution 2.4."""
NEIGHBOURS = 30


class Rows(NamedTuple):
    """Scaled predictions, values and log spreads; `known` is 1 right, 0 wrong, -1 not known."""

    f: Float[Array, "C n"]
    y: Float[Array, " n"]
    g: Float[Array, "G n"]
    checked_f: Float[Array, "C c"]
    checked_y: Float[Array, " c"]
    checked_g: Float[Array, "G c"]
    checked_given: Float[Array, " c"]
    known: Array
    weight: Float[Array, " n"]
    train: Float[Array, "folds c"]


class Judgement(NamedTuple):
    """What is held of each given value."""

    right: np.ndarray
    """The probability that it is right."""
    expected: np.ndarray
    """f, the pooled prediction."""
    checked_expected: np.ndarray
    scale: np.ndarray
    """s, the scale of right residuals."""
    rate: float
    """pi."""
    pool: np.ndarray
    regularisers: dict[str, float]
    result: Result | None


def log_t(z: Any, nu: Any) -> Any:
    """Return the logarithm of Student's t density."""
    half = 0.5 * (nu + 1)
    constant = gammaln(half) - gammaln(0.5 * nu) - 0.5 * jnp.log(nu * jnp.pi)
    return constant - half * jnp.log1p(z * z / nu)


def wrong_share(params: PyTree) -> Any:
    """Return pi, which stays below 1/2: most values are right, or there is nothing to go by."""
    return MOST_WRONG * jax.nn.sigmoid(params["pi"])


class _Part(eqx.Module):
    def densities(self, params, f, y, g):
        """Return log p(y | right, x) and log p(y | wrong, x)."""
        residual = y - jax.nn.softmax(params["a"]) @ f
        log_s = jnp.logaddexp(params["b0"] + params["b"] @ g, jnp.log(CLOSE))
        right = log_t(residual * jnp.exp(-log_s), LEAST_NU + jnp.exp(params["nu"])) - log_s
        anywhere = log_t(y / 2, 2.0) - jnp.log(2.0)
        around = log_t(residual * jnp.exp(-params["w"]), 2.0) - params["w"]
        return right, jnp.logaddexp(anywhere, around) - jnp.log(2.0)

    def log_odds(self, params, f, y, g):
        """Return the log-odds of "right", and log p(y | x)."""
        right, wrong = self.densities(params, f, y, g)
        pi = wrong_share(params)
        right, wrong = right + jnp.log1p(-pi), wrong + jnp.log(pi)
        return right - wrong, jnp.logaddexp(right, wrong)

    def checked_surprise(self, params, rows):
        value, _ = self.densities(params, rows.checked_f, rows.checked_y, rows.checked_g)
        odds, _ = self.log_odds(params, rows.checked_f, rows.checked_given, rows.checked_g)
        status = jax.nn.softplus(jnp.where(rows.known > 0, -odds, odds)) * (rows.known >= 0)
        return status - value


class _Loss(_Part):
    def __call__(self, params, hparams, rows):
        start = start_params(rows.f.shape[0], rows.g.shape[0])

        def fold(params, train):
            value = -jnp.mean(rows.weight * self.log_odds(params, rows.f, rows.y, rows.g)[1])
            if rows.checked_y.shape[0]:
                surprise = self.checked_surprise(params, rows)
                value = value + jnp.sum(train * surprise) / jnp.sum(train)
            away = {name: jnp.sum((params[name] - start[name]) ** 2) for name in params}
            return value + sum(jnp.exp(hparams[name]) * away[name] for name in params)

        return jnp.sum(jax.vmap(fold)(params, rows.train))


class _Error(_Part):
    def __call__(self, state, hparams, rows):
        held = jax.vmap(lambda params: self.checked_surprise(params, rows))(state.params)
        return jnp.sum((1 - rows.train) * held) / rows.checked_y.shape[0]


def start_params(regressors: int, spreads: int) -> PyTree:
    """Return the plain mean, and scales that are the mean of the local spreads."""
    return {
        "a": jnp.zeros(regressors),
        "b0": jnp.zeros(()),
        "b": jnp.full(spreads, 1 / spreads),
        "nu": jnp.log(START_NU - LEAST_NU),
        "w": jnp.asarray(0.5),
        "pi": jnp.log(START_WRONG / (MOST_WRONG - START_WRONG)),
    }


def _start_regularisers(n: int, c: int) -> dict[str, Array]:
    """Return the logarithms that the regularisers start with: each is worth so many rows."""
    scale = {"a": 0.1, "b0": 0.01, "b": 10.0, "nu": 100.0, "w": 30.0, "pi": 3.0}
    return {k: jnp.asarray(np.log(v / (n + c)), jnp.float32) for k, v in scale.items()}


def _problem(rows: Rows, steps: int = STEPS) -> Problem:
    folds = rows.train.shape[0]
    params = start_params(rows.f.shape[0], rows.g.shape[0])
    return Problem(
        dynamics=Training(_Loss(), optax.adam(0.05, eps_root=1e-8)),
        objective=_Error(),
        init=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (folds, *leaf.shape)), params),
        batches=FullBatch(rows, steps=steps),
        validation=rows,
    )


class Scale(NamedTuple):
    """Values as they are scaled: z = (y - middle) / unit cut off at `FAR`, or asinh z."""

    middle: float
    unit: float
    squash: bool = False

    def __call__(self, values: Any) -> np.ndarray:
        """Return scaled values."""
        z = (np.asarray(values, np.float64) - self.middle) / self.unit
        return np.clip(np.arcsinh(z) if self.squash else z, -FAR, FAR)

    def back(self, z: Any) -> np.ndarray:
        """Return values in their own unit."""
        z = np.asarray(z, np.float64)
        return (np.sinh(z) if self.squash else z) * self.unit + self.middle

    def width(self, z: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Return the scale s around z in the values' own unit."""
        return s * self.unit * (np.cosh(z) if self.squash else 1.0)


def scale_of(y: np.ndarray) -> Scale:
    """Return median and quartiles as of a normal distribution; the spread where quartiles are equal."""
    lowest, low, middle, high, highest = np.quantile(y, [0.125, 0.25, 0.5, 0.75, 0.875])
    unit = (high - low) / 1.349
    if unit > 0:
        return Scale(float(middle), float(unit), bool((highest - lowest) > HEAVY * (high - low)))
    away = float(np.minimum(np.abs(y - middle), np.finfo(np.float64).max / len(y)).mean())
    return Scale(float(middle), away or abs(float(middle)) or 1.0)


def local_spread(f: np.ndarray, y: np.ndarray, more: Any = ()) -> np.ndarray:
    """Return logarithms of numbers that say how far predictions err near each row.

    The median |y - mean prediction| of the `NEIGHBOURS` rows nearest in prediction, and how far the
    regressors disagree; `more` adds others. Each is scaled to the median |residual| of all rows.
    """
    middle = f.mean(0)
    error = np.abs(y - middle)
    typical = max(float(np.median(error)), CLOSE)
    order = np.argsort(middle, kind="stable")
    near = np.empty(len(y))
    near[order] = _running_median(error[order], NEIGHBOURS)
    found = [near, *more]
    if len(f) > 1:
        apart = f.std(0)
        half = max(float(np.median(apart)), CLOSE)
        found.append(typical * apart / half)
    found = np.stack(found)
    return np.log(np.clip(found, 0.1 * typical, 10 * typical))


def _running_median(values: np.ndarray, width: int) -> np.ndarray:
    width = min(width, len(values))
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    medians = np.median(windows, axis=1)
    centre = np.clip(np.arange(len(values)) - width // 2, 0, len(medians) - 1)
    return medians[centre]


def judge_values(
    f: np.ndarray,
    y: np.ndarray,
    g: np.ndarray,
    checked_f: np.ndarray,
    checked_y: np.ndarray,
    checked_g: np.ndarray,
    checked_given: np.ndarray | None = None,
    known: np.ndarray | None = None,
    *,
    weight: np.ndarray | None = None,
    seed: int,
    callbacks: Any = (),
    tune: bool = True,
) -> Judgement:
    """Return what C regressors, given scaled arrays of (C, rows), say of the given scaled values.

    `known` says of checked rows whether their given value is right, 1 or 0, or -1. Rows count by
    `weight`. With `tune=False` the regularisers stay where they start.
    """
    c, n = len(checked_y), len(y)
    rng = np.random.default_rng(seed)
    if checked_given is None or known is None:
        checked_given, known = checked_y, np.full(c, -1)
    share = np.ones(n) if weight is None else weight * n / weight.sum()

    def rows(most: int, train: np.ndarray) -> Rows:
        some = rng.permutation(n)[:most] if n > most else np.arange(n)
        given = (f[:, some], y[some], g[:, some])
        parts = (*given, checked_f, checked_y, checked_g, checked_given, known, share[some], train)
        return Rows(*(jnp.asarray(np.asarray(part, np.float32)) for part in parts))

    result, hparams = None, _start_regularisers(n, c)
    if tune and c >= FEW_CHECKED:
        fold = rng.permutation(c) % FOLDS
        result = minimize(
            _problem(rows(MOST_TUNED, fold[None] != np.arange(FOLDS)[:, None])),
            hparams,
            steps=HYPER_STEPS,
            optimizer=optax.adam(0.15),
            constraints={name: Box(np.log(1e-7), np.log(1e4)) for name in hparams},
            callbacks=callbacks,
        )
        hparams = result.best.hparams
    _, state = _problem(rows(MOST_FITTED, np.ones((1, c)))).response(hparams)
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    part = _Part()
    everything = (jnp.asarray(np.asarray(a, np.float32)) for a in (f, y, g))
    odds = np.asarray(part.log_odds(params, *everything)[0], np.float64)
    pool = np.asarray(jax.nn.softmax(params["a"]), np.float64)
    log_s = np.logaddexp(float(params["b0"]) + np.asarray(params["b"]) @ g, np.log(CLOSE))
    return Judgement(
        1 / (1 + np.exp(-np.clip(odds, -500, 500))),
        pool @ f,
        pool @ checked_f,
        np.exp(log_s),
        float(wrong_share(params)),
        pool,
        {name: float(np.exp(value)) for name, value in hparams.items()},
        result,
    )
