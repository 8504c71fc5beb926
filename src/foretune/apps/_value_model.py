"""From predictions of a number to the probability that an observed value is right.

C regressors predict each row's value, f_c(x), trained without the row. They are combined by weights
that sum to 1, f = sum_c softmax(a)_c f_c, and the residual r = y - f(x) of an observed value y is a
mixture:

    p(y | x) = (1 - pi) t_nu(r / s(x)) / s(x)  +  pi [ t_2((y - m) / 2) / 2 + t_2(r / w) / w ] / 2.

Right values have a Student t around the prediction, whose scale depends on the row through a few
numbers g(x) that say how far predictions err there (`local_spread`): log s = b_0 + b . g(x). Its tails
are heavy, so that an honest outlier is not called wrong at once. Wrong values come from anywhere: from
the spread of all values (y is scaled to median 0 and quartiles of a normal distribution: m = 0), or
from around the prediction with a wide scale w. The parameters theta = (a, b, nu, w, pi) minimise

    mean over observed values of -log p(y | x)  +  mean over trusted values of -log t_nu(r / s) / s
    + sum_g l2_g ||theta_g - start_g||^2

as `_regularised.py` describes; a trusted row whose observed value is known adds the negative log
likelihood of its being right or wrong. A value's weight is the posterior probability of "right".
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike
from scipy.special import expit

from .._constraints.sets import Box
from .._outer.callbacks import Callback
from .._outer.run import Result
from ._regularised import (
    FEW_TRUSTED,
    FOLDS,
    Fitting,
    Hparams,
    Likelihood,
    fit,
    left_out,
    some,
    tune,
)

FITTING = Fitting(rate=0.05, steps=300, hyper_rate=0.15, hyper_steps=15)
MOST_TUNED, MOST_FITTED = 1_000, 20_000
"""Rows with observed values that the regularisers, and the final parameters, are fitted on."""
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
Odds = tuple[Float[Array, " n"], Float[Array, " n"]]


class ValueRows(NamedTuple):
    """Scaled predictions, values and log spreads; `known` is 1 right, 0 wrong, -1 not known."""

    f: Float[Array, "C n"]
    y: Float[Array, " n"]
    g: Float[Array, "G n"]
    trusted_f: Float[Array, "C c"]
    trusted_y: Float[Array, " c"]
    trusted_g: Float[Array, "G c"]
    trusted_observed: Float[Array, " c"]
    known: Float[Array, " c"]
    weight: Float[Array, " n"]
    train: Float[Array, "folds c"]


class ValueJudgement(NamedTuple):
    """What is held of each observed value."""

    right: np.ndarray
    """The probability that it is right."""
    expected: np.ndarray
    """f, the ensemble's prediction."""
    scale: np.ndarray
    """s, the scale of right residuals."""
    ensemble: np.ndarray
    """The regressors' weights."""
    result: Result | None
    """The descent of the hyperparameters, where there were enough trusted rows for one."""


def log_t(z: Array, nu: Array | float) -> Array:
    """Return the logarithm of Student's t density."""
    half = 0.5 * (nu + 1)
    constant = gammaln(half) - gammaln(0.5 * nu) - 0.5 * jnp.log(nu * jnp.pi)
    return constant - half * jnp.log1p(z * z / nu)


