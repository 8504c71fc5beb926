"""How strongly to turn, shift, scale, shear, brighten and blur images with noise: six learnt strengths.

Each image of a minibatch is changed by a random number times a strength. A strength then has a
derivative, and six of them are learnt by whole trainings. A draw is another split of the labels into
training and validation, and another start. At the end all labels train, with augmentation and without.

    pip install ".[data]"
    python examples/augmentation.py [--iterations 40] [--steps 150] [--labels 200]
"""

import argparse

import jax
import jax.numpy as jnp
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
images, digits = map(jnp.asarray, load_digits(return_X_y=True))
order = jax.random.permutation(jax.random.key(0), len(digits))
x, y = images[order].reshape(-1, SIZE, SIZE).astype(jnp.float32) / 16, digits[order]
few, test = (x[:LABELS], y[:LABELS]), (x[LABELS:], y[LABELS:])


# %% The augmentation
def changed(strength, bits, image):
    """Return an image, changed by amounts that are a strength times a random number."""
    key, noise_key = jax.random.split(jax.random.wrap_key_data(bits))
    u = jax.random.uniform(key, (6,), minval=-1.0)
    angle, shear = strength["rotation"] * u[0], strength["shear"] * u[1]
    turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
    places = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(-1, 1, SIZE)], indexing="ij"))
    affine = jnp.exp(strength["scale"] * u[2]) * turn @ jnp.array([[1.0, shear], [0.0, 1.0]])
    seen = jnp.einsum("ij,jhw->ihw", affine, places) + strength["shift"] * u[3:5, None, None]
    image = map_coordinates(image, [*(seen + 1) * (SIZE - 1) / 2], order=1, mode="constant")
    image = image * (1 + strength["brightness"] * u[5])
    return image + strength["noise"] * jax.random.normal(noise_key, image.shape)


# %% The training
def entropy(weights, images, digits):
    """Return the mean loss of a network with one hidden layer."""
    logits = jax.nn.relu(images.reshape(len(images), -1) @ weights["in"]) @ weights["out"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, digits)), logits


def loss(weights, strength, batch):
    """Return the loss on a minibatch of changed images."""
    images, digits, bits = batch
    images = jax.vmap(changed, (None, 0, 0))(strength, bits, images)
    return entropy(weights, images, digits)[0]


dynamics = ft.Training(loss, optax.adam(3e-3, eps_root=1e-8))


def training(key, rows, validation):
    """Return a training from a random start on some rows."""
    keys = jax.random.split(key, 4)
    wide, last = jax.random.normal(keys[0], (SIZE**2, 64)), jax.random.normal(keys[1], (64, 10))
    chosen = jax.random.choice(keys[2], rows, (arguments.steps, BATCH))
    bits = jax.random.bits(keys[3], (arguments.steps, BATCH, 2), jnp.uint32)
    return ft.Problem(
        dynamics,
        objective=lambda state, strength, batch: entropy(state.params, *batch)[0],
        init={"in": wide / SIZE, "out": last / 8},
        batches=(few[0][chosen], few[1][chosen], bits),
        validation=validation,
    )


def draw(key):
    """Return a training on four fifths of the labels, judged by the others."""
    key, split_key = jax.random.split(key)
    rows, n = jax.random.permutation(split_key, LABELS), 4 * LABELS // 5
    return training(key, rows[:n], (few[0][rows[n:]], few[1][rows[n:]]))


# %% The strengths
names = ("rotation", "shift", "scale", "shear", "brightness", "noise")
result = ft.minimize(
    ft.Mean.of_draws(draw, 4),
    dict.fromkeys(names, jnp.array(0.1)),  # at 0 the derivative is 0
    key=jax.random.key(1),
    steps=arguments.iterations,
    engine=ft.Forward(),
    optimizer=optax.adam(0.15),
    constraints=dict.fromkeys(names, ft.Log()),
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


for name, strength in (("none", dict.fromkeys(names, 0.0)), ("learnt", result.hparams)):
    found = 100 * accuracies(strength)
    print(f"augmentation {name}: test accuracy {found.mean():.1f} ± {found.std() / 8**0.5:.1f} %")
