"""A penalty for each of 200 features, by the implicit gradient at the minimum.

Logistic regression with 20 features that matter and 180 that do not. One penalty for all is found by a
grid. A penalty for each is found by gradients: `Implicit` needs the minimum alone, `Reverse` the whole
way there. Both learn from the same validation set; the test set is another.

    pip install .
    python examples/penalties_implicit.py [--iterations 100] [--steps 200]
"""

import argparse
import time

import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

# %% The data
FEATURES, USEFUL = 200, 20
truth = np.zeros(FEATURES)
rng = np.random.default_rng(0)
truth[:USEFUL] = rng.normal(0, 0.7, USEFUL)


def rows(count):
    """Return features, and labels that are drawn by the true weights."""
    x = rng.normal(size=(count, FEATURES))
    y = rng.random(count) < 1 / (1 + np.exp(-x @ truth))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


train, validation, test = rows(300), rows(1000), rows(5000)


# %% The problem
def likelihood(w, batch):
    """Return the mean negative log likelihood."""
    x, y = batch
    return jnp.mean(optax.sigmoid_binary_cross_entropy(x @ w, y))


def loss(w, hparams, batch):
    """Return it with the penalties: strongly convex."""
    return likelihood(w, batch) + jnp.sum(hparams["penalty"] * w**2)


problem = ft.Problem(
    ft.Training(loss, optax.sgd(0.5, 0.9, nesterov=True)),
    objective=lambda state, hparams, batch: likelihood(state.params, batch),
    init=jnp.zeros(FEATURES),
    batches=ft.FullBatch(train, arguments.steps),
    validation=validation,
)


def penalties(size):
    """Return the same penalty for all features."""
    return {"penalty": jnp.full(FEATURES, size)}


# %% One penalty for all: a grid
grid = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]
errors = [float(problem.response(penalties(size))[0]) for size in grid]
best = grid[int(np.argmin(errors))]


# %% One for each
def show(name, hparams, seconds=0.0):
    """Print the errors."""
    value, state = problem.response(hparams)
    wrong = jnp.mean((test[0] @ state.params > 0) != test[1])
    print(f"{name:22} validation {value:.3f}, test {likelihood(state.params, test):.3f}, ", end="")
    print(f"{100 * wrong:.1f} % wrong, {seconds:.1f} s")


show(f"one penalty, {best:g}", penalties(best))
for engine in (ft.Implicit(), ft.Reverse()):
    began = time.perf_counter()
    result = ft.minimize(
        problem,
        penalties(best),
        steps=arguments.iterations,
        engine=engine,
        optimizer=optax.adam(0.1),
        constraints={"penalty": ft.Log()},
    )
    show(type(engine).__name__, result.hparams, time.perf_counter() - began)

# %% What was learnt, and whether the gradients agree
learnt = np.asarray(result.hparams["penalty"])
print(f"median penalty: {np.median(learnt[:USEFUL]):.3g} where a feature matters, ", end="")
print(f"{np.median(learnt[USEFUL:]):.3g} elsewhere")
exact, implicit = (
    engine(problem, result.hparams).grad["penalty"] for engine in (ft.Reverse(), ft.Implicit())
)
gap = jnp.linalg.norm(exact - implicit) / jnp.linalg.norm(exact)
print(f"gradients differ by {gap:.1e} of their length")
