"""Real-time tuning: forward mode carried along the training itself (RTHO).

After every window (hyper-batch) of Delta minibatches, the partial hypergradient

    grad f_t = grad E(s_t) Z_t + dE/dlambda,    Z_t = A_t Z_{t-1} + B_t,

moves the hyperparameters, and the training continues from where it is. This is the hypergradient of a
constant lambda: exact in the first window, an estimate after an update. So between windows Z is
discounted, Z <- gamma Z, and forgets after about 1 / (1 - gamma) windows. The paper has gamma = 1.

A window in which training diverges is rolled back: the training state returns to where the window
began, Z to 0, and the hyperparameters back off against the derivative of the loss.

Time: about that of 1 + 2m training runs for m hyperparameters, however many updates. Memory: Z, m
states, and one more state to return to, whatever the number of steps.
Reference: Franceschi et al., ICML 2017, Section 3.3 and Algorithm 2.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._constraints.base import feasible
from .._engines.products import pushforward
from .._outer.callbacks import Callback
from .._outer.checks import check_callbacks, check_evaluate, check_functions, check_optimizer
from .._outer.drive import Metrics, Score, drive
from .._outer.run import Result, Run
from .._problem.arguments import copied
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import (
    as_arrays,
    check_count,
    check_hparams,
    check_mesh,
    check_outside_programs,
)
from .._problem.equality import reused
from .._problem.problem import Problem
from .._problem.system import make_system
from .._problem.validation import noting
from .faults import check_start, fault, warn_of_dropped
from .program import UpdateProgram, is_traced
from .relative_adam import relative_adam
from .run import RECORD, Tuning, fingerprint
from .state import Objective, RealTimeState, TunerSettings, carried, directions_of, placed
from .stream import check_stream, repeated, windows

DEFAULT_OPTIMIZER = relative_adam()
Rule = Callable[[Run], str | None]


class RealTime:
    """Tunes hyperparameters while the model trains, one update per window of minibatches.

    Args:
        dynamics: `Training`, or any other dynamics.
        objective: the error `E(state, hparams, validation) -> scalar`, or a dict of them by
            top-level hyperparameter name, each of which gets the whole `validation`.
        optimizer: the outer Optax optimizer; `relative_adam()` by default, which needs no tuning.
        constraints: as in `minimize`; a learning rate needs `NonNegative()`, a momentum
            `Box(0.0, 0.999)`.
        discount: gamma in (0, 1], the share of Z that a window takes over from the one before. With 1
            the hypergradient is exact as long as the hyperparameters stay as they are.
        rollback: roll back a window after which the validation error is more than this many times what
            it was, or in which the training loss spikes: a quarter above the highest that a window has
            begun with, and above that of the same minibatch before the window. A single minibatch whose
            loss is over ten times that highest is skipped. None: neither; a NaN is then an error.
        chunk: columns of Z in work at a time, where there are many hyperparameters.
        donate: reuse the memory of the state given to `update`, which is deleted, as in `run`.
        mesh: `foretune.mesh(data=..., tangents=...)`: `init` places the state on it, the columns of Z
            split over `tangents`, all else on every device. Place batches by `foretune.shard`.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> tuner = ft.RealTime(
    ...     ft.Training(lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: jnp.mean((state.params - x) ** 2),
    ...     constraints={"lr": ft.NonNegative()})
    >>> state = tuner.init(jnp.array(0.0), {"lr": jnp.array(0.0)})  # a null start
    >>> for _ in range(30):
    ...     state, log = tuner.update(state, jnp.ones((5, 2)), jnp.ones(2))
    >>> float(log["value"]) < 1e-3, float(state.hparams["lr"]) > 0.01
    (True, True)
    """

    def __init__(
        self,
        dynamics: object,
        objective: Objective,
        optimizer: optax.GradientTransformation | None = None,
        *,
        constraints: PyTree = None,
        discount: float | int = 0.9,
        rollback: float | int | None = 1.5,
        chunk: int | None = None,
        donate: bool = False,
        mesh: Mesh | None = None,
    ):
        check_optimizer(optimizer)
        problem = Problem(dynamics, objective, None, FullBatch(None, steps=1))
        if not 0 < discount <= 1:
            raise ValueError(f"RealTime(discount={discount}): it must lie in (0, 1].")
        if rollback is not None and not 1 < rollback < math.inf:
            raise ValueError(f"RealTime(rollback={rollback}): a factor over 1, or None.")
        if chunk is not None:
            check_count(chunk, f"RealTime(chunk={chunk!r})")
        if mesh is not None:
            check_mesh(mesh, "RealTime(mesh=...)")
        chosen = reused(DEFAULT_OPTIMIZER if optimizer is None else optimizer)
        constraints = dict(constraints) if isinstance(constraints, Mapping) else constraints
        rollback = None if rollback is None else float(rollback)
        parts = problem.dynamics, problem.objective, chosen
        self.settings = TunerSettings(*parts, constraints, float(discount), rollback, chunk, mesh)
        self.donate, self._program = donate, UpdateProgram(self.settings)

    @classmethod
    def paper(
        cls, dynamics: object, objective: Objective, *, constraints: PyTree = None
    ) -> "RealTime":
        """Return the paper's setting: Adam(0.005) on the hyperparameters, Z never forgotten."""
        adam = optax.adam(0.005)
        return cls(dynamics, objective, adam, constraints=constraints, discount=1.0, rollback=None)

    def init(self, params: PyTree, hparams: PyTree) -> RealTimeState:
        """Return the state before the first window; `NonFiniteError` where it is not finite.

        `params` are the initial parameters, which are copied, or a function of the hyperparameters.
        """
        settings, hparams = self.settings, check_hparams(hparams)
        if not is_traced(hparams):
            check_start((), hparams)
            hparams = feasible(settings.outer(hparams).constraints, hparams)
        problem = Problem(settings.dynamics, settings.objective, params, FullBatch(None, 1))
        with noting("init(params, hparams) of the dynamics", hparams=hparams):
            system = make_system(problem, hparams)
            s_0, Z = pushforward(system.initial, (hparams,), (directions_of(hparams)[0],))
        train, none, nothing = system.restore(s_0), jnp.zeros((), jnp.int32), jnp.full((), -jnp.inf)
        if not is_traced((train, hparams)):
            check_start(train, hparams)
        opt_state, no = settings.outer(hparams).init(hparams), jnp.array(False)
        state = RealTimeState(train, hparams, Z, opt_state, none, nothing, nothing, no, none)
        state = copied(as_arrays(state))  # a weak type would compile a second time
        return state if settings.mesh is None else placed(state, settings.mesh)

    def update(
        self, state: RealTimeState, window: PyTree, validation: PyTree
    ) -> tuple[RealTimeState, dict[str, PyTree]]:
        """Train over one window of minibatches, then update the hyperparameters.

        Args:
            state: the state, from `init` or the last update.
            window: minibatches stacked on a leading axis, as `windows` makes them, or `Minibatches`,
                or `FullBatch`. A window shorter than one before it runs in the same program.
            validation: what the objective gets as its third argument.

        Returns:
            The new state, and the log, a dict: `value` and `hypergradient` at the end of the window, at
            the `hparams` it ran with; the norm of Z by hyperparameter, `z_norm`; the mean training
            `loss` (None for a dynamics without one); whether the window was `rolled_back`; how many
            minibatches were `skipped`; whether a derivative was `dropped`, with a warning. One that is
            not finite counts as 0: `nonfinite` has the first minibatch after which, by leaf, or -1.

        Raises:
            NonFiniteError: where something else is not finite. Its attribute `state` is the state
                before the window, to continue from (its Z begins at 0 again).
        """
        new, log, failed = self._program(state, window, validation, self.donate)
        if not isinstance(failed, Tracer) and failed:
            raise fault(self.settings, new, window, validation)
        warn_of_dropped(new, log)
        return new, log

    def lower(self, state: RealTimeState, window: PyTree, validation: PyTree) -> jax.stages.Lowered:
        """Return the program of an update, for its memory and cost analysis."""
        return self._program.lower(state, window, validation, self.donate)

    def problem(self, state: RealTimeState, window: PyTree, validation: PyTree) -> Problem:
        """Return the training over a window as a problem of its own, from this state on."""
        return self.settings.problem(state.train, window, validation, carried(state))

    def run(
        self,
        train_stream: Iterable[PyTree] | Minibatches,
        validation_stream: Iterable[PyTree],
        *,
        params: PyTree,
        hparams: PyTree,
        steps: int | None = None,
        window: int = 10,
        callbacks: Sequence[Callback] = (),
        stop: Rule | Iterable[Rule] | None = None,
        evaluate: Metrics | None = None,
        score: Score | None = None,
    ) -> Result:
        """Tune over a stream of minibatches, until it ends, or for a number of windows.

        Args:
            train_stream: any iterable of minibatches of one shape, of any length, or `Minibatches`.
                The next window is read, and sent to the device, while the current one runs.
            validation_stream: an iterable of validation batches, one for each window, gone through
                again and again; with a generator the run ends. `itertools.repeat(batch)` for one batch.
            params: the initial parameters, as for `init`.
            hparams: the initial hyperparameters.
            steps: the number of windows; until the stream ends by default.
            window: the number of minibatches in a window.
            callbacks: as in `minimize`; a run that resumes reads the streams again up to there.
            stop: stopping rules, as in `minimize`, and so is `score`.
            evaluate: `evaluate(state.train, hparams) -> dict` of further scalars, after each window.
            score: what `best` is lowest in.

        The result's `state` is the tuner's, with the trained weights in `state.train`. `history` has a
        record for each window: `step` (from 1), `gradient_norm`, what `evaluate` adds, and of the log
        of `update` all but `hypergradient` and `nonfinite`. Ctrl-C or SIGTERM ends it after a window.

        >>> import foretune as ft, itertools, jax.numpy as jnp, numpy as np, optax
        >>> tuner = ft.RealTime(
        ...     ft.Training(lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h["lr"])),
        ...     objective=lambda state, h, x: jnp.mean((state.params - x) ** 2),
        ...     constraints={"lr": ft.NonNegative()})
        >>> stream = (np.ones(4, np.float32) for _ in range(205))
        >>> result = tuner.run(stream, itertools.repeat(np.ones(4, np.float32)), window=10,
        ...                    params=jnp.array(0.0), hparams={"lr": jnp.array(0.001)})
        >>> len(result.history), result.stopped
        (21, 'the training stream ended')
        """
        if steps is not None:
            check_count(steps, f"run(steps={steps!r})")
        check_count(window, f"run(window={window!r})")
        check_callbacks(callbacks)
        rules = check_functions(stop, evaluate, score)
        check_outside_programs("RealTime.run", params, hparams)
        check_stream(validation_stream, "the validation stream")
        pieces = windows(train_stream, window)
        stepper = Tuning(self._program, pieces, repeated(validation_stream))
        state = self.init(params, hparams)
        if evaluate is not None:
            check_evaluate(evaluate, state.train, state.hparams, RECORD)
        own = functools.partial(fingerprint, self.settings, state, window)
        run = Run(steps, state, copied(state.hparams), own)
        return drive(run, stepper, callbacks=callbacks, rules=rules, evaluate=evaluate, score=score)
