"""How strongly to turn, shift, scale, shear, brighten and blur images with noise: six learnt strengths.

Each image of a minibatch is changed by a random amount u of one size, times a strength. A strength then
has a derivative, and six of them are learnt by whole trainings. A draw is another split of the few
labels into training and validation, another start and other random amounts. At the end networks are
trained on all the labels, with the learnt strengths and with none.

    pip install ".[data]"
    python examples/augmentation.py [--iterations 40] [--steps 150] [--labels 200]
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
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--labels", type=int, default=200)
arguments = parser.parse_args()

# %% The data
SIZE, BATCH, LABELS = 8, 32, arguments.labels
images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
x = jnp.asarray(images[order].reshape(-1, SIZE, SIZE) / 16, jnp.float32)
y = jnp.asarray(digits[order])
few, test = (x[:LABELS], y[:LABELS]), (x[LABELS:], y[LABELS:])


# %% The augmentation
def changed(strength, key, image):
    """Return an image, changed at random: each amount is a strength times a number of mean 0."""
    key, noise_key = jax.random.split(key)
    u = jax.random.uniform(key, (6,), minval=-1.0)
    angle = strength["rotation"] * u[0]
    turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
    shear = jnp.array([[1.0, strength["shear"] * u[1]], [0.0, 1.0]])
    places = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(-1, 1, SIZE)], indexing="ij"))
    seen = jnp.einsum("ij,jhw->ihw", jnp.exp(strength["scale"] * u[2]) * turn @ shear, places)
    seen = seen + strength["shift"] * u[3:5, None, None]
    image = map_coordinates(image, [*(seen + 1) * (SIZE - 1) / 2], order=1, mode="constant")
    noise = strength["noise"] * jax.random.normal(noise_key, image.shape)
    return image * (1 + strength["brightness"] * u[5]) + noise


# %% The training
def entropy(weights, images, digits):
    """Return the mean loss of a network with one hidden layer."""
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ weights["in"] + weights["shift"])
    logits = hidden @ weights["out"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, digits)), logits


def loss(weights, strength, batch):
    """Return the loss on a minibatch of changed images."""
    images, digits, amounts = batch
    keys = jax.vmap(jax.random.wrap_key_data)(amounts)
    return entropy(weights, jax.vmap(changed, (None, 0, 0))(strength, keys, images), digits)[0]


dynamics = ft.Training(loss, optax.adam(3e-3, eps_root=1e-8))


def training(key, rows, validation):
    """Return a training from a random start on some rows."""
    keys = jax.random.split(key, 4)
    first, last = jax.random.normal(keys[0], (SIZE**2, 64)), jax.random.normal(keys[1], (64, 10))
    chosen = jax.random.choice(keys[2], rows, (arguments.steps, BATCH))
    amounts = jax.random.bits(keys[3], (arguments.steps, BATCH, 2), jnp.uint32)
    return ft.Problem(
        dynamics,
        objective=lambda state, strength, batch: entropy(state.params, *batch)[0],
        init={"in": first / SIZE, "shift": jnp.zeros(64), "out": last / 8},
        batches=(few[0][chosen], few[1][chosen], amounts),
        validation=validation,
    )


def draw(key):
    """Return a training on four fifths of the labels, judged by the others."""
    key, split_key = jax.random.split(key)
    rows = jax.random.permutation(split_key, LABELS)
    train, held_out = rows[: 4 * LABELS // 5], rows[4 * LABELS // 5 :]
    return training(key, train, (few[0][held_out], few[1][held_out]))


# %% The strengths
names = ("rotation", "shift", "scale", "shear", "brightness", "noise")
first = {name: jnp.array(0.1) for name in names}  # at 0 the derivative is 0
result = ft.minimize(
    ft.Mean.of_draws(draw, 4),
    first,
    key=jax.random.key(1),
    steps=arguments.iterations,
    engine=ft.Forward(),
    optimizer=optax.adam(0.15),
    constraints={name: ft.Log() for name in first},
)
print("learnt strengths:", {name: round(float(s), 2) for name, s in result.hparams.items()})


# %% Trainings on all the labels
@jax.jit
def accuracies(strength):
    """Return the accuracy on the test set of trainings from eight starts."""

    def one(key):
        _, state = training(key, jnp.arange(LABELS), test).response(strength)
        return jnp.mean(jnp.argmax(entropy(state.params, *test)[1], 1) == test[1])

    return jax.vmap(one)(jax.random.split(jax.random.key(2), 8))


for name, strength in {
    "none": jax.tree.map(jnp.zeros_like, first),
    "learnt": result.hparams,
}.items():
    found = 100 * accuracies(strength)
    print(f"augmentation {name}: test accuracy {found.mean():.1f} ± {found.std() / 8**0.5:.1f} %")
