"""What `test_sharding.py` runs on one device, and its child processes on several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from foretune._attribution.queries import as_queries
from foretune._attribution.sweep import backward, ends, forward, placed
from foretune._attribution.weighted import weighted_problem
from foretune._problem.problem import validated

N, STEPS = 16, 5
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(N, 4)), rng.normal(size=(N, 8))
VALIDATION = (rng.normal(size=(8, 4)), rng.normal(size=(8, 8)))
PARAMS = {"a": rng.normal(size=(4, 8)), "b": rng.normal(size=8)}
DATA = (X, Y, np.arange(N))
INDICES = np.array([rng.permutation(N)[:8] for _ in range(STEPS)])


def squares(params, batch):
    return (batch[0] @ params["a"] + params["b"][None] - batch[1]) ** 2


def loss(params, hparams, batch):
    return jnp.mean(hparams["weight"][batch[2], None] * squares(params, batch))


def plain_loss(params, hparams, batch):
    return jnp.mean(squares(params, batch))


def error(state, hparams, batch):
    return jnp.mean(squares(state.params, batch))


def optimizer(hparams):
    return optax.sgd(hparams["lr"], hparams["momentum"])


def hyperparameters(weights=True):
    hparams = {"lr": jnp.array(0.1), "momentum": jnp.array(0.5)}
    return hparams | ({"weight": jnp.full(N, 0.5)} if weights else {})


def problem(batches=None):
    batches = batches or ft.FullBatch(DATA, steps=STEPS)
    return ft.Problem(ft.Training(loss, optimizer), error, PARAMS, batches, VALIDATION)


def folds():
    def problem_of_fold(k):
        start = jax.tree.map(lambda leaf: jnp.asarray(leaf * (1 + k)), PARAMS)
        return problem().replace(init=start)

    return ft.Mean([problem_of_fold(k) for k in range(8)])


def way_back(problem, hparams, mesh):
    """Return the compiled program of the adjoints of 8 errors on a mesh."""
    problem = ft.shard(problem, mesh)
    queries = as_queries(problem, VALIDATION)
    wanted, point, queries = weighted_problem(problem, hparams, queries, "weight", None, None)
    arrays, structure = validated(wanted, point)
    s_T, stored = forward(ft.Reverse(), structure, arrays)
    queries = queries.of(placed(queries.validation, mesh))
    _, adjoint = ends(wanted, point, s_T, queries)
    adjoint = placed(adjoint, mesh)
    return backward.lower(ft.Reverse(), structure, arrays, stored, adjoint).compile().as_text()


def minimized(problem, hparams, steps, folder=None, stop=None):
    return ft.minimize(
        problem,
        hparams,
        steps=steps,
        optimizer=optax.adam(0.05),
        constraints={"weight": ft.Box(0.0, 1.0)},
        callbacks=[ft.Checkpoint(folder)] if folder else [],
        stop=stop,
    )


def tuned(stream, validation, steps=4, mesh=None, folder=None):
    """Tune over windows of 3, the last of them shorter."""
    tuner = ft.RealTime(
        ft.Training(plain_loss, optimizer), error, constraints=ft.NonNegative(), mesh=mesh
    )
    return tuner.run(
        stream,
        [validation],
        params=PARAMS,
        hparams=hyperparameters(weights=False),
        window=3,
        steps=steps,
        callbacks=[ft.Checkpoint(folder)] if folder else [],
    )


def stream():
    return [(X[i], Y[i]) for i in np.concatenate([INDICES, INDICES[:, ::-1]])]


def as_lists(tree):
    """Return the numbers of a pytree, to be printed as JSON."""
    leaves = jax.tree.leaves(tree)
    return [np.asarray(leaf, np.float64).ravel().tolist() for leaf in leaves]
