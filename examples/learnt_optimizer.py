"""An update rule that is a network, meta-trained on short trainings and judged on longer ones.

The rule gets each weight's gradient and two of its running means, scaled by their size, and returns the
step; it has 41 numbers of its own, which are the hyperparameters. They are learnt on small networks and
random batches of digits, by exact gradients (`Reverse`) and by differences of values (`Evolution`). The
judges are a longer training and a wider network, beside Adam and SGD, each at the best of ten rates.

    pip install ".[data]"
    python examples/learnt_optimizer.py [--iterations 150] [--steps 20]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--iterations", type=int, default=150)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

# %% The data
x, y = (jnp.asarray(part) for part in load_digits(return_X_y=True))
parts = np.split(np.random.default_rng(0).permutation(len(y)), [1000, 1400])
train, validation, test = ((x[part] / 16, y[part]) for part in parts)


# %% The rule
def learnt_rule(h):
    """Return the network as an Optax transformation."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, (params, params))

    def update(updates, state, params=None):
        fast = jax.tree.map(lambda m, g: 0.5 * m + 0.5 * g, state[0], updates)
        slow = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[1], updates)

        def step(*seen):
            inputs = jnp.stack(seen, -1)
            inputs = inputs / jnp.sqrt(jnp.mean(inputs**2) + 1e-8)  # of the size of 1
            hidden = jnp.tanh(inputs @ h["in"] + h["shift"])
            return -jnp.exp(h["log rate"]) * (hidden @ h["out"])

        return jax.tree.map(step, updates, fast, slow), (fast, slow)

    return optax.GradientTransformation(init, update)


def first_rule():
    """Return a rule that is much like gradient descent with momentum."""
    wide = 0.3 * jax.random.normal(jax.random.key(0), (3, 8))
    return {
        "in": wide,
        "shift": 0.1 * wide[0],
        "out": jnp.linalg.pinv(wide) @ jnp.array([0.2, 0.4, 0.4]),
        "log rate": jnp.log(jnp.array(0.02)),
    }


# %% Trainings
def entropy(params, batch):
    """Return the mean loss of a network with one hidden layer."""
    logits = jax.nn.relu(batch[0] @ params["in"]) @ params["out"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


def training(optimizer, steps, width):
    """Return a draw of a training with an optimizer, judged by the validation set."""
    dynamics = ft.Training(lambda params, h, batch: entropy(params, batch), optimizer)
    end = lambda state, h, batch: entropy(state.params, batch)  # noqa: E731

    def draw(key):
        keys = jax.random.split(key, 3)
        inputs = jax.random.normal(keys[0], (64, width)) / 8
        outputs = jax.random.normal(keys[1], (width, 10)) / width**0.5
        batches = ft.Minibatches(train, jax.random.randint(keys[2], (steps, 32), 0, 1000))
        return ft.Problem(dynamics, end, {"in": inputs, "out": outputs}, batches, validation)

    return draw


def losses(optimizer, tried, steps, width):
    """Return mean losses of trainings from fresh weights, of validation and test, of each tried."""
    draw = training(optimizer, steps, width)

    def one(h, key):
        value, state = draw(key).response(h)
        return jnp.stack([value, entropy(state.params, test)])

    run, keys = jax.jit(jax.vmap(one, (None, 0))), jax.random.split(jax.random.key(9), 8)
    return np.nan_to_num([run(h, keys).mean(0) for h in tried], nan=np.inf).T


# %% Meta-training
meta = ft.Mean.of_draws(training(learnt_rule, arguments.steps, 16), 4)
rules = {"start": first_rule()}
for engine in (ft.Reverse(), ft.Evolution(0.1, samples=16)):
    options = {"engine": engine, "optimizer": optax.adam(0.02), "steps": arguments.iterations}
    result = ft.minimize(meta, first_rule(), key=jax.random.key(1), **options)
    rules[type(engine).__name__] = result.hparams

# %% The judges: as long, five times as long, a wider network
rates = [{"rate": jnp.array(10.0 ** (-k / 2))} for k in range(10)]
makers = {"Adam": lambda h: optax.adam(h["rate"]), "SGD": lambda h: optax.sgd(h["rate"], 0.9)}
for times, width in ((1, 16), (5, 16), (5, 64)):
    steps = times * arguments.steps
    learnt = losses(learnt_rule, list(rules.values()), steps, width)[1]
    shown = dict(zip(rules, learnt, strict=True))
    for name, make in makers.items():
        on_validation, on_test = losses(make, rates, steps, width)
        shown[name] = on_test[np.argmin(on_validation)]
    print(f"test loss after {steps} steps, {width} wide: ", end="")
    print(", ".join(f"{name} {loss:.3f}" for name, loss in shown.items()))
