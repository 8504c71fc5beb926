"""Rehearsals: a long training is tuned on short ones, and then performed once.

    f_L(lambda) = E(s_L(lambda)),    L = T/32, T/16, T/8, T/4

A rehearsal is a whole training of L steps, with its whole schedule and a start of its own, on a share
L / T of the rows: it sees each row as often as the performance will, and overfits as much.

- *search*: each scale alone over eight decades, which shows the leading one: the scale that the error
  depends on most. Then each over two decades: the lowest error at T/32;
- *descent*: hypergradients at T/16, each followed by a step of the secant rule (`moves.py`). A step
  that raises the error is rejected, and half of it is tried the other way;
- *line*: the leading scale times a factor, at T/16 and at T/4. In another draw errors give the same
  best factor to a quarter of a decade, where gradients do not. A larger budget has descents of T/8 and
  T/4 steps between;
- *others*, from a cost of 40 on: each scale but the leading one alone over twelve decades, at T/2;
- *refinement*: hypergradients at T, each in a draw of its own and followed by a step of Adam, from a
  third of the leading scale: above the best rate gradients mislead;
- *choice*: points of that way, with the leading scale and half of it, are compared in the same draws;
- *start*, from a cost of 5 on: the training as it was given, which the performance must not be above;
- *performance*: T steps on all rows. Where it fails, it is repeated with a third of the leading scale,
  or as it was given.

If the best factor falls from T/16 to T/4, the scale is lowered further, by half as much: a rate that is
too low costs little, one that is too high all.
"""

from collections.abc import Hashable, Sequence
from numbers import Real

import jax
from jaxtyping import Array, Key, PyTree

from .._constraints.base import check_constraints, feasible
from .._engines.base import AbstractEngine, check_engine
from .._engines.reverse import Reverse
from .._problem.checks import (
    check_count,
    check_hparams,
    check_key,
    check_outside_programs,
    check_signature,
)
from .._problem.warn import warn
from .callbacks import Callback
from .checks import check_callbacks
from .drive import drive
from .rehearsals import (
    CHOICE,
    DESCENT,
    LINE,
    OTHERS,
    PERFORMANCE,
    REFINEMENT,
    SEARCH,
    START,
    WAY,
    Make,
    Rehearsals,
    Trial,
)
from .run import Result, Run
from .search import count_scales

PRICE = 3.5  # of a hypergradient, in trainings of the same length
SHORTEST = 16  # steps of a rehearsal
CANDIDATES, PER_SCALE = 12, 8  # of each search, at a cost of 4
OF_OTHERS = 6  # candidates for each scale but the leading one, before a refinement
GUARDED = 5.0  # a cost that allows to train from the start, too
PLACES = 4  # on a line, at most
ENOUGH = 2.5  # a budget for a line at T/4
DESCENTS = (16, 16, 16, 8, 8, 4, 4)  # T / L of the hypergradients, the shortest first
BEFORE, FEWEST = 3.0, 5  # trainings that a refinement follows on, and its hypergradients
DRAWS = 2  # of a choice
MOST = 10_000  # trainings
AGAIN = 2  # performances after the first, at most


