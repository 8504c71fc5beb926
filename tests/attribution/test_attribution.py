"""Attribution: exact derivatives of many errors in the weights of the training examples."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._attribution.queries import as_queries
from foretune._attribution.sweep import _pull, _train, fitting
from foretune._attribution.weighted import weighted_problem
from foretune._engines.schedules import Adjoint
from foretune._files.files import RunError
from foretune._problem.problem import validated

from ..compilations import compilations

N, B, D, K, T = 12, 4, 3, 3, 9  # three epochs

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)), RNG.normal(size=N)
QUERIES = RNG.normal(size=(K, D)), RNG.normal(size=K)
INDICES = np.concatenate([RNG.permutation(N).reshape(-1, B) for _ in range(3)])
INIT = {"a": RNG.normal(size=(D, 5)), "b": RNG.normal(size=5)}
NORMED = INIT, {"mean": np.zeros(5), "seen": np.zeros((), np.int32)}


def hidden(params, x):
    return jnp.tanh(x @ params["a"])


def squares(params, hparams, batch):
    """Return the loss of each example."""
    return (hidden(params, batch[0]) @ params["b"] - batch[1]) ** 2


def mean_square(params, hparams, batch):
    return jnp.mean(squares(params, hparams, batch))


def penalised(params, hparams, batch):
    return mean_square(params, hparams, batch) + hparams["decay"] * jnp.sum(params["a"] ** 2)


def dropped(params, hparams, batch, *, key):
    keep = jax.random.bernoulli(key, 0.5, (len(batch[1]), 5)).astype(batch[0].dtype)
    return ((keep * hidden(params, batch[0])) @ params["b"] - batch[1]) ** 2


def normed(params, hparams, batch, state):
    h = batch[0] @ params["a"]
    mean, variance = jnp.mean(h, 0), jnp.var(h, 0)
    state = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "seen": state["seen"] + 1,
    }
    h = jnp.tanh((h - mean[None]) / jnp.sqrt(variance + 0.1)[None])
    return (h @ params["b"] - batch[1]) ** 2, state


def mean_dropped(params, hparams, batch, *, key):
    return jnp.mean(dropped(params, hparams, batch, key=key))


def mean_normed(params, hparams, batch, state):
    l, state = normed(params, hparams, batch, state)
    return jnp.mean(l), state


def error(state, hparams, batch):
    return mean_square(state.params, hparams, batch)


def normed_error(state, hparams, batch):
    h = jnp.tanh(batch[0] @ state.params["a"] - state.model_state["mean"][None])
    return jnp.mean((h @ state.params["b"] - batch[1]) ** 2)


def momentum(hparams):
    return optax.sgd(hparams["lr"], 0.9)


def adam(hparams):
    return optax.adam(hparams["lr"], eps_root=1e-6)


def of_numbers(losses, has_state=False):
    """Return the loss with the weights written out, as a user would: batches have numbers."""

    def loss(params, hparams, batch, *state, **key):
        x, y, i = batch
        found = losses(params, hparams, (x, y), *state, **key)
        if not has_state:
            return jnp.mean(hparams["weight"][i] * found)
        return jnp.mean(hparams["weight"][i] * found[0]), found[1]

    return loss


def of_numbers_penalised(params, hparams, batch):
    return of_numbers(squares)(params, hparams, batch) + hparams["decay"] * jnp.sum(
        params["a"] ** 2
    )


# name: the training, that with weights, losses, objective, start
CASES = {
    "momentum": (
        ft.Training(mean_square, momentum),
        ft.Training(of_numbers(squares), momentum),
        None,
        error,
        INIT,
    ),
    "adam": (
        ft.Training(mean_square, adam),
        ft.Training(of_numbers(squares), adam),
        None,
        error,
        INIT,
    ),
    "penalty": (
        ft.Training(penalised, momentum),
        ft.Training(of_numbers_penalised, momentum),
        squares,
        error,
        INIT,
    ),
    "batch norm": (
        ft.Training(mean_normed, momentum, has_state=True),
        ft.Training(of_numbers(normed, True), momentum, has_state=True),
        normed,
        normed_error,
        NORMED,
    ),
    "dropout": (
        ft.Training(mean_dropped, adam, key=jax.random.key(3)),
        ft.Training(of_numbers(dropped), adam, key=jax.random.key(3)),
        dropped,
        error,
        INIT,
    ),
}
FIRST = ("penalty", "batch norm")


def problem_of(dynamics, objective=error, init=INIT, batches=None, **options):
    batches = ft.Minibatches((X, Y), INDICES) if batches is None else batches
    return ft.Problem(dynamics, objective, init, batches, validation=QUERIES, **options)


def plain(**options):
    return problem_of(CASES["momentum"][0], **options), {"lr": jnp.array(0.05)}


def of_query(problem, k):
    return problem.replace(validation=jax.tree.map(lambda leaf: leaf[k : k + 1], QUERIES))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in FIRST else [pytest.mark.second_tier])
        for name in CASES
    ],
)
def test_scores_are_those_of_weights_written_out(case, x64):
    dynamics, explicit, losses, objective, init = CASES[case]
    problem = problem_of(dynamics, objective, init)
    hparams = {"lr": jnp.array(0.05)}
    if case == "penalty":
        hparams["decay"] = jnp.array(0.1)
    found = ft.attribute(problem, hparams, QUERIES, losses=losses)
    assert found.scores.shape == (K, N)
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    written = problem_of(explicit, objective, init, numbered)
    point = {**hparams, "weight": jnp.ones(N)}
    direction = jnp.asarray(RNG.normal(size=N))
    step = 1e-5
    for k in range(K):
        value, grad, _ = ft.Reverse()(of_query(written, k), point)
        np.testing.assert_allclose(found.errors[k], value, rtol=1e-10)
        np.testing.assert_allclose(found.scores[k], grad["weight"], rtol=1e-7, atol=1e-10)
        ends = [
            of_query(written, k).response({**point, "weight": 1 + sign * step * direction})[0]
            for sign in (1, -1)
        ]
        measured = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(found.scores[k] @ direction, measured, rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module")
def found():
    """The scores of the plain problem, in single precision."""
    problem, hparams = plain()
    return ft.attribute(problem, hparams, QUERIES)


def same(actual, expected):
    np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual.errors, expected.errors, rtol=1e-5)


@pytest.mark.parametrize("options", [{"chunk": 2}, {"store": "segments"}, {"store": 3}])
def test_chunks_and_stores_give_the_same(options, found):
    problem, hparams = plain()
    engine = ft.Reverse(store=options.get("store", "states"))
    chunk = options.get("chunk")
    same(ft.attribute(problem, hparams, QUERIES, engine=engine, chunk=chunk), found)


def test_objectives_are_queries(found):
    problem, hparams = plain()
    objectives = [
        lambda state, h, validation, k=k: error(
            state, h, jax.tree.map(lambda leaf: leaf[k : k + 1], validation)
        )
        for k in range(K)
    ]
    same(ft.attribute(problem, hparams, objectives, chunk=2), found)
    both = problem.replace(objective={"lr": error})
    first = ft.Attribution(found.scores[:1], found.errors[:1])
    same(ft.attribute(both, hparams, objectives[:1]), first)


def test_weights_that_the_problem_has(found):
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    written = problem_of(CASES["momentum"][1], batches=numbered)
    hparams = {"lr": jnp.array(0.05), "weight": jnp.ones(N)}
    same(ft.attribute(written, hparams, QUERIES), found)
    with pytest.raises(ValueError, match=r"hparams\['weight'\] holds weights already"):
        ft.attribute(written, hparams, QUERIES, groups=np.zeros(N, int))


def test_weights_that_are_not_named_are_noted():
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    problem = problem_of(CASES["momentum"][1], batches=numbered)
    hparams = {"lr": jnp.array(0.05), "weight": jnp.ones(N)}
    with pytest.warns(UserWarning, match=r"hparams\['weight'\] has an entry for each of the 12"):
        ft.attribute(problem, hparams, QUERIES, weights="wieght")


def test_a_group_has_the_sum_of_its_scores(found):
    problem, hparams = plain()
    groups = np.arange(N) % 5
    grouped = ft.attribute(problem, hparams, QUERIES, groups=groups)
    sums = found.scores @ (groups[:, None] == np.arange(5))
    same(grouped, ft.Attribution(sums, found.errors))


@pytest.mark.second_tier
def test_a_start_that_depends_on_the_hyperparameters():
    def start(hparams):
        return {"a": jnp.asarray(INIT["a"], jnp.float32), "b": hparams["b"]}

    hparams = {"lr": jnp.array(0.05), "b": jnp.asarray(INIT["b"], jnp.float32)}
    a = ft.attribute(problem_of(CASES["momentum"][0], init=start), hparams, QUERIES)
    same(a, ft.attribute(*plain(), QUERIES))


def test_rows_made_by_a_function(found):
    batches = ft.Minibatches((X, Y), INDICES, gather=lambda data, i: (data[0][i], data[1][i]))
    problem, hparams = plain(batches=batches)
    same(ft.attribute(problem, hparams, QUERIES), found)


def ridge():
    """Return a convex problem, trained until it has converged."""

    def loss(w, hparams, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2) + 0.1 * jnp.sum(w**2)

    def losses(w, hparams, batch):
        return (batch[0] @ w - batch[1]) ** 2

    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -1.0, 0.5]) + rng.normal(size=40)).astype(np.float32)
    problem = ft.Problem(
        ft.Training(loss, optax.sgd(0.2)),
        lambda state, h, batch: jnp.mean((batch[0] @ state.params - batch[1]) ** 2),
        np.zeros(3, np.float32),
        ft.FullBatch((x, y), steps=60),
    )
    queries = rng.normal(size=(4, 3)).astype(np.float32), np.ones(4, np.float32)
    return problem, queries, losses, x, y


def test_leaving_one_out_of_a_convex_problem():
    problem, (qx, qy), losses, x, y = ridge()
    found = ft.attribute(problem, {}, (qx, qy), losses=losses)
    n = len(y)

    def trained(keep):
        return np.linalg.solve(
            x.T @ (keep[:, None] * x) / n + 0.1 * np.eye(3), x.T @ (keep * y) / n
        )

    def errors(w):
        return (qx @ w - qy) ** 2

    before = errors(trained(np.ones(n)))
    np.testing.assert_allclose(found.errors, before, rtol=1e-3)
    left_out = [errors(trained(np.arange(n) != i)) - before for i in range(n)]
    predicted = [found.change([i]) for i in range(n)]
    assert np.corrcoef(np.ravel(predicted), np.ravel(left_out))[0, 1] > 0.99


def test_helpful_and_harmful_examples(found):
    assert found.top(2).shape == found.bottom(2).shape == (K, 2)
    for k in range(K):
        assert found.scores[k, found.top(1)[k, 0]] == found.scores[k].min()
        assert found.scores[k, found.bottom(1)[k, 0]] == found.scores[k].max()
    mask = np.arange(N) < 3
    np.testing.assert_array_equal(found.change(mask), found.change([0, 1, 2]))
    with pytest.raises(ValueError, match=r"Attribution.top\(0\)"):
        found.top(0)
    for wrong in ([N], [-1], [], [0.0], [[0]], ["a"]):
        with pytest.raises(ValueError, match="give numbers of examples, from 0 to 11, or a mask"):
            found.change(np.asarray(wrong))
    with pytest.raises(ValueError, match="left out once"):
        found.change([1, 1])
    with pytest.raises(IndexError, match="boolean index did not match"):
        found.change(mask[:3])


def test_a_file_of_it(found, tmp_path):
    path = tmp_path / "found.npz"
    found.save(path)
    loaded = ft.Attribution.load(path)
    np.testing.assert_array_equal(loaded.scores, found.scores)
    np.testing.assert_array_equal(loaded.errors, found.errors)
    found._replace(share=0.5).save(path)
    assert ft.Attribution.load(path).share == 0.5
    found._replace(errors=found.errors[:1]).save(path)
    with pytest.raises(ValueError, match=r"is no attribution.*scores \(3, 12\), errors \(1,\)"):
        ft.Attribution.load(path)
    path.write_bytes(b"no numbers")
    with pytest.raises(ValueError, match="is no attribution"):
        ft.Attribution.load(path)


class Kill(ft.Callback):
    def step(self, run):
        raise KeyboardInterrupt


class Steps(ft.Callback):
    def __init__(self):
        self.seen = []

    def start(self, run):
        self.seen.append(run.step)

    step = start


def test_a_killed_attribution_continues(found, tmp_path):
    problem, hparams = plain()
    folder = tmp_path / "chunks"
    with pytest.raises(KeyboardInterrupt):
        ft.attribute(problem, hparams, QUERIES, chunk=1, folder=folder, callbacks=[Kill()])
    assert {path.name for path in folder.iterdir()} == {".lock", "queries_0.npz"}
    steps = Steps()
    same(ft.attribute(problem, hparams, QUERIES, chunk=1, folder=folder, callbacks=[steps]), found)
    assert steps.seen == [1, 2, 3]
    steps = Steps()
    same(ft.attribute(problem, hparams, QUERIES, folder=folder, callbacks=[steps]), found)
    assert steps.seen == [3]


def test_a_damaged_chunk_is_computed_again(found, tmp_path):
    problem, hparams = plain()
    ft.attribute(problem, hparams, QUERIES, chunk=1, folder=tmp_path)
    path = tmp_path / "queries_1.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"queries_1.npz cannot be read.*computed again"):
        same(ft.attribute(problem, hparams, QUERIES, chunk=1, folder=tmp_path), found)
    assert (tmp_path / "queries_1.npz.damaged").exists()


def test_a_folder_belongs_to_one_attribution(tmp_path):
    problem, hparams = plain()
    ft.attribute(problem, hparams, QUERIES, folder=tmp_path)
    with pytest.raises(RunError, match="what differs: the hyperparameters"):
        ft.attribute(problem, {"lr": jnp.array(0.06)}, QUERIES, folder=tmp_path)
    with pytest.raises(RunError, match="what differs: the queries"):
        ft.attribute(problem, hparams, (QUERIES[0] + 1, QUERIES[1]), folder=tmp_path)
    other = problem.replace(batches=ft.Minibatches((X, Y), INDICES[::-1]))
    with pytest.raises(RunError, match="what differs: the training data"):
        ft.attribute(other, hparams, QUERIES, folder=tmp_path)


@pytest.mark.second_tier
def test_a_budget_of_memory_sets_the_chunk():
    problem, hparams = plain()
    asked = as_queries(problem, QUERIES)
    wanted, point, _ = weighted_problem(problem, hparams, asked, "weight", None, None)
    arrays, structure = validated(wanted, point)
    chosen = functools.partial(fitting, ft.Reverse(), structure, arrays, mesh=None)
    with pytest.raises(MemoryError, match="one query at a time needs") as least:
        chosen(K, 10)
    number, unit = re.search(r"needs ([\d.]+) (\w+),", str(least.value)).groups()
    needed = float(number) * {"B": 1, "KiB": 1024}[unit]
    assert chosen(64, int(1.02 * needed)) == 1
    assert chosen(64, int(1.5 * needed)) in (2, 4, 8, 16, 32)
    assert chosen(64, 2**30) == 64
    steps = Steps()
    ft.attribute(problem, hparams, QUERIES, memory=f"{int(1.02 * needed)}", callbacks=[steps])
    assert steps.seen == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"attribute\(memory='much'\)"):
        ft.attribute(problem, hparams, QUERIES, memory="much")


def test_a_step_back_touches_the_weights_of_its_examples_alone():
    problem, hparams = plain()
    asked = as_queries(problem, QUERIES)
    wanted, point, _ = weighted_problem(problem, hparams, asked, "weight", None, None)
    arrays, structure = validated(wanted, point)
    s_T, memory = jax.eval_shape(functools.partial(_train, ft.Reverse(), structure), arrays)
    rows = functools.partial(jax.tree.map, lambda leaf: jnp.zeros((K, *leaf.shape), leaf.dtype))
    adjoint = Adjoint(
        rows(eqx.filter(s_T, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))), rows(point)
    )
    program = functools.partial(_pull, ft.Reverse(), structure)
    (loop,) = [
        equation
        for equation in jax.make_jaxpr(program)(arrays, memory, adjoint).jaxpr.eqns
        if equation.primitive.name == "scan"
    ]
    large = {
        equation.primitive.name
        for equation in loop.params["jaxpr"].jaxpr.eqns
        if any(var.aval.shape[-1:] == (N,) for var in equation.outvars)
    }
    assert large == {"scatter-add"}


@pytest.mark.second_tier
def test_a_second_call_compiles_nothing(found):
    problem, hparams = plain()
    with compilations("_train", "_pull") as programs:
        ft.attribute(problem, hparams, jax.tree.map(lambda leaf: leaf[[0, 1, 2, 0, 1]], QUERIES))
    assert programs == ["jit(_pull)"]  # for 5 queries
    with compilations("_train", "_pull") as programs:
        ft.attribute(problem, {"lr": jnp.array(0.04)}, QUERIES)
    assert not programs


def test_a_second_call_traces_no_training():
    calls = []

    def counted(params, hparams, batch):
        calls.append(1)
        return mean_square(params, hparams, batch)

    problem = problem_of(ft.Training(counted, momentum))
    hparams = {"lr": jnp.array(0.05)}
    ft.attribute(problem, hparams, QUERIES)
    calls.clear()
    ft.attribute(problem, hparams, QUERIES)
    assert not calls


def test_scores_at_other_weights(found, x64):
    """Weights of a half are half the rate, for gradient descent; a half of a half counts twice."""
    problem, hparams = plain()
    half = ft.attribute(problem, hparams, QUERIES, share=0.5)
    slow = ft.attribute(problem, {"lr": hparams["lr"] / 2}, QUERIES)
    same(half, ft.Attribution(2 * slow.scores, slow.errors))
    refused(ValueError, r"share=0.0\)", share=0.0)
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    written = problem_of(CASES["momentum"][1], batches=numbered)
    own = {**hparams, "weight": jnp.ones(N)}
    refused(ValueError, "holds weights already", problem=written, hparams=own, share=0.5)


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
    with pytest.raises(
        TypeError, match=r"an array of shape \(4,\); it returned\n  losses: float32\[\]"
    ):
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


def refused(kind, words, *, problem=None, queries=QUERIES, hparams=None, **options):
    made, used = plain()
    with pytest.raises(kind, match=words):
        ft.attribute(problem or made, used if hparams is None else hparams, queries, **options)


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
        "which is the error of a query",
        problem=problem.replace(objective={"lr": error}),
    )
    refused(TypeError, "which do not number the examples", problem=plain(batches=(X, Y))[0])
    refused(ValueError, "groups has 3 entries for 12", groups=np.arange(3))
    refused(TypeError, "one integer for each", groups=np.linspace(0, 1, N))
    refused(ValueError, "these go from -1 to 10", groups=np.arange(N) - 1)
    refused(ValueError, "without gaps; these go from 0 to 2 and 2", groups=2 * (np.arange(N) % 2))
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
