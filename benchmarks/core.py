"""The engines beside hand-written JAX and beside plain training, as ratios within one run.

    python -m benchmarks.core [--rounds 7] [--out benchmarks/results/core-cpu.json]

(a) Reverse: softmax regression, 5,000 examples of 784 features, full batch, T = 200 and 1000, one
    weight per example (m = 5,000).
(b) Forward: a network 784-200-200-10, batches of 100, T = 300, m = 1, 3, 8 hyperparameters.

"Hand-written" is the same mathematics as a jitted scan with no library in between: the adjoint
recursion by `jax.vjp`, the tangent recursion by `jax.vmap` of `jax.jvp`. "Plain" is the training
alone, a jitted scan of the same steps. Programs take turns, and each ratio is the median over the
rounds of the ratio within a round, so that a slow spell of the machine touches both sides.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import Table, Timing, command_line, record, time_in_turns
from benchmarks.tasks import cross_entropy, layers, mlp

Programs = dict[str, Callable[[], Any]]


def softmax_reverse(T: int = 200, n: int = 5000) -> Programs:
    """Problem (a) as three programs."""
    kx, ky, kv = jax.random.split(jax.random.key(0), 3)
    X, y = jax.random.normal(kx, (n, 784)) / 28, jax.random.randint(ky, (n,), 0, 10)
    X_val, y_val = jax.random.normal(kv, (n, 784)) / 28, y
    W = jnp.zeros((10, 784))
    hparams = {"weight": jnp.full(n, 0.5)}
    lr = 0.1

    def loss(W, hparams, batch):
        x, y = batch
        each = optax.softmax_cross_entropy_with_integer_labels(x @ W.T, y)
        return jnp.mean(hparams["weight"] * each)

    def error(W, batch):
        return cross_entropy(batch[0] @ W.T, batch[1])

    problem = ft.Problem(
        dynamics=ft.Training(loss, optax.sgd(lr)),
        objective=lambda state, hparams, batch: error(state.params, batch),
        init=W,
        batches=ft.FullBatch((X, y), steps=T),
        validation=(X_val, y_val),
    )

    def phi(W, hparams, batch):
        return W - lr * jax.grad(loss)(W, hparams, batch)

    @jax.jit
    def plain(W, hparams, batch, val):
        W, _ = lax.scan(lambda W, _: (phi(W, hparams, batch), None), W, None, length=T)
        return error(W, val)

    @jax.jit
    def by_hand(W, hparams, batch, val):
        W, states = lax.scan(lambda W, _: (phi(W, hparams, batch), W), W, None, length=T)
        value, alpha = jax.value_and_grad(error)(W, val)

        def back(carry, W):
            alpha, g = carry
            _, pull = jax.vjp(lambda W, h: phi(W, h, batch), W, hparams)
            alpha, dg = pull(alpha)
            return (alpha, jax.tree.map(jnp.add, g, dg)), None

        zero = jax.tree.map(jnp.zeros_like, hparams)
        (alpha, g), _ = lax.scan(back, (alpha, zero), states, reverse=True)
        return value, g, W

    engine = ft.Reverse()
    return {
        "plain": lambda: plain(W, hparams, (X, y), (X_val, y_val)),
        "by hand": lambda: by_hand(W, hparams, (X, y), (X_val, y_val)),
        "foretune": lambda: engine(problem, hparams),
    }


def network_forward(m: int, T: int = 300, n: int = 5000) -> Programs:
    """Problem (b) with m hyperparameters as three programs: 1 rate, or blocks of a schedule."""
    keys = jax.random.split(jax.random.key(0), 5)
    X, y = jax.random.normal(keys[0], (n, 784)), jax.random.randint(keys[1], (n,), 0, 10)
    X_val, y_val = jax.random.normal(keys[2], (1000, 784)), y[:1000]
    params = layers(keys[3], 784, 200, 200, 10)
    indices = jax.random.randint(keys[4], (T, 100), 0, n)
    hparams = {"lr": jnp.full(m, 0.05)}
    momentum = 0.9

    def error(params, batch):
        return cross_entropy(mlp(params, batch[0]), batch[1])

    def loss(params, hparams, batch):
        return error(params, batch)

    def schedule(hparams, t):
        return hparams["lr"][t * m // T]

    problem = ft.Problem(
        dynamics=ft.Training(loss, lambda h: optax.sgd(lambda t: schedule(h, t), momentum)),
        objective=lambda state, hparams, batch: error(state.params, batch),
        init=params,
        batches=ft.Minibatches((X, y), indices),
        validation=(X_val, y_val),
    )

    def phi(state, hparams, x, data):
        params, velocity, t = state
        grads = jax.grad(loss)(params, hparams, jax.tree.map(lambda a: a[x], data))
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
        lr = schedule(hparams, t.astype(int))
        return jax.tree.map(lambda p, v: p - lr * v, params, velocity), velocity, t + 1

    start = (params, jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))

    @jax.jit
    def plain(s, hparams, data, val):
        s, _ = lax.scan(lambda s, x: (phi(s, hparams, x, data), None), s, indices)
        return error(s[0], val)

    @jax.jit
    def by_hand(s, hparams, data, val):
        directions = {"lr": jnp.eye(m)}

        def step(carry, x):
            s, Z = carry

            def column(z, e):
                return jax.jvp(lambda s, h: phi(s, h, x, data), (s, hparams), (z, e))

            return jax.vmap(column, out_axes=(None, 0))(Z, directions), None

        Z = jax.tree.map(lambda leaf: jnp.zeros((m, *leaf.shape)), s)
        (s, Z), _ = lax.scan(step, (s, Z), indices)
        value, alpha = jax.value_and_grad(error)(s[0], val)
        dots = jax.tree.map(lambda a, z: jnp.tensordot(z, a, a.ndim), alpha, Z[0])
        return value, sum(jax.tree.leaves(dots)), s

    engine = ft.Forward()
    return {
        "plain": lambda: plain(start, hparams, (X, y), (X_val, y_val)),
        "by hand": lambda: by_hand(start, hparams, (X, y), (X_val, y_val)),
        "foretune": lambda: engine(problem, hparams),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each program")
    arguments = parser.parse_args()

    cases: dict[str, tuple[Callable[[], Programs], float]] = {
        f"reverse softmax 5000x784, T={T}, m=5000": (functools.partial(softmax_reverse, T), 4.0)
        for T in (200, 1000)  # what is constant in a call weighs less in the longer one
    }
    for m in (1, 3, 8):
        name = f"forward network 784-200-200-10, T=300, m={m}"
        cases[name] = (functools.partial(network_forward, m), 1.0 + 2 * m)
    results: dict[str, dict[str, Timing | float]] = {}
    table = Table("work", "plain, s", "ours, s", "ours / by hand", "ours / plain", "target")
    for name, (make, target) in cases.items():
        seconds, ratio = time_in_turns(make(), rounds=arguments.rounds)
        by_hand, plain = (ratio("foretune", other) for other in ("by hand", "plain"))
        results[name] = {
            "seconds": seconds,
            "foretune / by hand": by_hand,
            "foretune / plain": plain,
            "target foretune / by hand": 1.05,
            "target foretune / plain": target,
        }
        table.add(name, seconds["plain"], seconds["foretune"], by_hand, plain, target)
    record(arguments.out, results)


if __name__ == "__main__":
    main()
