"""Which texts should a language model train on, to be good at another text?

A small transformer reads bytes from four sources: Python code, its documentation, digits and noise. It
is to be good at the documentation of NumPy, of which it never trains on a byte. The weight of each
source and the learning rate at six knots are hyperparameters of the whole training; one gradient gives
the slope in all of them. Beside it: all sources evenly.

    pip install .
    python examples/language_mixture.py [--steps 100] [--iterations 15]
"""

import argparse
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--iterations", type=int, default=15)
arguments = parser.parse_args()

# %% The texts, as bytes
CONTEXT, BATCH, WIDTH, HEADS, KNOTS = 24, 16, 32, 2, 6
MODULES = ("argparse", "ast", "decimal", "inspect", "logging", "pathlib", "statistics", "textwrap")


def documented(module) -> str:
    """The documentation of a module and of what is in it."""
    things = [module, *(thing for _, thing in sorted(vars(module).items()))]
    return "\n".join(dict.fromkeys(inspect.getdoc(thing) or "" for thing in things))


modules = [importlib.import_module(name) for name in MODULES]
rng = np.random.default_rng(0)
texts = {
    "code": "".join(inspect.getsource(module) for module in modules).encode(),
    "documentation": "".join(documented(module) for module in modules).encode(),
    "digits": rng.integers(48, 58, 50_000).astype(np.uint8).tobytes(),
    "noise": rng.integers(0, 256, 50_000).astype(np.uint8).tobytes(),
}
length = min(len(text) for text in texts.values())
sources = jnp.stack([jnp.frombuffer(text[:length], jnp.uint8) for text in texts.values()])
target = np.frombuffer(documented(np).encode(), np.uint8)


def windows(text, count):
    """Windows from all over a text."""
    starts = np.linspace(0, len(text) - CONTEXT - 1, count).astype(int)
    return jnp.asarray(text[starts[:, None] + np.arange(CONTEXT + 1)])


held_out, test = windows(target[: len(target) // 2], 64), windows(target[len(target) // 2 :], 256)


# %% The transformer
def make_params(key):
    keys = iter(jax.random.split(key, 6))

    def matrix(a, b):
        return jax.random.normal(next(keys), (a, b)) / a**0.5

    return {
        "bytes": 0.1 * matrix(256, WIDTH),
        "places": 0.1 * matrix(CONTEXT, WIDTH),
        "qkv": matrix(WIDTH, 3 * WIDTH),
        "mix": matrix(WIDTH, WIDTH),
        "up": matrix(WIDTH, 4 * WIDTH),
        "down": matrix(4 * WIDTH, WIDTH),
    }


def normal(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def losses(params, text):
    """The cross entropy of each window, in nats a byte."""
    text = text.astype(jnp.int32)
    x = params["bytes"][text[:, :-1]] + params["places"]
    q, k, v = jnp.split((normal(x) @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # all scores: for short texts
    x = x + mixed.reshape(x.shape) @ params["mix"]
    x = x + jax.nn.gelu(normal(x) @ params["up"]) @ params["down"]
    logits = normal(x) @ params["bytes"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(1)


# %% The training: windows are drawn by the mixture
def loss(params, hparams, batch):
    share = hparams["sources"] / jnp.sum(hparams["sources"])
    uniform, starts = batch
    drawn = jnp.searchsorted(jnp.cumsum(jax.lax.stop_gradient(share)), uniform)
    drawn = jnp.minimum(drawn, len(share) - 1)
    # a draw has no derivative; its probability has
    weight = share[drawn] / jax.lax.stop_gradient(share[drawn])
    text = sources[drawn[:, None], starts[:, None] + jnp.arange(CONTEXT + 1)]
    return jnp.mean(weight * losses(params, text))


def rates(hparams):
    knots = jnp.linspace(0, arguments.steps, KNOTS)
    warm = arguments.steps / 10

    def rate(t):
        plain = jnp.minimum(1.0, (t + 1) / warm) * (1 - t / arguments.steps)
        return plain * jnp.exp(jnp.interp(jnp.asarray(t), knots, jnp.log(hparams["lr"])))

    return rate


def error(state, hparams, text):
    return jnp.mean(losses(state.params, text))


training = ft.Training(loss, lambda h: optax.adamw(rates(h), eps_root=1e-8))
params = make_params(jax.random.key(0))


def draw(key):
    """Return a training on texts that are drawn by the key."""
    shape = (arguments.steps, BATCH)
    u, starts = jax.random.split(key)
    batches = (
        jax.random.uniform(u, shape),
        jax.random.randint(starts, shape, 0, length - CONTEXT),
    )
    return ft.Problem(training, error, init=params, batches=batches, validation=held_out)


start = {"sources": jnp.ones(len(texts)), "lr": jnp.full(KNOTS, 0.005)}
constraints = {"sources": ft.Log(), "lr": ft.Log()}

# %% The descent, each training on texts of its own
result = ft.minimize(
    draw,
    start,
    key=jax.random.key(2),
    steps=arguments.iterations,
    optimizer=optax.adam(0.2),
    constraints=constraints,
    callbacks=[ft.Progress()],
)

# %% Trainings that neither has seen
again = draw(jax.random.key(4)).replace(init=make_params(jax.random.key(3)))
share = np.asarray(result.hparams["sources"] / result.hparams["sources"].sum())
print("learnt mixture:", {name: f"{100 * s:.0f} %" for name, s in zip(texts, share, strict=True)})
print("learnt rates:", np.asarray(result.hparams["lr"]).round(4))
for name, hparams in (("even", start), ("learnt", result.hparams)):
    state = again.response(hparams)[1]
    print(f"test loss, {name}: {jnp.mean(losses(state.params, test)):.3f} nats a byte")
