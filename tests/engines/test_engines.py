"""What the engines promise besides the right number: memory, compilations, composition."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines import forward

from ..compilations import compilations
from ..problems import assert_trees_close, penalised, regression, squared_error


def network(steps, width=64, m=3):
    """Return a network with momentum and m hyperparameters, its batches given by indices."""
    rng = np.random.default_rng(0)
    sizes = [20, width, width, 5]
    params = [rng.normal(size=s).astype(np.float32) / 8 for s in itertools.pairwise(sizes)]
    x, y = rng.normal(size=(200, 20)).astype(np.float32), rng.integers(0, 5, 200)

    def logits(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return x @ params[-1]

    def loss(params, hparams, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1])
        return jnp.mean(losses)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(lambda t: h["lr"][t % m], 0.9)),
        lambda state, h, batch: loss(state.params, h, batch),
        params,
        ft.Minibatches((x, y), rng.integers(0, 200, (steps, 20))),
        (x, y),
    )
    return problem, {"lr": jnp.full(m, 0.05)}


def temporary_bytes(engine, problem, hparams):
    analysis = engine.lower(problem, hparams).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def state_bytes(problem, hparams):
    state = eqx.filter_eval_shape(problem.start, hparams)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.second_tier
def test_memory_of_forward_mode_does_not_grow_with_steps():
    few, many = (temporary_bytes(ft.Forward(), *network(steps)) for steps in (10, 1000))
    assert many == few


@pytest.mark.second_tier
def test_memory_of_forward_mode_is_bounded_by_the_chunk():
    whole, chunked = (
        temporary_bytes(engine, *network(20, m=40))
        for engine in (ft.Forward(), ft.Forward(chunk=4))
    )
    assert chunked < whole / 4


def test_memory_of_reverse_mode_grows_by_one_state_a_step():
    few, many = (temporary_bytes(ft.Reverse(), *network(steps)) for steps in (10, 1000))
    per_step = (many - few) / 990
    assert 0.9 * state_bytes(*network(10)) <= per_step <= 1.1 * state_bytes(*network(10))


def test_columns_that_no_memory_holds_are_refused_before_compilation(monkeypatch, compilations):
    problem, hparams = network(20, m=40)
    column = state_bytes(problem, hparams) - 8 + 40 * 4  # two counters have no derivative
    monkeypatch.setattr(forward, "free_bytes", lambda: 39.0 * column)
    pattern = r"Forward holds 40 columns of Z at once.*MiB.*`Forward\(chunk=19\)`.*or `Reverse\(\)`"
    with pytest.raises(MemoryError, match=pattern):
        ft.Forward()(problem, hparams)
    with pytest.raises(MemoryError, match=pattern):
        jax.jit(lambda h: ft.Forward()(problem, h).grad)(hparams)
    assert not compilations
    ft.Forward(chunk=19).lower(problem, hparams)
    monkeypatch.setattr(forward, "free_bytes", lambda: 40.0 * column)
    ft.Forward().lower(problem, hparams)


@pytest.mark.parametrize("batches", ["full", "minibatches"])
def test_data_is_not_copied_for_each_step(batches):
    """The temporary memory stays under the data's size, however many steps see it."""
    x, y = np.zeros((20_000, 50), np.float32), np.zeros(20_000, np.float32)
    given = ft.FullBatch((x, y), steps=500)
    if batches == "minibatches":
        given = ft.Minibatches((x, y), np.zeros((500, 10), int))
    problem, hparams = regression(
        d=50,
        batches=given,
        validation=(x, y),
        init={"w": np.zeros(50, np.float32), "b": np.float32(0)},
    )
    for engine in (ft.Forward(), ft.Reverse()):
        assert temporary_bytes(engine, problem, hparams) < x.nbytes


def test_forward_mode_computes_the_step_once_for_all_columns():
    calls = []

    def loss(params, hparams, batch):
        jax.debug.callback(lambda: calls.append(1))
        return penalised(params, hparams, batch)

    optimizer = lambda h: optax.sgd(lambda t: h["lr"][t])  # noqa: E731
    problem, hparams = regression(steps=7, dynamics=ft.Training(loss, optimizer))
    ft.Forward()(problem, hparams | {"lr": jnp.full(7, 0.1)})
    jax.effects_barrier()
    assert len(calls) == 7


@pytest.fixture(name="compilations")
def _compilations():
    """The names of the programs of this library that have been compiled."""
    with compilations("compute", "_response") as seen:
        yield seen