def rehearse(
    make: Make,
    hparams: PyTree,
    *,
    steps: int,
    constraints: PyTree = None,
    cost: float | int = 4.0,
    key: Key[Array, ""] | None = None,
    engine: AbstractEngine | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Tune a training on short rehearsals of it, then perform it.

    Args:
        make: `make(steps, key) -> Problem`, with its schedule, start and minibatches; traced as a draw.
        hparams: where to start. It may be far off: a learning rate by decades, or 0.
        steps: T, the steps of the performance.
        constraints: as in `minimize`. What is under `Log` or `NonNegative` is a scale and is searched
            over decades: learning rates, decays. All else is moved by hypergradients alone.
        cost: what all may cost, in trainings of T steps, the performance included. More buys more
            candidates, hypergradients and draws. A hypergradient counts as 3.5 trainings.
        key: a random key; `jax.random.key(0)` by default. The performance is `make(steps, key)`.
        engine: of the hypergradients; `Reverse()` by default.
        callbacks: as in `minimize`. With a `Checkpoint` the run resumes.

    Of `Minibatches`, a rehearsal has a share of the rows. What else is to be cut, `make` must cut.

    The result is that of `minimize`, with the `value` and `state` of the performance. Its `history` has
    a record of each trial: `trial`, `length`, `cost`, `value`, `hparams`. `state` is None where it was
    interrupted before.

    >>> import foretune as ft, jax, jax.numpy as jnp, optax
    >>> x = jax.random.normal(jax.random.key(0), (200, 3))
    >>> data = x, x @ jnp.array([1.0, -2.0, 3.0])
    >>> def loss(w, h, batch):
    ...     return jnp.mean((batch[0] @ w - batch[1]) ** 2)
    >>> def make(steps, key):
    ...     def optimizer(h):
    ...         return optax.sgd(optax.cosine_decay_schedule(h["lr"], steps))
    ...     return ft.Problem(
    ...         ft.Training(loss, optimizer), lambda state, h, v: loss(state.params, h, v),
    ...         init=jnp.zeros(3), validation=data,
    ...         batches=ft.Minibatches.shuffled(data, batch_size=10, steps=steps, key=key))
    >>> result = ft.rehearse(make, {"lr": jnp.array(1e-5)}, steps=320, constraints={"lr": ft.Log()})
    >>> float(result.value) < 1e-3, result.history[-1]["trial"]
    (True, 'performance')
    """
    hparams = check_hparams(hparams)
    check_signature(make, "make(steps, key)")
    if not isinstance(make, Hashable):
        raise TypeError(f"make must be a function; {make!r:.80} cannot be hashed.")
    check_outside_programs("rehearse", hparams)
    check_count(steps, f"rehearse(steps={steps!r})")
    check_engine(engine)
    check_callbacks(callbacks)
    if not isinstance(cost, Real) or not 2 <= cost <= MOST:
        given = f"rehearse(cost={cost!r:.60})"
        raise ValueError(f"{given}: give 2 at least, 1 for tuning, 1 to perform; {MOST} at most.")
    key = jax.random.key(0) if key is None else key
    check_key(key, "the key of rehearse")
    constraints = check_constraints(constraints, hparams)
    hparams = feasible(constraints, hparams)
    scales = count_scales(constraints)
    if not scales:
        warn('rehearse: no hyperparameter is a scale. Give `constraints={"lr": ft.Log()}` or so.')
    engine = (engine or Reverse()).within(constraints)
    trials = plan(steps, float(cost), scales)
    spent = sum(trial.cost for trial in trials[:-AGAIN])
    without = " without a search over decades" * (scales > 0 and trials[0].kind != SEARCH)
    if spent > cost + 1e-6 or without:
        warn(
            f"rehearse: as rehearsals have {min(SHORTEST, steps)} steps or more of {steps}, all will "
            f"cost {spent:.3g} trainings{without}. Start near, or give a higher cost than {cost:g}."
        )
    rehearsals = Rehearsals(make, hparams, constraints, engine, key, trials)
    rehearsals.check()
    run = Run(len(trials), rehearsals.first_carry(), hparams, rehearsals.fingerprint)
    return drive(run, rehearsals, callbacks=callbacks)


def plan(steps: int, cost: float, scales: int) -> list[Trial]:
    """Return the trials that a budget allows, the performances last."""

    def length(divisor):
        return min(steps, max(SHORTEST, steps // divisor))

    def share(divisor):
        return length(divisor) / steps

    def line(divisor, more=0):
        return Trial(LINE, length(divisor), places, (places + more) * share(divisor))

    start = [Trial(START, steps, 1, 1.0)] * (cost >= GUARDED)
    budget = cost - 1 - len(start)
    price = (1 + OF_OTHERS * (scales - 1)) * share(2)
    others = [Trial(OTHERS, length(2), OF_OTHERS, price)] * (scales > 1)
    choice = Trial(CHOICE, steps, DRAWS, DRAWS * (2 * WAY - 1))
    before = BEFORE + choice.cost + sum(trial.cost for trial in others)
    refinements = int((budget - before) / PRICE)
    refined = [*others, *[Trial(REFINEMENT, steps, 1, PRICE)] * refinements, choice]
    if refinements < FEWEST:
        refined = []
    budget -= sum(trial.cost for trial in refined)
    places, last = (PLACES, 4) if budget >= ENOUGH else (PLACES - 1, 8)
    lines = line(4 * last), line(last, 1)  # at the end the start, too
    most = min(CANDIDATES * budget / 3, budget / 8 / share(32)) / max(scales, 1)
    each = min(PER_SCALE, max(2, int(most)))
    search = Trial(SEARCH, length(32), each, (1 + each * scales) * share(32))
    searches = [search] * min(2, int(budget / 3 / search.cost)) if scales else []
    left = budget - sum(trial.cost for trial in [*searches, *lines])
    cycle = sum(PRICE * share(divisor) for divisor in DESCENTS)
    draws = max(1, int(left / cycle / 4))
    found: dict[int, list[Trial]] = {divisor: [] for divisor in DESCENTS}
    for divisor in DESCENTS * (1 + max(0, int(2 * left / cycle))):
        price = PRICE * share(divisor) * draws
        if price <= left + 1e-6:
            left -= price
            found[divisor].append(Trial(DESCENT, length(divisor), draws, price))
    rehearsals = (*searches, *found[16], lines[0], *found[8], *found[4], lines[1], *refined)
    return [*rehearsals, *start, *[Trial(PERFORMANCE, steps, 1, 1.0)] * (1 + AGAIN)]
