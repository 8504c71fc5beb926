"""Which training examples help a target? Keep those, and train again.

The target is to tell 3, 5 and 8 apart; the training digits are all ten, of which 40 % have a wrong
label. The mean error on a few target digits is attributed to the training digits. A training on the
half that helps most is compared with trainings on all, and on a random half.

    pip install ".[data]"
    python examples/attribution_choose.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import foretune as ft

# %% The data
rng = np.random.default_rng(0)
x, y = map(np.asarray, load_digits(return_X_y=True))
order = rng.permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order]
wrong = rng.random(800) < 0.4
given = np.where(wrong, (y[:800] + rng.integers(1, 10, 800)) % 10, y[:800])
of_target = np.flatnonzero(np.isin(y[800:], [3, 5, 8])) + 800
few, test = of_target[:60], of_target[60:]


# %% The training
def loss(params, hparams, batch):
    """Return the cross-entropy of softmax regression."""
    scores = batch[0] @ params
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]))


def error(state, hparams, batch):
    """Return the same for the trained parameters."""
    return loss(state.params, hparams, batch)


def problem_on(rows):
    """Return the training on some of the digits."""
    data = x[rows], given[rows]
    return ft.Problem(
        dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.9)),
        objective=error,
        init=jnp.zeros((64, 10)),
        batches=ft.Minibatches.shuffled(data, batch_size=100, steps=160, key=jax.random.key(0)),
        validation=(x[few], y[few]),
    )


def accuracy(rows):
    """Train on some of the digits, and return how many of the target's test digits come out right."""
    _, state = problem_on(rows).response(hparams)
    return np.mean(np.argmax(x[test] @ state.params, 1) == y[test])


# %% Choose
hparams = {"lr": jnp.array(0.05)}
everything = np.arange(800)
# derivatives at weights of a half: halfway between a training with an example and one without
found = ft.attribute(problem_on(everything), hparams, [error], share=0.5)
chosen = found.top(400)[0]
print(f"wrong labels: {wrong.mean():.0%} of all, {wrong[chosen].mean():.0%} of those chosen")
print(f"test accuracy with all digits: {accuracy(everything):.1%}")
print(f"test accuracy with a random half: {accuracy(rng.permutation(800)[:400]):.1%}")
print(f"test accuracy with the half that helps: {accuracy(chosen):.1%}")
