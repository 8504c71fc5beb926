"""A dynamics that is no neural network: the masses of two stars, from the path of a planet.

The state is the position and velocity of a planet, a step is one leapfrog step of Newton's laws, and
the hyperparameters are what the path depends on: the masses, and where the planet began. The error is
the distance to positions that were observed, with noise, at every step (`trajectory=True`).

    pip install .
    python examples/custom_dynamics.py [--iterations 500]
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--iterations", type=int, default=500)
arguments = parser.parse_args()

# %% The dynamics
STARS = jnp.array([[-1.0, 0.0], [1.0, 0.0]])
STEPS, DT = 150, 0.02


class Leapfrog(ft.Dynamics):
    """Newton's laws, half a step of velocity, a step of position, half a step of velocity."""

    def init(self, params, hparams):
        """Return where the planet is, how fast, and no error yet."""
        return {"x": params["x"], "v": hparams["velocity"], "error": jnp.zeros(())}

    def step(self, state, hparams, batch):
        """Return the same a moment later, with the squared distance to what was observed."""

        def acceleration(x):
            offset = STARS - x
            return jnp.sum(hparams["mass"][:, None] * offset / _cubed(offset), axis=0)

        v = state["v"] + 0.5 * DT * acceleration(state["x"])
        x = state["x"] + DT * v
        v = v + 0.5 * DT * acceleration(x)
        return {"x": x, "v": v, "error": jnp.sum((x - batch) ** 2)}


def _cubed(offset):
    return (jnp.sum(offset**2, axis=1, keepdims=True) + 0.05) ** 1.5


# %% The observations
truth = {"mass": jnp.array([1.0, 0.6]), "velocity": jnp.array([0.9, 0.1])}
path = []
state = Leapfrog().init({"x": jnp.array([0.0, 1.5])}, truth)
step = jax.jit(Leapfrog().step)
for _ in range(STEPS):
    state = step(state, truth, jnp.zeros(2))
    path.append(state["x"])
noise = 0.02 * jax.random.normal(jax.random.key(0), (STEPS, 2))
observed = jnp.stack(path) + noise

# %% The problem
problem = ft.Problem(
    dynamics=Leapfrog(),
    objective=lambda state, hparams, _: state["error"],
    init={"x": jnp.array([0.0, 1.5])},
    batches=observed,
    trajectory=True,
)

# %% The tuning
guess = {"mass": jnp.array([0.8, 0.8]), "velocity": jnp.array([0.8, 0.0])}
ft.check_hypergradient(problem, guess)
result = ft.minimize(
    problem,
    guess,
    steps=arguments.iterations,
    engine=ft.Forward(),
    optimizer=optax.adam(0.05),
    constraints={"mass": ft.NonNegative(), "velocity": ft.Box(-5.0, 5.0)},
    callbacks=[ft.Progress()],
)

# %% The masses
print("masses:", result.best.hparams["mass"], "true:", truth["mass"])
print("velocity:", result.best.hparams["velocity"], "true:", truth["velocity"])
off = jnp.max(jnp.abs(result.best.hparams["mass"] - truth["mass"]))
print(f"masses off by at most {off:.3f}")