@pytest.mark.parametrize("engine", [ft.Reverse(), ft.Forward(), ft.Forward(chunk=1)], ids=str)
def test_new_values_of_the_same_shapes_do_not_compile_again(engine, compilations):
    problem, hparams = regression(optimizer=lambda h: optax.sgd(h["lr"]))  # compiled nowhere else
    engine(problem, hparams)
    problem.response(hparams)
    first = list(compilations)
    assert len(first) == 2
    x, y = problem.batches.data
    others = [
        {"lr": np.float32(0.2), "decay": np.float32(0.3)},
        {"lr": jnp.asarray(0.2), "decay": jnp.array(0.3)},  # a weak type, from a Python number
        {"lr": np.array(0.2), "decay": np.array(0.3)},  # float64 outside JAX
    ]
    fresh = ft.Problem(
        problem.dynamics,
        problem.objective,
        {"w": np.ones(3, np.float32), "b": np.ones((), np.float32)},
        ft.FullBatch((np.asarray(x) + 1, np.asarray(y)), steps=10),
        (np.asarray(x), np.asarray(y)),
    )
    for other in others:
        for p in (problem, fresh):
            engine(p, other)
            p.response(other)
    assert compilations == first


def test_engines_are_pure_under_jit_vmap_and_grad():
    problem, hparams = regression()
    for engine in (ft.Reverse(), ft.Forward()):
        expected = engine(problem, hparams)
        jitted = jax.jit(lambda h, engine=engine: engine(problem, h))(hparams)
        assert_trees_close(jitted, expected, 1e-6)
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), hparams)
        mapped = jax.vmap(lambda h, engine=engine: engine(problem, h).grad)(batch)
        assert_trees_close(jax.tree.map(lambda leaf: leaf[0], mapped), expected.grad, 1e-5)


