"""Small convolutional networks of images, as pure functions of their weights.

A convolution is written as nine shifted copies of its input times a matrix. Where many tasks have
weights of their own, side by side under `vmap`, that is a batched matrix product, which CPUs and GPUs
have fast, and their grouped convolutions are slow.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Weights = dict[str, dict[str, Array]]
Images = Float[Array, "n h w c"]


def convolution(w: Float[Array, "9c k"], x: Images, stride: int = 1) -> Images:
    """Return the 3 x 3 convolution of images with a border of zeros."""
    h, v = (-(-side // stride) for side in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = stride * (h - 1) + 1, stride * (v - 1) + 1
    shifted = [
        x[:, i : i + rows : stride, j : j + columns : stride] for i in range(3) for j in range(3)
    ]
    return jnp.concatenate(shifted, -1) @ w


def normalised(x: Images, axes: Sequence[int]) -> Images:
    """Return each image with mean 0 and variance 1 over some axes: nothing depends on the batch."""
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


def convolutional(key: Array, widths: Sequence[int], channels: int = 1) -> Weights:
    """Return random weights of the layers, He's, with a gain and a shift for each channel."""
    sizes = list(zip([channels, *widths], widths, strict=False))
    keys = jax.random.split(key, len(sizes))
    return {
        f"layer {i + 1}": {
            "w": jax.random.normal(k, (9 * a, b)) * jnp.sqrt(2 / (9 * a)),
            "gain": jnp.ones(b),
            "shift": jnp.zeros(b),
        }
        for i, (k, (a, b)) in enumerate(zip(keys, sizes, strict=True))
    }


def dense(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """Return random weights of a linear layer."""
    return {
        "w": jax.random.normal(key, (inputs, outputs)) / jnp.sqrt(inputs),
        "b": jnp.zeros(outputs),
    }


def linear(layer: dict[str, Array], x: Float[Array, "n a"]) -> Float[Array, "n b"]:
    """Return what a linear layer makes of rows."""
    return x @ layer["w"] + layer["b"]


def strided(weights: Weights, x: Images) -> Float[Array, "n d"]:
    """Return features: layers of stride 2, normalised over the whole image."""
    for name in sorted(name for name in weights if name.startswith("layer")):
        layer = weights[name]
        x = normalised(convolution(layer["w"], x, stride=2), (1, 2, 3))
        x = jax.nn.relu(x * layer["gain"] + layer["shift"])
    return x.reshape(len(x), -1)


def pooled(
    weights: Weights, x: Images, norm: Callable[[Images], Images] | None = None
) -> Float[Array, "n d"]:
    """Return features: layers followed by the mean over 2 x 2 pixels; by default instance norm."""
    norm = norm or (lambda x: normalised(x, (1, 2)))
    for name in sorted(name for name in weights if name.startswith("layer")):
        layer = weights[name]
        x = jax.nn.relu(norm(convolution(layer["w"], x)) * layer["gain"] + layer["shift"])
        n, h, v, c = x.shape
        x = x[:, : h // 2 * 2, : v // 2 * 2].reshape(n, h // 2, 2, v // 2, 2, c).mean((2, 4))
    return x.reshape(len(x), -1)


def cross_entropy(logits: Float[Array, "n k"], targets: Array) -> Float[Array, ""]:
    """Return the mean loss, of class numbers or of probabilities."""
    log_p = jax.nn.log_softmax(logits)
    if targets.ndim == 1:
        return -jnp.mean(jnp.take_along_axis(log_p, targets[:, None], 1))
    return -jnp.mean(jnp.sum(targets * log_p, 1))
