"""A stream whose noise changes: the learning rate follows, while the model trains.

A linear filter tracks a slowly turning signal. In quiet times a high learning rate tracks best, in
noisy times a low one, and nobody says when the noise begins. `RealTime` gets the next observations as
validation and moves the rate; constant rates are good in one half and bad in the other, and a cosine,
which knows when training ends, does not know what a stream brings.

    pip install .
    python examples/drifting_stream.py [--steps 4000]
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=4000)
arguments = parser.parse_args()

# %% The stream
SIZE, BATCH, WINDOW = 20, 8, 20


def stream(steps: int, seed: int = 0):
    """Yield inputs and what a turning direction makes of them, with noise that changes."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=SIZE)
    for t in range(steps):
        w += 0.03 * rng.normal(size=SIZE)
        noise = 0.1 if (4 * t // steps) % 2 == 0 else 4.0
        x = rng.normal(size=(BATCH, SIZE))
        y = x @ w + noise * rng.normal(size=BATCH)
        yield {"x": x.astype(np.float32), "y": y.astype(np.float32), "w": w.astype(np.float32)}


# %% The training
def squares(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def loss(w, hparams, batch):
    return squares(w, batch)


def error(state, hparams, batch):
    return squares(state.params, batch)


dynamics = ft.Training(loss, lambda h: optax.sgd(h["lr"]))


# %% Schedules and a tuner
def follow(schedule, steps: int) -> float:
    """Return the mean squared distance to the true direction at the ends of windows."""
    step = jax.jit(lambda w, rate, batch: w - rate * jax.grad(squares)(w, batch))
    w, distances = jnp.zeros(SIZE), []
    for t, batch in enumerate(stream(steps)):
        w = step(w, schedule(t), batch)
        if (t + 1) % WINDOW == 0:
            distances.append(float(jnp.sum((w - batch["w"]) ** 2)))
    return float(np.mean(distances[len(distances) // 20 :]))


def track(tuner, steps: int) -> float:
    """Return the same of a tuned rate."""
    state = tuner.init(jnp.zeros(SIZE), {"lr": jnp.array(0.02)})
    seen, distances = [], []
    windows = list(ft.windows(stream(steps), WINDOW))
    for window, following in itertools.pairwise(windows):
        ahead = {name: part.reshape(-1, *part.shape[2:]) for name, part in following.items()}
        state, log = tuner.update(state, window, ahead)
        distances.append(float(jnp.sum((state.train.params - window["w"][-1]) ** 2)))
        seen.append(float(log["hparams"]["lr"]))
    quarters = np.array_split(np.array(seen), 4)
    print("learning rate in the four quarters:", [round(float(np.median(q)), 4) for q in quarters])
    return float(np.mean(distances[len(distances) // 20 :]))


# %% The comparison
for rate in (0.003, 0.01, 0.03):
    print(f"constant rate {rate}: {follow(lambda t, rate=rate: rate, arguments.steps):.3f}")
for rate in (0.01, 0.03):
    cosine = optax.cosine_decay_schedule(rate, arguments.steps)
    print(f"cosine from {rate}: {follow(cosine, arguments.steps):.3f}")
tuner = ft.RealTime(dynamics, objective=error, constraints={"lr": ft.Box(0.0, 0.04)})
print(f"tuned: {track(tuner, arguments.steps):.3f}")
