"""What an attribution warns of and refuses."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from .trainings import (
    CASES,
    INDICES,
    INIT,
    QUERIES,
    D,
    K,
    N,
    X,
    Y,
    error,
    mean_square,
    plain,
    problem_of,
    refused,
    ridge,
    same,
    squares,
)


def chaotic():
    """A training that multiplies small changes: the logistic map, with a rate that depends on data."""

    def loss(w, hparams, batch):
        return jnp.mean(batch[0]) * (w**3 / 3 - w**2 / 2) * 3.9 + w**2 / 2

    def losses(w, hparams, batch):
        return batch[0] * (w**3 / 3 - w**2 / 2) * 3.9

    problem = ft.Problem(
        ft.Training(loss, optax.sgd(1.0)),
        lambda state, h, batch: jnp.mean((state.params - batch[0]) ** 2),
        np.float32(0.3),
        ft.FullBatch((np.ones(20, np.float32),), steps=60),
    )
    return problem, losses


@pytest.mark.second_tier
def test_a_chaotic_training_is_warned_of():
    problem, losses = chaotic()
    queries = (np.array([0.1, 0.8], np.float32),)
    with pytest.warns(RuntimeWarning, match="the training is chaotic"):
        ft.attribute(problem, {}, queries, losses=losses)


@pytest.mark.second_tier
def test_a_smooth_training_is_not_warned_of():
    problem, queries, losses, *_ = ridge()
    ft.attribute(problem, {}, queries, losses=losses)


def test_a_training_that_diverges():
    problem, _ = plain()
    with pytest.raises(ft.NonFiniteError, match=r"query 0: not finite: value.*\n.*step"):
        ft.attribute(problem, {"lr": jnp.array(1e20)}, QUERIES)
    with ft.check_finite(False):
        found = ft.attribute(problem, {"lr": jnp.array(1e20)}, QUERIES)
    assert not np.isfinite(found.scores).all()


@pytest.mark.second_tier
def test_scores_that_are_not_finite_say_why():
    problem, _ = plain()
    dead = ft.Minibatches((X * [1, 1, 0], Y), INDICES)
    problem = problem.replace(dynamics=ft.Training(mean_square, optax.adam(0.01)), batches=dead)
    with pytest.raises(
        ft.NonFiniteError, match=r"query 0: .*hparams\['weight'\].*\n(.*\n)*.*eps_root"
    ):
        ft.attribute(problem, {}, QUERIES)


@pytest.mark.second_tier
def test_a_model_that_is_more_than_arrays():
    model = eqx.nn.MLP(D, "scalar", 4, 1, key=jax.random.key(0))

    def loss(model, hparams, batch):
        return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    def of_model(state, hparams, batch):
        return loss(state.params, hparams, batch)

    training = ft.Training(loss, optax.sgd(0.1))
    problem = problem_of(training, of_model, model)
    exact = ft.attribute(problem, {}, QUERIES)
    assert exact.scores.shape == (K, N)
    low = ft.attribute(problem.replace(dynamics=training.in_precision("bfloat16")), {}, QUERIES)
    assert low.scores.dtype == np.float32
    np.testing.assert_allclose(low.scores, exact.scores, atol=0.02)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("batch norm", "each as a batch of one"),
        ("dropout", r"draw random numbers \(dropout\).*give `losses=`"),
    ],
)
def test_examples_that_depend_on_each_other_need_losses(case, words):
    dynamics, _, _, objective, init = CASES[case]
    with pytest.raises(ValueError, match=words):
        ft.attribute(problem_of(dynamics, objective, init), {"lr": jnp.array(0.05)}, QUERIES)


def test_losses_that_are_not_those_of_the_loss():
    problem, hparams = plain()

    def halves(params, hparams, batch):
        return squares(params, hparams, batch) / 2

    with pytest.raises(ValueError, match="are not those that the loss is the mean of"):
        ft.attribute(problem, hparams, QUERIES, losses=halves)
    with pytest.raises(TypeError, match=r"of shape \(4,\); it returned\n  losses: float32\[\]"):
        ft.attribute(problem, hparams, QUERIES, losses=mean_square)
    with pytest.raises(TypeError, match=r"losses\(params, hparams, batch\)"):
        ft.attribute(problem, hparams, QUERIES, losses=lambda params: 0)


@pytest.mark.second_tier
def test_a_small_penalty_is_not_lost():
    problem = problem_of(CASES["penalty"][0])
    hparams = {"lr": jnp.array(0.05), "decay": jnp.array(1e-4)}
    _, state = problem.response(hparams)

    def of_state(state, hparams, validation):
        return jnp.sum(state.params["a"])

    seen = ft.attribute(problem, hparams, [of_state], losses=squares).errors
    assert seen[0] == pytest.approx(float(jnp.sum(state.params["a"])), rel=1e-6)


def test_a_draw():
    problem, hparams = plain()
    start = jax.tree.map(jnp.asarray, INIT)

    def draw(key):
        return problem.replace(
            init=jax.tree.map(lambda leaf: leaf + jax.random.uniform(key), start)
        )

    key = jax.random.key(3)
    same(ft.attribute(draw, hparams, QUERIES, key=key), ft.attribute(draw(key), hparams, QUERIES))
    refused(TypeError, "key=... is for a draw", key=key)


def test_what_is_refused():
    problem, _ = plain()
    refused(TypeError, "the problem is a `Mean`", problem=ft.Mean([problem, problem]))
    refused(ValueError, "averages its error", problem=problem.replace(trajectory=True))
    refused(ValueError, "Give `foretune.Reverse", engine=ft.Forward())
    refused(ValueError, "everything", engine=ft.Reverse(store="everything"))
    refused(ValueError, r"chunk=0", chunk=0)
    refused(TypeError, "give `folder=` instead of a Checkpoint", callbacks=[ft.Checkpoint("x")])
    refused(TypeError, r"give a list of objectives, `\[f\]`", queries=error)
    refused(ValueError, "leading axes", queries=(QUERIES[0], QUERIES[1][:1]))
    refused(ValueError, "holds no example", queries=(QUERIES[0][:0], QUERIES[1][:0]))
    refused(
        ValueError,
        "give `queries=",
        problem=problem.replace(objective={"lr": error}),
    )
    refused(TypeError, "which do not number the examples", problem=plain(batches=(X, Y))[0])
    refused(ValueError, "groups has 3 entries for 12", groups=np.arange(3))
    refused(TypeError, "one integer for each", groups=np.linspace(0, 1, N))
    refused(ValueError, "these run from -1 to 10", groups=np.arange(N) - 1)
    refused(ValueError, "without gaps; these run from 0 to 2", groups=2 * (np.arange(N) % 2))
    refused(ValueError, "without gaps", groups=np.arange(N) % 2 + np.int64(2) ** 32)
    refused(ValueError, "Give queries like the validation", queries=(QUERIES[0][:, :2], QUERIES[1]))
    refused(ValueError, "Give queries like the validation", queries=QUERIES[0])
    named = {"lr": jnp.array(0.05), "weight": jnp.array(1.0)}
    refused(ValueError, "but weights of examples are a vector", hparams=named)
    other = problem.replace(dynamics=Descent(), init=np.zeros(D, np.float32))
    refused(TypeError, "can be added to `foretune.Training` alone", problem=other)


class Descent(ft.Dynamics):
    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return state - hparams["lr"] * batch[0].sum(0)
