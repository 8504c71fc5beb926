"""Other ways to attribute errors to training examples, in a few lines each, beside `ft.attribute`.

All use the trained parameters alone, and return scores as `ft.attribute` does: K x n, negative where
an example helps. `model(params, examples) -> (logits, labels)`, both with a leading axis of examples;
the loss of an example is the mean of its cross-entropies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

CHUNK = 250  # examples whose gradients are in memory together
ITERATIONS = 30  # of the solver


def loss_of(logits: Any, labels: Any) -> Any:
    """Return the mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def margin_of(logits: Any, labels: Any) -> Any:
    """Return the mean of log(p / (1 - p)), p the probability of the label: TRAK's output."""
    p = jnp.take_along_axis(jax.nn.softmax(logits), labels[..., None], -1)[..., 0]
    p = jnp.clip(p, 1e-6, 1 - 1e-6)
    return jnp.mean(jnp.log(p) - jnp.log1p(-p))


def gradients(model: Any, of: Any, params: Any, examples: Any, projection: Any = None) -> Any:
    """Return the gradient of each example, a row each, times the projection where there is one."""
    n = len(jax.tree.leaves(examples)[0])
    parts = np.split(np.arange(n), range(CHUNK, n, CHUNK))
    chunks = (jax.tree.map(lambda leaf: jnp.asarray(leaf)[i], examples) for i in parts)  # noqa: B023
    return jnp.concatenate([_rows(model, of, params, chunk, projection) for chunk in chunks])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rows(model: Any, of: Any, params: Any, examples: Any, projection: Any) -> Any:
    def row(example):
        batch = jax.tree.map(lambda leaf: leaf[None], example)
        return ravel_pytree(jax.grad(lambda params: of(*model(params, batch)))(params))[0]

    found = jax.vmap(row)(examples)
    return found if projection is None else found @ projection


def cosine(model: Any, params: Any, train: Any, queries: Any) -> np.ndarray:
    """Return minus the cosines of the gradients of queries and examples."""
    g, q = (gradients(model, loss_of, params, examples) for examples in (train, queries))
    q /= jnp.linalg.norm(q, axis=1, keepdims=True)
    return -np.asarray((q @ g.T) / jnp.maximum(jnp.linalg.norm(g, axis=1), 1e-12))


def influence(
    model: Any, params: Any, train: Any, queries: Any, dampings: Any
) -> dict[float, np.ndarray]:
    """Return the influence functions of Koh and Liang (2017), -q (H + damping)^-1 g_i / n.

    H is the Gauss-Newton matrix of the mean loss, which has no negative curvature. Each query has its
    Krylov space, V' H V = T, in which (H + damping) v = q is solved for all dampings.
    """
    q = gradients(model, loss_of, params, queries)
    V, T = _lanczos(model, params, train, q)
    g, n = gradients(model, loss_of, params, train), len(jax.tree.leaves(train)[0])
    first = jnp.linalg.norm(q, axis=1)[:, None] * jnp.eye(ITERATIONS)[0]
    found = {}
    for damping in dampings:
        y = jnp.linalg.solve(T + damping * jnp.eye(ITERATIONS), first[..., None])[..., 0]
        found[damping] = -np.asarray(jnp.einsum("kjp,kj->kp", V, y) @ g.T) / n
    return found


@functools.partial(jax.jit, static_argnums=0)
def _lanczos(model: Any, params: Any, train: Any, q: Any) -> Any:
    """Return an orthonormal basis for each row of q, and the tridiagonal matrix of H in it."""
    flat, unravel = ravel_pytree(params)
    logits, push = jax.linearize(lambda flat: model(unravel(flat), train)[0], flat)
    _, pull = jax.vjp(lambda flat: model(unravel(flat), train)[0], flat)
    p, count = jax.nn.softmax(logits), logits.size // logits.shape[-1]

    def product(v):
        Rz = push(v)
        return pull(p * (Rz - jnp.sum(p * Rz, -1, keepdims=True)) / count)[0]

    def normed(v):
        size = jnp.linalg.norm(v)
        return v / jnp.maximum(size, 1e-12), size

    def of_query(q):
        def step(carry, j):
            V, v = carry  # V has the vectors so far, and zeros
            V = V.at[j].set(v)
            w = product(v)
            alpha = w @ v
            for _ in range(2):  # orthogonal to all so far
                w = w - (V @ w) @ V
            w, beta = normed(w)
            return (V, w), (alpha, beta)

        start = jnp.zeros((ITERATIONS, q.size)), normed(q)[0]
        (V, _), (alpha, beta) = jax.lax.scan(step, start, jnp.arange(ITERATIONS))
        return V, jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)

    return jax.lax.map(of_query, q)


def trak(
    model: Any, params: Any, train: Any, queries: Any, dimension: int, seed: int
) -> np.ndarray:
    """Return the scores of Park et al. (TRAK, 2023) from one trained model.

    -(1 - p_k) phi_k (Phi' Phi)^-1 phi_i (1 - p_i), with phi the projected gradient of the margin and
    1 - p the derivative of the loss in it, both means over the predictions of an example.
    """
    size = ravel_pytree(params)[0].size
    projection = jax.random.normal(jax.random.key(seed), (size, dimension)) / dimension**0.5
    phi, phi_q = (
        gradients(model, margin_of, params, examples, projection) for examples in (train, queries)
    )

    def missing(examples):
        logits, labels = model(params, examples)
        p = jnp.take_along_axis(jax.nn.softmax(logits), labels[..., None], -1)[..., 0]
        return 1 - jnp.mean(p.reshape(len(p), -1), 1)

    gram = phi.T @ phi
    gram += 1e-6 * jnp.trace(gram) / dimension * jnp.eye(dimension)
    scores = phi_q @ jnp.linalg.solve(gram, (phi * missing(train)[:, None]).T)
    return -np.asarray(missing(queries)[:, None] * scores)
