"""Draws: a function of a key in place of a problem, traced once, its data on the device once."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._problem.draws import Drawn, as_problem

from ..compilations import compilations
from ..problems import assert_trees_close

STEPS, ROWS = 60, 40
X = np.random.default_rng(0).normal(size=(ROWS, 3))
Y = np.random.default_rng(1).normal(size=ROWS)
later = functools.partial(pytest.param, marks=pytest.mark.second_tier)


def loss(w, h, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) + h["decay"] * jnp.sum(w**2)


def error(state, h, batch):
    x, y = batch
    return jnp.mean((x @ state.params - y) ** 2)


TRAINING = ft.Training(loss, optax.sgd(0.2))


def draw(key):
    """A task: its rows, its targets, its start and its validation data."""
    rows, noise, start = jax.random.split(key, 3)
    x = jnp.asarray(X)[jax.random.permutation(rows, ROWS)]
    y = jnp.asarray(Y) + jax.random.normal(noise, (ROWS,))
    batches = ft.FullBatch((x[:20], y[:20]), steps=STEPS)
    return ft.Problem(TRAINING, error, jax.random.normal(start, (3,)), batches, (x[20:], y[20:]))


def hyper(decay=0.3):
    return {"decay": jnp.asarray(decay, jnp.result_type(float))}


ENGINES = {
    "reverse": lambda folder: ft.Reverse(),
    "forward": lambda folder: ft.Forward(),
    "segments": lambda folder: ft.Reverse("segments"),
    "truncated": lambda folder: ft.Truncated(30),
    "implicit": lambda folder: ft.Implicit(tolerance=1e-9),
    "evolution": lambda folder: ft.Evolution(0.1, 2),
    "smoothed": lambda folder: ft.Smoothed(ft.Reverse(), 0.1, 2),
    "auto": lambda folder: ft.Auto(),
    "disk": lambda folder: ft.ReverseOnDisk(folder),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["reverse", *(later(name) for name in list(ENGINES)[1:])])
def test_an_engine_on_a_draw_is_the_engine_on_its_problem(name, tmp_path):
    engine = ENGINES[name](tmp_path)
    for seed in range(2):
        key = jax.random.key(seed)
        found, expected = engine(draw, hyper(), key=key), engine(draw(key), hyper())
        assert_trees_close(found.value, expected.value, 1e-12)
        assert_trees_close(found.grad, expected.grad, 1e-9)
        assert_trees_close(found.state, expected.state, 1e-10, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "engine", [ft.Reverse(), later(ft.Forward()), later(ft.RobustMean()), later(ft.Evolution(0.1, 2))]
)  # fmt: skip
def test_the_mean_of_draws_is_that_of_its_problems(engine):
    key = jax.random.key(3)
    found = engine(ft.Mean.of_draws(draw, 3), hyper(), key=key)
    problems = [draw(k) for k in jax.random.split(key, 3)]
    expected = engine(ft.Mean(problems), hyper())
    assert_trees_close(found.value, expected.value, 1e-12)
    assert_trees_close(found.grad, expected.grad, 1e-9)
    assert_trees_close(found.state, expected.state, 1e-10, 1e-12)


@pytest.mark.usefixtures("x64")
def test_finite_differences_of_the_mean_of_draws():
    key, h = jax.random.key(5), 1e-5
    grad = ft.Reverse()(ft.Mean.of_draws(draw, 3), hyper(), key=key).grad["decay"]
    problems = [draw(k) for k in jax.random.split(key, 3)]

    def f(decay):
        return np.mean([float(problem.response(hyper(decay))[0]) for problem in problems])

    np.testing.assert_allclose(grad, (f(0.3 + h) - f(0.3 - h)) / (2 * h), rtol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_a_descent_by_hand():
    """Ten steps with a task drawn anew at each, beside `jax.grad` of the training written out."""

    def trained(h, key):
        problem = draw(key)
        w, batch = problem.init, problem.batches.data
        for _ in range(STEPS):
            w = w - 0.2 * jax.grad(loss)(w, h, batch)
        return jnp.mean((problem.validation[0] @ w - problem.validation[1]) ** 2)

    by_hand, of_engine = hyper(), hyper()
    gradient = jax.jit(jax.grad(trained))
    for step in range(10):
        key = jax.random.fold_in(jax.random.key(0), step)
        for h, grad in (
            (by_hand, gradient(by_hand, key)),
            (of_engine, ft.Reverse()(draw, of_engine, key=key).grad),
        ):
            h["decay"] = h["decay"] - 0.1 * grad["decay"]
    np.testing.assert_allclose(of_engine["decay"], by_hand["decay"], rtol=1e-12)


@pytest.mark.parametrize("engine", [ft.Reverse(), later(ft.Forward())], ids=str)
def test_ten_keys_are_one_compilation_and_one_call(engine):
    calls = []

    def counted(key):
        calls.append(key)
        return draw(key)

    keys = jax.random.split(jax.random.key(0), 10)
    with compilations("compute") as compiled:
        values = [float(engine(counted, hyper(), key=key).value) for key in keys]
    assert len(set(values)) == 10
    assert len(compiled) == 1
    assert len(calls) == 1


def test_a_mean_made_anew_is_the_same_draw():
    calls = []

    def counted(key):
        calls.append(key)
        return draw(key)

    with compilations("compute") as compiled:
        for seed in range(3):
            mean = ft.Mean.of_draws(counted, 2)
            ft.Reverse()(mean, hyper(), key=jax.random.key(seed))
    assert len(compiled) == 1
    assert len(calls) == 1  # for both of the two
    ft.Reverse()(ft.Mean.of_draws(counted, 3), hyper(), key=jax.random.key(0))
    assert len(calls) == 1


def test_what_a_draw_makes_inside_is_made_once():
    """A training and an error defined in the draw are the same functions for all keys."""

    def inside(key):
        training = ft.Training(lambda w, h, b: loss(w, h, b), lambda h: optax.sgd(0.1))
        return draw(key).replace(dynamics=training, objective=lambda s, h, b: error(s, h, b))

    with compilations("compute") as compiled:
        for seed in range(3):
            ft.Reverse()(inside, hyper(), key=jax.random.key(seed))
    assert len(compiled) == 1


def big_draw(big, on_device):
    """Return a draw of rows of a large table."""

    def drawn(key):
        if on_device:  # the rows of each step are gathered from it
            rows = jax.random.randint(key, (STEPS, 4), 0, len(big))
            y = jnp.zeros(len(big), jnp.float32)
            return ft.Problem(
                TRAINING, error, jnp.zeros(3), ft.Minibatches((big, y), rows),
                (jnp.ones((2, 3)), jnp.ones(2)),
            )  # fmt: skip
        x = jnp.take(big, jax.random.randint(key, (20,), 0, len(big)), axis=0)
        batches = ft.FullBatch((x, x[:, 0]), steps=STEPS)
        return ft.Problem(TRAINING, error, jnp.zeros(3), batches, (x, x[:, 0]))

    return drawn


@pytest.mark.parametrize("kind", ["jax", "numpy"])
@pytest.mark.parametrize("on_device", [True, False], ids=["gathered in steps", "gathered at once"])
def test_data_is_an_input_of_the_program_once(kind, on_device):
    big = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)  # 1.2 MB
    given = jnp.asarray(big) if kind == "jax" else big
    one = big_draw(given, on_device)
    for drawn in (one, ft.Mean.of_draws(one, 4)):
        made = as_problem(drawn, jax.random.key(0))
        assert isinstance(made, Drawn)
        large = [c for c in made.constants if c.nbytes >= big.nbytes]
        assert len(large) == 1
        if kind == "jax":  # not even copied
            assert large[0].unsafe_buffer_pointer() == given.unsafe_buffer_pointer()
        lowered = ft.Reverse().lower(made, hyper())
        sizes = [0, *(len(text) for text in re.findall(r"dense<([^>]*)>", lowered.as_text()))]
        assert max(sizes) < 10_000
        memory = lowered.compile().memory_analysis()
        assert big.nbytes <= memory.argument_size_in_bytes < 1.6 * big.nbytes
        assert memory.temp_size_in_bytes < big.nbytes


def test_other_keys_copy_no_data():
    big = jnp.ones((100_000, 3))
    drawn, key = big_draw(big, True), jax.random.key(0)
    first = as_problem(drawn, key)
    for other in (as_problem(drawn, jax.random.key(1)), first.at(jax.random.key(1))):
        assert all(a is b for a, b in zip(first.constants, other.constants, strict=True))
        assert other.key is not key


def test_inside_jit_and_vmap():
    keys = jax.random.split(jax.random.key(0), 3)

    def grad(key, h):
        return ft.Reverse()(draw, h, key=key).grad["decay"]

    expected = [grad(key, hyper()) for key in keys]
    jitted = jax.jit(grad)
    np.testing.assert_allclose([jitted(key, hyper()) for key in keys], expected, rtol=1e-5)
    mapped = jax.vmap(grad, (0, None))(keys, hyper())
    np.testing.assert_allclose(mapped, expected, rtol=1e-5)


def test_a_draw_that_is_first_seen_inside_jit_may_be_used_outside():
    """What is remembered of a draw belongs to no trace, NumPy arrays included."""

    def fresh(key):
        x = jnp.take(X.astype(np.float32), jax.random.permutation(key, ROWS), axis=0)
        batches = ft.FullBatch((x, x[:, 0]), steps=3)
        return ft.Problem(TRAINING, error, jnp.zeros(3), batches, (x, x[:, 0]))

    key = jax.random.key(0)
    inside = jax.jit(lambda key: ft.Reverse()(fresh, hyper(), key=key).value)(key)
    np.testing.assert_allclose(ft.Reverse()(fresh, hyper(), key=key).value, inside, rtol=1e-5)


def test_a_draw_made_inside_jit_may_close_over_what_is_traced():
    @jax.jit
    def grad(scale, key):
        def scaled(key):
            problem = draw(key)
            return problem.replace(init=scale * problem.init)

        return ft.Reverse()(scaled, hyper(), key=key).value

    key = jax.random.key(0)
    for scale in (1.0, 2.0):
        expected = ft.Reverse()(draw(key).replace(init=scale * draw(key).init), hyper()).value
        np.testing.assert_allclose(grad(jnp.array(scale), key), expected, rtol=1e-5)


@pytest.mark.second_tier
def test_auto_inside_jit():
    key = jax.random.key(0)
    found = jax.jit(lambda key: ft.Auto()(draw, hyper(), key=key).grad)(key)
    assert_trees_close(found, ft.Reverse()(draw, hyper(), key=key).grad, 1e-4)


@pytest.mark.second_tier
def test_each_precision_has_a_trace_of_its_own():
    key = jax.random.key(0)
    narrow = ft.Reverse()(draw, hyper(), key=key).state.params
    with jax.enable_x64(True):
        wide = ft.Reverse()(draw, hyper(), key=key).state.params
    assert (narrow.dtype, wide.dtype) == (np.float32, np.float64)


def test_keys_of_both_kinds():
    old = jax.random.PRNGKey(0)
    found = ft.Reverse()(draw, hyper(), key=old).value
    np.testing.assert_allclose(found, ft.Reverse()(draw(old), hyper()).value, rtol=1e-6)


def test_reshuffled_minibatches_are_a_draw():
    batches = ft.Minibatches.shuffled(
        (X.astype(np.float32), Y.astype(np.float32)), batch_size=8, steps=5, key=jax.random.key(0)
    )
    problem = draw(jax.random.key(0)).replace(batches=batches)

    def reshuffled(key):
        return problem.replace(batches=problem.batches.reshuffled(key))

    for seed in range(2):
        key = jax.random.key(seed)
        found = ft.Reverse()(reshuffled, hyper(), key=key).grad
        assert_trees_close(found, ft.Reverse()(reshuffled(key), hyper()).grad, 1e-5)


def test_what_is_not_finite_is_explained():
    def diverging(key):
        return draw(key).replace(dynamics=ft.Training(loss, optax.sgd(1e4)))

    with pytest.raises(ft.NonFiniteError, match=r"step \d+ of 60, in the training itself"):
        ft.Reverse()(diverging, hyper(), key=jax.random.key(0))


def test_checks_of_a_problem_hold_for_what_is_drawn():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"does not depend on hparams\['x'\]"):
        ft.Reverse()(draw, hyper() | {"x": jnp.array(1.0)}, key=key)
    with pytest.raises(TypeError, match=r"objective\(state[\s\S]*validation\[0\]: float32\[20,2\]"):
        ft.Reverse()(lambda k: draw(k).replace(validation=(jnp.ones((20, 2)), jnp.ones(20))),
                     hyper(), key=key)  # fmt: skip


class Unhashable:
    def __eq__(self, other):
        return True

    def __call__(self, key):
        return draw(key)


class AsClass(eqx.Module):
    key: jax.Array


def branching(key):
    problem = draw(key)
    return problem if jax.random.normal(key) > 0 else problem.replace(init=jnp.zeros(3))


def to_numpy(key):
    np.asarray(jax.random.normal(key))
    return draw(key)


def wrong_inside(key):
    return draw(key).replace(init=jnp.ones(3) @ jnp.ones(4))


def of_none():
    return draw(jax.random.key(0))


KEY = jax.random.key(0)
TRACED = jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError


@pytest.mark.parametrize(
    ("given", "key", "error", "pattern"),
    [
        (draw, None, TypeError, r"the problem is a draw.*give the key too"),
        (draw(KEY), KEY, TypeError, r"key=... is for a draw.*this is a problem already"),
        (lambda key: 3.0, KEY, TypeError, r"draw\(key\) returned the float 3.0"),
        (lambda key: (draw(key), 1), KEY, TypeError, r"draw\(key\) returned a tuple"),
        (lambda key: None, KEY, TypeError, r"draw\(key\) returned None"),
        (AsClass, KEY, TypeError, r"must be a `foretune.Problem`, or a function `draw\(key\)`"),
        (None, KEY, TypeError, r"must be a `foretune.Problem`, or a function `draw\(key\)`"),
        (of_none, KEY, TypeError, r"`draw\(key\)` is how it is called"),
        (Unhashable(), KEY, TypeError, r"cannot be hashed; give a function"),
        (draw, jax.random.split(KEY), TypeError, r"the key of a draw must be one random key"),
        (branching, KEY, TRACED, r"draw is compiled, and cannot use NumPy.*`if`"),
        (to_numpy, KEY, TRACED, r"draw is compiled, and cannot use NumPy"),
        (wrong_inside, KEY, TypeError, r"foretune: this happened in draw\(key\)"),
    ],
)
def test_what_is_no_draw(given, key, error, pattern):
    with compilations("compute") as compiled, pytest.raises(error) as caught:
        as_problem(given, key)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(pattern, message), message
    assert not compiled


def test_an_array_that_differs_in_what_functions_close_over():
    def closes(key):
        weight = jax.random.normal(key)
        return draw(key).replace(objective=lambda s, h, b: weight * error(s, h, b))

    with pytest.raises(TypeError, match="closes over an array that is drawn"):
        ft.Reverse()(ft.Mean.of_draws(closes, 2), hyper(), key=KEY)


def test_draws_of_a_mean_are_one_draw_with_a_leading_axis():
    """What depends on the key is drawn side by side; what does not is there once."""

    def drawn(key):
        x = jax.random.normal(key, (STEPS, 6, 3))
        return ft.Problem(
            TRAINING, error, jnp.zeros(3), (x, x[..., 0]), (jnp.ones((2, 3)), x[0, :2, 0])
        )

    def program(n):
        return as_problem(ft.Mean.of_draws(drawn, n), KEY)

    few, many = program(2), program(50)
    assert len(few.program.eqns) == len(many.program.eqns)
    mean = many.problem()
    assert mean.init.shape == (3,)
    shared, own = mean.validation
    assert shared.shape == (2, 3)
    assert own.array.shape == (50, 2)
    assert [leaf.shape for leaf in jax.tree.leaves(mean.batches.xs)] == [
        (STEPS, 50, 6, 3),
        (STEPS, 50, 6),
    ]


def test_a_function_that_closes_over_what_is_drawn_is_refused():
    def draw(key):
        x = jax.random.normal(key, (6, 3))
        training = ft.Training(lambda w, h, b: jnp.mean((b @ w) ** 2), optax.sgd(0.1))
        return ft.Problem(
            training,
            lambda state, h, b: jnp.mean((b @ state.params) ** 2),
            init=lambda h: h["start"] + x[0],
            batches=ft.FullBatch(x, steps=2),
            validation=x,
        )

    with pytest.raises(TypeError, match="closes over an array that is drawn"):
        ft.Reverse()(draw, {"start": jnp.zeros(3)}, key=jax.random.key(0))
    with pytest.raises(TypeError, match="takes a function draw"):
        ft.Mean.of_draws(draw(jax.random.key(0)), 2)


def test_a_function_may_close_over_what_the_program_around_it_traces():
    def response(scale):
        def draw(key):
            x = jax.random.normal(key, (6, 3))
            return ft.Problem(
                ft.Training(lambda w, h, b: scale * jnp.mean((b @ w - 1) ** 2), optax.sgd(0.1)),
                lambda state, h, b: jnp.mean((b @ state.params) ** 2),
                init=lambda h: h["start"],
                batches=ft.FullBatch(x, steps=2),
                validation=x,
            )

        found = [
            ft.Reverse()(each, {"start": jnp.ones(3)}, key=jax.random.key(0)).grad["start"]
            for each in (draw, ft.Mean.of_draws(draw, 1))
        ]
        return found[0], found[1]

    scale = jnp.array(0.5)
    one, mean = jax.jit(response)(scale)
    np.testing.assert_allclose(one, response(scale)[0], rtol=1e-5)
    np.testing.assert_allclose(mean, response(scale)[1], rtol=1e-5)
