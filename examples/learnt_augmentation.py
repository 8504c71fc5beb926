"""How much to shift, turn, scale and disturb the images of a small training set.

A hundred digits of scikit-learn train a network; each image is changed at random at each step. The four
strengths are standard deviations, so that an image is a function of them with a derivative: the
validation error of the whole training is descended in all four. Beside it: no change of the images, and
random strengths, the best of a few.

    pip install ".[data]"
    python examples/learnt_augmentation.py [--iterations 40] [--steps 200] [--trials 8]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.ndimage import map_coordinates
from sklearn.datasets import load_digits

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--trials", type=int, default=8)
arguments = parser.parse_args()

# %% The data
x, y = (jnp.asarray(part) for part in load_digits(return_X_y=True))
parts = np.split(np.random.default_rng(0).permutation(len(y)), [100, 600])
train, validation, test = ((x[part].reshape(-1, 8, 8) / 16, y[part]) for part in parts)


# %% Images as functions of the strengths
def changed(image, strengths, noise):
    """Return an image that is shifted, turned and scaled, with noise on its pixels."""
    angle, scale = strengths["turn"] * noise[2], jnp.exp(strengths["scale"] * noise[3])
    grid = jnp.stack(jnp.meshgrid(jnp.arange(8.0), jnp.arange(8.0), indexing="ij")) - 3.5
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    rotation = scale * jnp.array([[cosine, -sine], [sine, cosine]])
    shift = strengths["shift"] * noise[:2, None, None]
    places = jnp.einsum("ij,jrc->irc", rotation, grid) + 3.5 + shift
    moved = map_coordinates(image, list(places), order=1)
    return moved + strengths["noise"] * noise[4:].reshape(8, 8)


# %% The training
def network(params, x):
    """Return the logits of images."""
    return jax.nn.relu(x.reshape(len(x), -1) @ params["in"]) @ params["out"]


def entropy(params, batch):
    """Return the mean loss of images and labels."""
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(network(params, x), y))


def loss(params, strengths, batch):
    """Return the loss of changed images."""
    rows, noise = batch
    x = jax.vmap(changed, (0, None, 0))(train[0][rows], strengths, noise)
    return entropy(params, (x, train[1][rows]))


training = ft.Training(loss, optax.sgd(0.05, 0.9))


def draw(key):
    """Return a training with random weights, minibatches and changes."""
    keys = jax.random.split(key, 4)
    start = {
        "in": jax.random.normal(keys[0], (64, 32)) / 8,
        "out": jax.random.normal(keys[1], (32, 10)) / 6,
    }
    rows = jax.random.randint(keys[2], (arguments.steps, 20), 0, 100)
    noise = jax.random.normal(keys[3], (arguments.steps, 20, 68))
    error = lambda state, strengths, batch: entropy(state.params, batch)  # noqa: E731
    return ft.Problem(training, error, start, (rows, noise), validation)


# %% The tuning
start = {"shift": 0.3, "turn": 0.1, "scale": 0.05, "noise": 0.05}
result = ft.minimize(
    draw,
    jax.tree.map(jnp.array, start),
    key=jax.random.key(0),
    steps=arguments.iterations,
    engine=ft.Forward(),
    optimizer=optax.adam(0.1),
    constraints=ft.Log(),
)


# %% The test, and what others find
@jax.jit
def judged(strengths, key):
    """Return validation error and test accuracy, the means of four trainings."""

    def one(key):
        value, state = draw(key).response(strengths)
        return value, jnp.mean(jnp.argmax(network(state.params, test[0]), 1) == test[1])

    values, right = jax.lax.map(one, jax.random.split(key, 4))
    return values.mean(), right.mean()


key, test_key = jax.random.split(jax.random.key(1))
rng = np.random.default_rng(1)
factors = 10 ** rng.uniform(-1, 1, (arguments.trials, 4))
trials = [dict(zip(start, jnp.array(list(start.values())) * row, strict=True)) for row in factors]
best = min(trials, key=lambda trial: float(judged(trial, key)[0]))
none = {name: jnp.array(0.0) for name in start}
for name, found in {"none": none, "random": best, "learnt": result.hparams}.items():
    right = 100 * judged(found, test_key)[1]
    print(f"test accuracy, {name}: {right:.1f} %", {k: f"{v:.2f}" for k, v in found.items()})