class Values(Likelihood[ValueRows]):
    """p(observed value | x): around the prediction of an ensemble, or anywhere."""

    def start(self, rows: ValueRows) -> PyTree:
        """Return the plain mean, and scales that are the mean of the local spreads."""
        regressors, spreads = rows.f.shape[0], rows.g.shape[0]
        return {
            "a": jnp.zeros(regressors),
            "b0": jnp.zeros(()),
            "b": jnp.full(spreads, 1 / spreads),
            "nu": jnp.log(START_NU - LEAST_NU),
            "w": jnp.asarray(0.5),
            "pi": jnp.log(START_WRONG / (MOST_WRONG - START_WRONG)),
        }

    def densities(self, params: PyTree, f: Array, y: Array, g: Array) -> Odds:
        """Return log p(y | right, x) and log p(y | wrong, x)."""
        residual = y - jax.nn.softmax(params["a"]) @ f
        log_s = jnp.logaddexp(params["b0"] + params["b"] @ g, jnp.log(CLOSE))
        right = log_t(residual * jnp.exp(-log_s), LEAST_NU + jnp.exp(params["nu"])) - log_s
        anywhere = log_t(y / 2, 2.0) - jnp.log(2.0)
        around = log_t(residual * jnp.exp(-params["w"]), 2.0) - params["w"]
        return right, jnp.logaddexp(anywhere, around) - jnp.log(2.0)

    def log_odds(self, params: PyTree, f: Array, y: Array, g: Array) -> Odds:
        """Return the log-odds of "right", and log p(y | x).

        pi stays below 1/2: most values are right, or there is nothing to go by.
        """
        right, wrong = self.densities(params, f, y, g)
        pi = MOST_WRONG * jax.nn.sigmoid(params["pi"])
        right, wrong = right + jnp.log1p(-pi), wrong + jnp.log(pi)
        return right - wrong, jnp.logaddexp(right, wrong)

    def observed_loss(self, params: PyTree, hparams: Hparams, rows: ValueRows) -> Float[Array, ""]:
        """Return the mean of -log p(y | x)."""
        return -jnp.mean(rows.weight * self.log_odds(params, rows.f, rows.y, rows.g)[1])

    def trusted_losses(
        self, params: PyTree, hparams: Hparams, rows: ValueRows
    ) -> Float[Array, " c"]:
        """Return -log p(y | right, x), and that of being right or wrong where it is known."""
        value, _ = self.densities(params, rows.trusted_f, rows.trusted_y, rows.trusted_g)
        odds, _ = self.log_odds(params, rows.trusted_f, rows.trusted_observed, rows.trusted_g)
        status = jax.nn.softplus(jnp.where(rows.known > 0, -odds, odds)) * (rows.known >= 0)
        return status - value


def start_hparams(n: int, c: int) -> Hparams:
    """Return the logarithms that the regularisers start with, each in rows that it is worth."""
    scale = {"a": 0.1, "b0": 0.01, "b": 10.0, "nu": 100.0, "w": 30.0, "pi": 3.0}
    return {k: jnp.asarray(np.log(v / (n + c)), jnp.float32) for k, v in scale.items()}


class Scale(NamedTuple):
    """Values as they are scaled: z = (y - middle) / unit cut off at `FAR`, or asinh z."""

    middle: float
    unit: float
    squash: bool = False

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """Return scaled values."""
        z = (np.asarray(values, np.float64) - self.middle) / self.unit
        return np.clip(np.arcsinh(z) if self.squash else z, -FAR, FAR)

    def back(self, z: ArrayLike) -> np.ndarray:
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


def local_spread(f: np.ndarray, y: np.ndarray, more: Sequence[np.ndarray] = ()) -> np.ndarray:
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


class Observed(NamedTuple):
    """Scaled predictions (C, rows), values, and log spreads (G, rows) of some rows."""

    f: np.ndarray
    y: np.ndarray
    g: np.ndarray


def judge_values(
    observed: Observed,
    trusted: Observed,
    known: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    weight: np.ndarray | None = None,
    seed: int,
    callbacks: Sequence[Callback] = (),
    tuned: bool = True,
) -> ValueJudgement:
    """Judge observed values by C regressors.

    `known` has the scaled observed values of trusted rows, and whether they are right. Rows count by
    `weight`. With `tuned=False` the regularisers stay where they start.
    """
    (f, y, g), c, n = observed, len(trusted.y), len(observed.y)
    rng = np.random.default_rng(seed)
    known = (trusted.y, np.full(c, -1)) if known is None else known
    share = np.ones(n) if weight is None else weight * n / weight.sum()

    def rows(most: int, train: np.ndarray) -> ValueRows:
        i = some(n, most, rng)
        parts = (f[:, i], y[i], g[:, i], *trusted, *known, share[i], train)
        return ValueRows(*(jnp.asarray(np.asarray(part, np.float32)) for part in parts))

    model, result, hparams = Values(), None, start_hparams(n, c)
    if tuned and c >= FEW_TRUSTED:
        train = left_out(rng.permutation(c) % FOLDS)
        within = {name: Box(np.log(1e-7), np.log(1e4)) for name in hparams}
        result = tune(model, rows(MOST_TUNED, train), hparams, FITTING, within, callbacks)
        hparams = result.best.hparams
    folds = fit(model, rows(MOST_FITTED, np.ones((1, c))), hparams, FITTING)
    params = jax.tree.map(lambda leaf: leaf[0], folds)
    everything = (jnp.asarray(np.asarray(part, np.float32)) for part in (f, y, g))
    odds = np.asarray(model.log_odds(params, *everything)[0], np.float64)
    ensemble = np.asarray(jax.nn.softmax(params["a"]), np.float64)
    log_s = np.logaddexp(float(params["b0"]) + np.asarray(params["b"]) @ g, np.log(CLOSE))
    return ValueJudgement(expit(odds), ensemble @ f, np.exp(log_s), ensemble, result)
