"""Random choices whose probabilities depend on a hyperparameter: a warning, and no false alarm."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import foretune as ft
from foretune._problem.choices import cut_hparams
from foretune._problem.problem import validated

KEY = jax.random.key(0)
HPARAMS = {"clip": jnp.array(1.0), "lr": jnp.array(0.1), "p": jnp.array(0.2)}
LOGITS = jnp.arange(3.0)


def problem_of(noise, objective_noise=lambda x, p, key: x):
    """Return a network with noise on its hidden units, made new: a problem warns once."""

    def predict(w, x):
        return jax.nn.relu(x) @ w["out"]

    def loss(w, h, x, key):
        return jnp.mean((predict(w, noise(x @ w["in"], h["p"], key)) - 1.0) ** 2)

    def error(state, h, x):
        w = state.params
        return jnp.mean((predict(w, objective_noise(x @ w["in"], h["p"], KEY)) - 1.0) ** 2)

    def clipped(h):
        return optax.chain(optax.clip_by_global_norm(h["clip"]), optax.sgd(h["lr"], 0.5))

    return ft.Problem(
        ft.Training(loss, clipped, key=KEY),
        error,
        init={"in": jnp.full((4, 3), 0.1), "out": jnp.ones(3)},
        batches=ft.FullBatch(jnp.ones((5, 4)), steps=2),
        validation=jnp.ones((5, 4)),
    )


def dropped(x, p, key):
    return x * jax.random.bernoulli(key, 1 - p, x.shape) / (1 - p)


def fixed(x, p, key):
    return p * x * jax.random.bernoulli(key, 0.8, x.shape)


def in_remat(x, p, key):
    return jax.checkpoint(lambda x, p: dropped(x, p, key))(x, p)


def in_scan(x, p, key):
    return jax.lax.scan(lambda x, k: (dropped(x, p, k), None), x, jax.random.split(key, 2))[0]


def in_loop(x, p, key):
    return jax.lax.fori_loop(0, 2, lambda i, x: dropped(x, p, jax.random.fold_in(key, i)), x)


def in_branch(x, p, key):
    return jax.lax.cond(x[0, 0] > 0, lambda x: dropped(x, p, key), lambda x: x, x)


def in_vmap(x, p, key):
    return jax.vmap(jax.jit(dropped), (0, None, 0))(x, p, jax.random.split(key, len(x)))


def by_hand(x, p, key):
    return jnp.where(p * jnp.ones(x.shape) >= jax.random.uniform(key, x.shape), 0.0, x) / (1 - p)


def gates_of_units(x, p, key):
    return p * x * jax.random.bernoulli(key, jax.nn.sigmoid(p * x))


def categories(x, p, key):
    return p * x * jax.random.categorical(key, p * LOGITS)


def choices(x, p, key):
    return p * x * jax.random.choice(key, LOGITS, p=jax.nn.softmax(p * LOGITS))


def without_replacement(x, p, key):
    return p * x * jax.random.choice(key, LOGITS, (1, 1), False, p=jax.nn.softmax(p * LOGITS))


def counts(x, p, key):
    return p * x * jax.random.poisson(key, p)


@pytest.mark.promotes("jax.random itself promotes, and masks are used as numbers")
@pytest.mark.parametrize(
    "noise",
    [
        *(dropped, by_hand, in_remat, in_scan, in_loop, in_branch, in_vmap),
        *(categories, choices, without_replacement, counts),
    ],
)
def test_a_choice_with_probabilities_of_a_hyperparameter(noise):
    with pytest.warns(UserWarning, match=r"depend on hparams\['p'\] \(.*foretune\.dropout"):
        validated(problem_of(noise), HPARAMS)


@pytest.mark.promotes("masks are used as numbers")
def test_a_choice_in_the_objective():
    with pytest.warns(UserWarning, match=r"depend on hparams\['p'\] \("):
        validated(problem_of(lambda x, p, key: x, dropped), HPARAMS)


@pytest.mark.promotes("masks are used as numbers")
def test_a_choice_by_the_state_is_of_all_that_move_it():
    with pytest.warns(UserWarning, match=r"hparams\['clip'\], hparams\['lr'\], hparams\['p'\] \("):
        validated(problem_of(gates_of_units), HPARAMS)


def ft_dropout(x, p, key):
    return ft.dropout(x, p, key=key)


def gaussian(x, p, key):
    return jax.nn.relu(x + p * jax.random.normal(key, x.shape))


def uniform(x, p, key):
    return jax.nn.relu(x + jax.random.uniform(key, x.shape, minval=-p, maxval=p))


def gamma(x, p, key):
    return x * jax.random.gamma(key, p)


def shuffled(x, p, key):
    return jax.random.permutation(key, p * x)


def meant(x, p, key):
    return x * jax.random.bernoulli(key, jax.lax.stop_gradient(1 - p), x.shape) / (1 - p)


def of_data(x, p, key):
    return jnp.where(x > p, x, p)


def noisy_winner(x, p, key):
    """A network with noise, and the most active unit of it: an accuracy, or a pseudo-label."""
    y = ft.dropout(x, p, key=key) @ jnp.eye(3)
    return y * jax.nn.one_hot(jnp.argmax(y, axis=1), 3)


@pytest.mark.promotes("masks are used as numbers")
@pytest.mark.parametrize(
    "noise",
    [
        *(ft_dropout, fixed, gaussian, uniform, gamma, shuffled),
        *(meant, of_data, noisy_winner),
    ],
)
def test_no_warning(noise):
    """Nor for `clip`, which is compared with the norm of a random gradient."""
    validated(problem_of(noise), HPARAMS)


def test_a_derivative_by_the_author_is_trusted():
    @jax.custom_jvp
    def chosen(p):
        return jax.random.bernoulli(KEY, p).astype(p.dtype)

    chosen.defjvps(lambda tangent, chosen, p: tangent)
    jaxpr = jax.make_jaxpr(lambda p: p * chosen(p))(0.5).jaxpr
    assert cut_hparams(jaxpr, [0]) == []


@pytest.mark.promotes("masks are used as numbers")
def test_no_warning_for_values_alone():
    problem = problem_of(dropped)
    validated(problem, HPARAMS, smooth=False)
    problem.response(HPARAMS)
    assert not ft.Evolution(radius=0.1, samples=2, key=KEY).differentiates


@pytest.mark.promotes("masks are used as numbers")
def test_one_warning_for_each_problem_with_the_callers_line():
    problem = problem_of(dropped)
    larger = problem.replace(batches=ft.FullBatch(jnp.ones((7, 4)), steps=2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for each in (problem, problem, larger):
            validated(each, HPARAMS)
    assert [w.filename for w in seen] == [__file__]
    assert seen[0].category is UserWarning


@pytest.mark.promotes("masks are used as numbers")
@pytest.mark.second_tier
def test_real_time_tuning_warns_too():
    problem = problem_of(dropped)
    tuner = ft.RealTime(problem.dynamics, problem.objective)
    state = tuner.init(problem.init, HPARAMS)
    with pytest.warns(UserWarning, match=r"depend on hparams\['p'\] \("):
        tuner.lower(state, jnp.ones((2, 5, 4)), problem.validation)


def test_a_rate_without_any_derivative_is_refused():
    """As in Equinox, which stops the gradient of the division too."""

    def noise(x, p, key):
        return eqx.nn.Dropout(p)(x, key=key)

    with pytest.raises(ValueError, match=r"depend on hparams\['p'\].*foretune\.dropout"):
        validated(problem_of(noise), HPARAMS)
