"""The mean of several problems under one lambda: folds, and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._problem.equality import same
from foretune._problem.system import rows_of

from ..problems import assert_trees_close

FOLDS, ROWS, STEPS = 3, 12, 7
ENGINES = (ft.Reverse(), ft.Forward())


def loss(params, hparams, batch):
    x, y, use = batch
    residuals = jnp.tanh(x @ params["w"]) - y
    return jnp.sum(use * residuals**2) + hparams["decay"] * jnp.sum(params["w"] ** 2)


def error(state, hparams, batch):
    x, y, use = batch
    return jnp.sum(use * (jnp.tanh(x @ state.params["w"]) - y) ** 2) / jnp.sum(use)


def training_error(state, hparams, batch):
    x, y, _ = batch
    return jnp.mean((jnp.tanh(x @ state.params["w"]) - y) ** 2) * jnp.exp(hparams["lr"])


class Data:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.x = jnp.asarray(rng.normal(size=(ROWS, 4)))
        self.y = jnp.asarray(rng.normal(size=ROWS))
        self.fold = jnp.arange(ROWS) % FOLDS
        self.indices = rng.integers(0, ROWS, (FOLDS, STEPS, 5))
        self.starts = rng.normal(size=(FOLDS, 4))

    def batches(self, kind, k):
        use = (self.fold != k).astype(float)
        if kind == "full":
            return ft.FullBatch((self.x, self.y, use), steps=STEPS)
        if kind == "minibatches":
            return ft.Minibatches((self.x, self.y, use), self.indices[k])
        i = self.indices[k]
        return self.x[i], self.y[i], use[i]

    def problem(self, k, kind="full", *, objective=error, init=None, **options):
        return ft.Problem(
            ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.5)),
            objective,
            init={"w": self.starts[k]} if init is None else init,
            batches=self.batches(kind, k),
            validation=(self.x, self.y, (self.fold == k).astype(float)),
            **options,
        )


HPARAMS = {"lr": 0.05, "decay": 0.3}


def hyper():
    return {name: jnp.asarray(value) for name, value in HPARAMS.items()}


def mean(problem_of, count=FOLDS):
    return ft.Mean([problem_of(k) for k in range(count)])


def mean_of(problem_of_fold, hparams):
    results = [ft.Reverse()(problem_of_fold(k), hparams) for k in range(FOLDS)]
    means = [jax.tree.map(lambda *a: sum(a) / FOLDS, *part) for part in zip(*results, strict=True)]
    return means[0], means[1], [r.state for r in results]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "kind",
    [
        "minibatches",
        pytest.param("stacked", marks=pytest.mark.second_tier),
    ],
)
def test_the_mean_of_its_folds(kind):
    data = Data()
    value, grad, states = mean_of(lambda k: data.problem(k, kind), hyper())
    problem = mean(lambda k: data.problem(k, kind))
    for engine in ENGINES:
        found = engine(problem, hyper())
        np.testing.assert_allclose(found.value, value, rtol=1e-12)
        assert_trees_close(found.grad, grad, 1e-11)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        assert_trees_close(found.state.params, stacked.params, 1e-12)
    each = problem.values(ft.Reverse()(problem, hyper()).state, hyper())
    np.testing.assert_allclose(each.mean(), value, rtol=1e-12)
    assert each.shape == (FOLDS,)
    assert problem.count == FOLDS
    assert problem.steps == STEPS


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_each_hyperparameter_follows_its_own_mean_error():
    data = Data()
    errors = {"lr": training_error, "decay": error}

    def fold(k):
        return data.problem(k, objective=errors, trajectory=True)

    value, grad, _ = mean_of(fold, hyper())
    problem = mean(fold)
    for engine in ENGINES:
        found = engine(problem, hyper())
        assert_trees_close(found.value, value, 1e-12)
        assert_trees_close(found.grad, grad, 1e-11)
    one = mean(lambda k: data.problem(k, objective={"lr": error, "decay": error}))
    assert set(rows_of(one).values()) == {0}  # one error, one adjoint


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_starts_and_random_keys_may_differ_and_starts_may_depend_on_lambda():
    data = Data()

    def noisy(params, hparams, batch, state, key):
        drop = jax.random.bernoulli(key, 0.7, (4,))
        mean = 0.9 * state + 0.1 * jnp.mean(params["w"])
        return loss({"w": jnp.where(drop, params["w"], 0.0)}, hparams, batch) + state**2, mean

    def fold(k):
        training = ft.Training(
            noisy, lambda h: optax.sgd(h["lr"]), has_state=True, key=jax.random.key(k)
        )
        start = lambda h: ({"w": h["decay"] * jnp.ones(4)}, jnp.zeros(()))  # noqa: E731
        return data.problem(k, init=start).replace(dynamics=training)

    value, grad, _ = mean_of(fold, hyper())
    for engine in ENGINES:
        found = engine(mean(fold), hyper())
        np.testing.assert_allclose(found.value, value, rtol=1e-12)
        assert_trees_close(found.grad, grad, 1e-11)


class PowerIteration(ft.Dynamics):
    matrix: jax.Array

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        v = self.matrix @ state + hparams["shift"] * state
        return v / jnp.linalg.norm(v)


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_any_dynamics_with_arrays_of_its_own():
    A = np.random.default_rng(1).normal(size=(FOLDS, 3, 3))
    A = A @ A.transpose(0, 2, 1)

    def fold(k):
        return ft.Problem(
            PowerIteration(jnp.asarray(A[k])),
            lambda state, h, e: jnp.sum((state - e) ** 2),
            jnp.ones(3),
            ft.FullBatch(None, steps=5),
            jnp.eye(3)[k],
        )

    hparams = {"shift": jnp.asarray(0.4)}
    value, grad, _ = mean_of(fold, hparams)
    for engine in ENGINES:
        found = engine(mean(fold), hparams)
        np.testing.assert_allclose(found.value, value, rtol=1e-12)
        assert_trees_close(found.grad, grad, 1e-11)


def test_what_the_folds_share_is_held_once():
    data = Data()
    problem = mean(data.problem)
    x, y, use = problem.batches.source.data
    assert x.shape == (ROWS, 4)
    assert y.shape == (ROWS,)
    assert use.array.shape == (FOLDS, ROWS)
    indexed = mean(lambda k: data.problem(k, "minibatches"))
    assert indexed.batches.xs.array.shape == (STEPS, FOLDS, 5)
    assert indexed.batches.source.indices is None


def test_it_compiles_once():
    data, traced = Data(), []

    def counted(params, hparams, batch):
        traced.append(1)
        return loss(params, hparams, batch)

    def fold(k):
        return data.problem(k).replace(dynamics=ft.Training(counted, optax.sgd(0.1)))

    problem = mean(fold)
    hparams = {"decay": jnp.array(0.1)}
    ft.Reverse()(problem, hparams)
    before = len(traced)
    ft.Reverse()(problem, {"decay": jnp.array(0.2)})
    assert len(traced) == before


def shape_differs(data, k):
    return data.problem(k).replace(
        batches=ft.FullBatch((data.x[k:], data.y[k:], data.y[k:]), steps=7)
    )


def closure_differs(data, k):
    mask = (data.fold == k).astype(float)

    def own(state, hparams, batch):
        return error(state, hparams, (data.x, data.y, mask))

    return data.problem(k, objective=own)


def steps_differ(data, k):
    return data.problem(k).replace(batches=ft.FullBatch((data.x, data.y, data.y), steps=5 + k))


def constant_differs(data, k):
    return data.problem(k).replace(dynamics=ft.Training(loss, optax.sgd(0.1 * (k + 1))))


@pytest.mark.parametrize(
    ("fold", "message"),
    [
        (
            shape_differs,
            r"batches.data\[0\] is float32\[11,4\] in fold 1, float32\[12,4\] in fold 0",
        ),
        (closure_differs, r"objective is another function in fold 1 .* closes over other values"),
        (steps_differ, r"FullBatch of 5 steps, FullBatch of 6 steps"),
        (constant_differs, r"dynamics.optimizer.* in fold 1 than in fold 0"),
        (lambda data, k: mean(data.problem), "Give all their problems in one list"),
        (lambda data, k: data.problem(k, trajectory=k == 1), "trajectory is True in fold 1"),
        (
            lambda data, k: data.problem(k, init={"w": data.starts[k], "b": 1.0} if k else None),
            "init",
        ),
        (
            lambda data, k: data.problem(
                k, objective={"lr": error, "decay": error} if k else error
            ),
            "only one of them has objective",
        ),
    ],
)
def test_folds_that_do_not_fit_together_are_refused(fold, message):
    data = Data()
    with pytest.raises((ValueError, TypeError), match=message):
        mean(lambda k: fold(data, k))


def test_its_parts_are_changed_before_the_mean_is_taken():
    data = Data()
    with pytest.raises(TypeError, match="has no validation of its own: change the problems"):
        mean(data.problem).replace(validation=(data.x, data.y))


def test_a_fold_that_diverges_is_reported():
    data = Data()
    fold = lambda k: data.problem(k, init={"w": data.starts[k] * (1e30 if k == 1 else 1)})  # noqa: E731
    with pytest.raises(ft.NonFiniteError, match="at step"):
        ft.Reverse()(mean(fold), {**hyper(), "decay": jnp.array(1e10)})


def ridge_folds(rows=20):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32)
    y = x @ jnp.array([1.0, 2.0, 3.0]) + jnp.asarray(rng.normal(size=rows), jnp.float32)
    fold = jnp.arange(rows) % 2
    uses = [(fold == k).astype(float) for k in range(2)]

    def loss(w, h, batch):
        x, y, use = batch
        return jnp.sum(use * (x @ w - y) ** 2) / jnp.sum(use) + h["decay"] * jnp.sum(w**2)

    def error(state, h, batch):
        x, y, use = batch
        return jnp.sum(use * (x @ state.params - y) ** 2) / jnp.sum(use)

    training = ft.Training(loss, optax.sgd(0.1))

    def problem_of_fold(k):
        batches = ft.FullBatch((x, y, 1 - uses[k]), steps=300)
        return ft.Problem(training, error, jnp.zeros(3), batches, (x, y, uses[k]))

    return mean(problem_of_fold, 2)


@pytest.mark.second_tier
def test_implicit_takes_folds():
    folds, hparams = ridge_folds(), {"decay": jnp.array(0.5)}
    exact = ft.Reverse()(folds, hparams).grad["decay"]
    found = ft.Implicit()(folds, hparams).grad["decay"]
    np.testing.assert_allclose(found, exact, rtol=1e-3)


def test_functions_are_the_same_when_code_and_closure_are():
    def make(a, b=None):
        return lambda x: a * x + (0 if b is None else b[0])

    assert same(make(1), make(1))
    assert not same(make(1), make(2))
    assert same(make(1, jnp.ones(2)), make(1, jnp.ones(2)))
    assert not same(make(1, jnp.ones(2)), make(1, jnp.zeros(2)))
    assert not same(make(1, jnp.ones(2)), make(1, np.ones(3)))
    assert same(optax.adam(0.1, b1=0.8), optax.adam(0.1, b1=0.8))
    assert not same(optax.adam(0.1, b1=0.8), optax.adam(0.1, b1=0.9))
    assert same(
        optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
        optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    )
    assert not same(jax.jit(make(1)), jax.jit(make(2)))
    assert same(jax.jit(make(3)), jax.jit(make(3)))
    assert not same(make(1), 3)


def test_a_start_that_is_a_function_holds_arrays_of_each_problem():
    """As features of each task's examples, by a network that is learnt, computed once."""

    def start(x, h):
        return h["a"] * x

    def problem_of(x):
        return ft.Problem(
            ft.Training(lambda w, h, batch: jnp.sum((w - batch) ** 2), optax.sgd(0.1)),
            lambda state, h, _: jnp.sum(state.params),
            jax.tree_util.Partial(start, x),
            ft.FullBatch(jnp.zeros(2), steps=1),
        )

    xs, hparams = (jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])), {"a": jnp.array(2.0)}
    mean = ft.Reverse()(ft.Mean([problem_of(x) for x in xs]), hparams)
    each = [ft.Reverse()(problem_of(x), hparams) for x in xs]
    np.testing.assert_allclose(mean.grad["a"], sum(e.grad["a"] for e in each) / 2, rtol=1e-6)
    np.testing.assert_allclose(mean.state.params, [e.state.params for e in each], rtol=1e-6)