def test_constants_inside_jit():
    """None of the arguments is traced, but the call is."""
    problem, hparams = regression()
    found = jax.jit(lambda x: x * ft.Reverse()(problem, hparams).grad["lr"])(2.0)
    np.testing.assert_allclose(found, 2 * ft.Reverse()(problem, hparams).grad["lr"], rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_a_hypergradient_can_be_differentiated():
    """Reverse mode inside jvp: a Hessian-vector product, against differences of gradients."""
    problem, hparams = regression(dtype=np.float64)
    f = lambda h: ft.Reverse()(problem, h).grad  # noqa: E731
    v = {"lr": jnp.array(1.0), "decay": jnp.array(-0.5)}
    _, product = jax.jvp(f, (hparams,), (v,))
    step = 1e-6
    high, low = (f(jax.tree.map(lambda x, d: x + s * d, hparams, v)) for s in (step, -step))
    for leaf in v:
        np.testing.assert_allclose(product[leaf], (high[leaf] - low[leaf]) / (2 * step), rtol=1e-6)


@pytest.mark.second_tier
def test_sharded_data_gives_the_same_result():
    problem, hparams = regression(n=16)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    data = jax.device_put(problem.batches.data, place)
    sharded, _ = regression(n=16, batches=ft.FullBatch(data, steps=10))
    for engine in (ft.Reverse(), ft.Forward()):
        assert_trees_close(engine(sharded, hparams).grad, engine(problem, hparams).grad, 1e-6)


def test_result_unpacks_in_order():
    value, grad, state = ft.Reverse()(*regression())
    assert value.shape == ()
    assert set(grad) == {"lr", "decay"}
    assert isinstance(state, ft.TrainState)


def test_an_error_that_depends_on_hyperparameters_alone():
    """No state has a say: only the explicit term dE/dlambda is left."""

    class Counter(ft.Dynamics):
        def init(self, params, hparams):
            return jnp.array(0)

        def step(self, state, hparams, batch):
            return state + 1

    problem = ft.Problem(
        Counter(), lambda state, h, b: state * h["a"] ** 2, None, ft.FullBatch(None, steps=3)
    )
    for engine in (ft.Reverse(), ft.Forward()):
        value, grad, state = engine(problem, {"a": jnp.array(2.0)})
        assert (float(value), float(grad["a"]), int(state)) == (12.0, 12.0, 3)


def test_objective_functions_given_twice_share_one_adjoint():
    """K counts distinct functions: naming one for every hyperparameter costs one adjoint."""
    single, hparams = regression()
    both, _ = regression(objective={"lr": squared_error, "decay": squared_error})
    flops = [ft.Reverse().lower(p, hparams).cost_analysis()["flops"] for p in (single, both)]
    assert flops[0] == flops[1]


@pytest.mark.second_tier
def test_unrolled_loops_give_the_same():
    problem, hparams = regression(steps=7)
    plain, unrolled = (ft.Reverse(unroll=k)(problem, hparams) for k in (1, 3))
    assert_trees_close(unrolled.grad, plain.grad, 1e-5)
    with pytest.raises(ValueError, match=r"Reverse\(unroll=0\)"):
        ft.Reverse(unroll=0)


class WeightedError(eqx.Module):
    weights: jax.Array

    def __call__(self, state, hparams, batch):
        return jnp.sum(self.weights * state.params**2)


@pytest.mark.parametrize("engine", [ft.Reverse(), ft.Forward()], ids=str)
def test_an_objective_may_be_a_module_that_holds_arrays(engine, compilations):
    dynamics = ft.Training(lambda w, h, x: jnp.sum((w - h["a"]) ** 2) / 2, optax.sgd(1.0))

    def problem(weights):
        return ft.Problem(
            dynamics,
            {"a": WeightedError(weights)},
            init=jnp.zeros(3),
            batches=ft.FullBatch(jnp.zeros(()), steps=1),
        )

    hparams = {"a": jnp.arange(1.0, 4.0)}
    weights = jnp.array([1.0, 10.0, 100.0])
    np.testing.assert_allclose(engine(problem(weights), hparams).grad["a"], [2.0, 40.0, 600.0])
    engine(problem(2 * weights), hparams)
    assert len(compilations) == 1


class HeavyBall(ft.Dynamics):
    """Gradient descent with momentum whose state, like its hyperparameters, is a list."""

    def init(self, params, hparams):
        return [params, jnp.zeros_like(params)]

    def step(self, state, hparams, batch):
        w, v = state
        v = hparams[1] * v + 2 * (w - batch)
        return [w - hparams[0] * v, v]


@pytest.mark.parametrize("m", [1, 3, 6])
def test_states_and_hyperparameters_may_be_lists(m):
    rates = jnp.linspace(0.05, 0.1, m)

    def objective(state, hparams, batch):
        return jnp.sum((state[0] - batch) ** 2)

    problem = ft.Problem(
        HeavyBall(), objective, jnp.ones(m), ft.FullBatch(jnp.arange(2.0, 2 + m), 5), jnp.zeros(m)
    )
    hparams = [rates, jnp.array(0.3)]
    assert_trees_close(
        ft.Forward()(problem, hparams).grad, ft.Reverse()(problem, hparams).grad, 1e-5
    )


def test_names_may_hold_brackets_and_quotes():
    """Names are compared as keys, so none is taken for a path to another."""
    names = ["a[0]", "a']['b", "{k}", 'q"']

    def loss(params, hparams, batch):
        leaves = [*(hparams[name] for name in names), hparams["a"]["b"]]
        return sum((i + 1) * (params - leaf) ** 2 for i, leaf in enumerate(leaves))

    def objective(state, hparams, batch):
        return state.params**2

    hparams = {name: jnp.array(0.5) for name in names} | {"a": {"b": jnp.array(0.5)}}
    objectives = {name: objective if name == "a" else lambda *_: objective(*_) for name in hparams}
    dynamics, batches = ft.Training(loss, optax.sgd(0.01)), ft.FullBatch(None, steps=3)
    problem = ft.Problem(dynamics, objectives, jnp.zeros(()), batches)
    for engine in (ft.Reverse(), ft.Forward()):
        grad = engine(problem, hparams).grad
        found = np.array([*(grad[name] for name in names), grad["a"]["b"]])
        np.testing.assert_allclose(found / found[0], [1, 2, 3, 4, 5], rtol=1e-5)
    with pytest.raises(ft.NonFiniteError, match=r"hparams\[\"a'\]\['b\"\] itself is not finite"):
        ft.Reverse()(problem, hparams | {"a']['b": jnp.array(jnp.nan)})


@pytest.mark.second_tier
def test_real_time_tuning_takes_lists():
    def loss(params, hparams, batch):
        return jnp.sum((params[0] - batch) ** 2) + hparams[1] * jnp.sum(params[0] ** 2)

    dynamics = ft.Training(loss, lambda h: optax.sgd(h[0]))

    def objective(state, hparams, batch):
        return jnp.sum((state.params[0] - batch) ** 2)

    hparams, window, validation = [jnp.array(0.05), jnp.array(0.1)], jnp.ones((4, 3)), jnp.zeros(3)
    tuner = ft.RealTime(dynamics, objective)
    _, log = tuner.update(tuner.init([jnp.full(3, 2.0)], hparams), window, validation)
    problem = ft.Problem(dynamics, objective, [jnp.full(3, 2.0)], window, validation)
    assert_trees_close(log["hypergradient"], ft.Reverse()(problem, hparams).grad, 1e-5)
