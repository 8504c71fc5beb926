"""The problems as arrays, the same for every library.

A training with weights w, velocity v and hyperparameters h over the steps t = 1..T,

    g_t = grad_w L(w_{t-1}, h, batch_t),   v_t = mu v_{t-1} + g_t,   w_t = w_{t-1} - eta v_t,
    L(w, h, batch) = mean_i h.weight_i CE(model(w, x_i), y_i) + 1/2 sum_l h.decay_l |W_l|^2,
    f(h) = mean CE(model(w_T, x), y) over the validation examples.

Each problem has its own hyperparameters among weight, decay, lr (eta) and momentum (mu); what is none
is left out or a constant. Arrays are made by NumPy from a seed, weights as PyTorch stores them:
out x in for a linear layer, out x in x 3 x 3 for a convolution.

Networks have tanh units. With ReLU the error column would be a matter of luck: a rounding error that
carries one of a million units over its kink is amplified by all later steps, and in either framework
the float32 hypergradient of `decay` is then off by nothing or by some percent, according to the seed.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

NAMES = {
    "cleaning": "hyper-cleaning: softmax regression 5000x784, full batch, one weight per example",
    "rates": "learning rate and momentum of a network 784-200-200-10, batches of 100",
    "decay": "weight decay per layer of a network of 3 convolutions, 28x28, batches of 64",
    "large": "learning rate and momentum of a network 1353-2000x4-183, batches of 500",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One problem: data, initial weights, hyperparameters, and the constants that are none."""

    name: str
    steps: int
    data: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    indices: np.ndarray | None
    """T x B rows of the data; None for all of it in each step."""
    params: list[tuple[np.ndarray, np.ndarray]]
    hparams: dict[str, np.ndarray]
    lr: float
    momentum: float

    def rates(self, hparams: Any) -> tuple[Any, Any]:
        """Return learning rate and momentum, hyperparameters or constants."""
        return hparams.get("lr", self.lr), hparams.get("momentum", self.momentum)

    def astype(self, dtype: Any) -> "Spec":
        """Return the problem in another precision."""
        return dataclasses.replace(
            self,
            data=(self.data[0].astype(dtype), self.data[1]),
            validation=(self.validation[0].astype(dtype), self.validation[1]),
            params=[(W.astype(dtype), b.astype(dtype)) for W, b in self.params],
            hparams={name: h.astype(dtype) for name, h in self.hparams.items()},
        )


def make(name: str, device: str = "cpu", quick: bool = False) -> Spec:
    """Return a problem in its full size, or small enough to try."""
    rng = np.random.default_rng(0)
    if name == "cleaning":
        n, T = (500, 20) if quick else (5000, 200)
        data, validation = examples(rng, (784,), 10, n, n, wrong=0.5)
        hparams = {"weight": np.full(n, 0.5)}
        spec = Spec(name, T, data, validation, None, dense(rng, [784, 10]), hparams, 1.0, 0.0)
    elif name == "rates":
        T = 30 if quick else 300
        data, validation = examples(rng, (784,), 10, 5000, 1000)
        hparams = {"lr": np.array(0.02), "momentum": np.array(0.8)}
        layers = dense(rng, [784, 200, 200, 10])
        spec = Spec(name, T, data, validation, rows(rng, 5000, T, 100), layers, hparams, 0.0, 0.0)
    elif name == "decay":
        T = 10 if quick else 100
        data, validation = examples(rng, (1, 28, 28), 10, 5000, 1000)
        layers = [*convolutions(rng, [1, 16, 32, 32]), *dense(rng, [32 * 7 * 7, 10])]
        hparams = {"decay": np.full(len(layers), 1e-3)}
        spec = Spec(name, T, data, validation, rows(rng, 5000, T, 64), layers, hparams, 0.02, 0.8)
    else:
        T, width = 10 if device == "cpu" else 200, 2000
        T, width = (5, 200) if quick else (T, width)
        data, validation = examples(rng, (1353,), 183, 5000, 500)
        hparams = {"lr": np.array(0.02), "momentum": np.array(0.8)}
        layers = dense(rng, [1353, *[width] * 4, 183])
        spec = Spec(name, T, data, validation, rows(rng, 5000, T, 500), layers, hparams, 0.0, 0.0)
    return spec.astype(np.float32)


def examples(rng, shape, classes, n, n_validation, wrong=0.0):
    """Return noisy copies of one pattern per class, to train and to validate on.

    A part `wrong` of the training labels is drawn again at random. Inputs have about unit norm.
    """
    patterns = rng.standard_normal((classes, *shape))
    labels = rng.integers(0, classes, n + n_validation)
    x = 0.5 * patterns[labels] + rng.standard_normal((n + n_validation, *shape))
    x /= np.prod(shape) ** 0.5 if wrong else 1.0
    given = np.where(rng.random(n) < wrong, rng.integers(0, classes, n), labels[:n])
    return (x[:n], given.astype(np.int32)), (x[n:], labels[n:].astype(np.int32))


def dense(rng, sizes):
    """Return linear layers: zeros for softmax regression, Xavier's scale otherwise."""
    scale = 0.0 if sizes == [784, 10] else 1.0
    return [
        (rng.standard_normal((b, a)) * (scale / a) ** 0.5, np.zeros(b))
        for a, b in itertools.pairwise(sizes)
    ]


def convolutions(rng, channels):
    """Return 3 x 3 convolutions."""
    return [
        (rng.standard_normal((b, a, 3, 3)) * (1 / (9 * a)) ** 0.5, np.zeros(b))
        for a, b in itertools.pairwise(channels)
    ]


def rows(rng, n, steps, batch):
    """Return the rows of each minibatch."""
    return rng.integers(0, n, (steps, batch)).astype(np.int32)
