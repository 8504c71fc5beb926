"""Model, loss and error in JAX, for foretune and for what is written by hand.

Written as a knowing user of JAX writes it, for both alike. Linear layers are stored out x in, since the
CPU compiler forms D^T X, their gradient, faster than X^T D. Convolutions have channels last and are a
matrix product of patches: on a CPU the compiler brings the gradients of a convolution into a form for
which it has fast kernels outside of loops only, and a training is a loop (ten times slower); on an H200
the convolutions of its library are slower, too, on images as small as these.
"""

import jax.numpy as jnp
import numpy as np
import optax

from .problems import Spec


def parameters(spec: Spec):
    """Return the initial weights, convolutions as 3 x 3 x in x out."""
    layers = []
    for W, b in spec.params:
        if W.ndim == 4:
            W = W.transpose(2, 3, 1, 0)
        elif spec.name == "decay":  # the pixels now come before the channels
            W = W.reshape(len(b), -1, 7, 7).transpose(0, 2, 3, 1).reshape(len(b), -1)
        layers.append({"W": jnp.asarray(W), "b": jnp.asarray(b)})
    return layers


def examples(data: tuple[np.ndarray, np.ndarray]):
    """Return inputs, with channels last, and labels."""
    x, y = data
    return jnp.asarray(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x), jnp.asarray(y)


def model(params, x):
    """Return the logits: convolutions with 2 x 2 means between them, then linear layers."""
    for i, layer in enumerate(params):
        W, b = layer["W"], layer["b"]
        if W.ndim == 4:
            x = jnp.tanh(convolution(x, W) + b)
            x = halve(x) if i < 2 else x.reshape(len(x), -1)
        else:
            x = x @ W.T + b
            x = jnp.tanh(x) if i < len(params) - 1 else x
    return x


def convolution(x, W):
    """Return the 3 x 3 convolution of an image with zeros around it."""
    n, height, width, channels = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    patches = jnp.concatenate(shifted, -1).reshape(-1, 9 * channels)
    return (patches @ W.reshape(9 * channels, -1)).reshape(n, height, width, -1)


def halve(x):
    """Return the means over 2 x 2 pixels."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def cross_entropy(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y)


def loss(params, hparams, batch):
    """L(w, h, batch)."""
    losses = cross_entropy(params, *batch)
    value = jnp.mean(hparams["weight"] * losses if "weight" in hparams else losses)
    if "decay" in hparams:
        squares = jnp.stack([jnp.sum(layer["W"] ** 2) for layer in params])
        value = value + 0.5 * jnp.sum(hparams["decay"] * squares)
    return value


def error(params, batch):
    """The validation error."""
    return jnp.mean(cross_entropy(params, *batch))
