"""Projections: against a generic solver, and their own laws, on inputs that try them."""

import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize

import foretune as ft
from foretune._constraints.base import check_constraints, check_starts, project
from foretune._outer.update import Outer

numbers = st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 3))
# Few sizes, since each is a compilation.
vectors = st.sampled_from([1, 2, 5]).flatmap(
    lambda n: st.lists(numbers, min_size=n, max_size=n).map(np.array)
)
matrices = st.sampled_from([1, 3]).flatmap(
    lambda n: st.lists(numbers, min_size=n * n, max_size=n * n).map(
        lambda v: np.array(v).reshape(n, n)
    )
)
relaxed = settings(max_examples=4 * settings().max_examples)

# A set, and the same as bounds on x and rows a with a_low <= a x <= a_high, for the solver.
SETS = {
    "box": (ft.Box(-1.0, 2.0), lambda n: ([-1, 2], [])),
    "half-open box": (ft.Box(0.5, np.inf), lambda n: ([0.5, np.inf], [])),
    "non-negative": (ft.NonNegative(), lambda n: ([0, np.inf], [])),
    "simplex": (ft.Simplex(1.5), lambda n: ([0, np.inf], [(np.ones(n), 1.5, 1.5)])),
    "capped simplex": (
        ft.CappedSimplex(1.5),
        lambda n: ([0, 1], [(np.ones(n), -np.inf, 1.5)]),
    ),
    "capped simplex, no cap": (
        ft.CappedSimplex(2.0, np.inf),
        lambda n: ([0, np.inf], [(np.ones(n), -np.inf, 2.0)]),
    ),
    "capped simplex, cap 0.3": (
        ft.CappedSimplex(0.9, 0.3),
        lambda n: ([0, 0.3], [(np.ones(n), -np.inf, 0.9)]),
    ),
}


@functools.cache
def compiled(constraint, method):
    """Return a method as a compiled function, once for all examples."""
    return jax.jit(getattr(constraint, method))


@functools.cache
def compiled_gradient(constraint):
    return jax.jit(jax.grad(lambda v: jnp.sum(constraint.project(v) ** 2)))


def nearest(x, bounds, rows):
    """Return the projection by a generic solver for quadratic programs."""
    start = np.clip(x, *bounds)
    for a, low, high in rows:
        start = start * np.clip(a @ start, low, high) / max(a @ start, 1e-9)
        if low == high and a @ start < low:
            start = np.full_like(x, low / len(x))
    constraints = [LinearConstraint(a, low, high) for a, low, high in rows]
    found = minimize(
        lambda y: 0.5 * np.sum((y - x) ** 2),
        start,
        jac=lambda y: y - x,
        bounds=[bounds] * len(x),
        constraints=constraints,
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    return found.x


@pytest.mark.parametrize("name", SETS)
@pytest.mark.usefixtures("x64")
@relaxed
@given(x=vectors)
@example(x=np.array([0.5, 0.5, 0.5, 0.5]))
@example(x=np.array([-3.0, -1.0]))
@example(x=np.array([0.1, 0.2]))
@example(x=np.array([2.0]))
def test_projections_are_the_nearest_points(name, x):
    constraint, description = SETS[name]
    y = np.asarray(compiled(constraint, "project")(x))
    expected = nearest(x, *description(len(x)))
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert compiled(constraint, "contains")(y)


ALL = {name: constraint for name, (constraint, _) in SETS.items()} | {
    "capped simplex, total 0": ft.CappedSimplex(0.0),
}


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("x64")
@relaxed
@given(x=vectors, shift=st.integers(0, 5))
def test_projections_are_idempotent_and_do_not_expand(name, x, shift):
    constraint = ALL[name]
    project = compiled(constraint, "project")
    other = np.roll(x, shift) * 0.7 + 0.1
    y, z = project(x), project(other)
    np.testing.assert_allclose(project(y), y, atol=1e-7)
    assert np.linalg.norm(y - z) <= np.linalg.norm(x - other) + 1e-7
    assert compiled(constraint, "contains")(y)
    assert np.all(np.isfinite(compiled_gradient(constraint)(x)))


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ALL)
def test_projections_can_be_mapped(name):
    rows = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    mapped = jax.vmap(ALL[name].project)(rows)
    for row, y in zip(rows, mapped, strict=True):
        np.testing.assert_allclose(y, ALL[name].project(row), atol=1e-5)


@pytest.mark.usefixtures("x64")
@relaxed
@given(C=matrices, total=st.sampled_from([0.1, 1.0, 4.0]))
def test_symmetric_sets(C, total):
    y = np.asarray(compiled(ft.SymmetricNonNegative(total), "project")(C))
    assert np.array_equal(y, y.T)
    assert y.min() >= 0
    assert y.sum() <= total + 1e-9
    mean = ((C + C.T) / 2).ravel()
    expected = nearest(mean, [0, np.inf], [(np.ones(mean.size), -np.inf, total)])
    np.testing.assert_allclose(y.ravel(), expected, atol=1e-6)
    free = np.asarray(compiled(ft.SymmetricNonNegative(), "project")(C))
    np.testing.assert_allclose(free, np.maximum((C + C.T) / 2, 0), atol=1e-12)


@pytest.mark.second_tier
@pytest.mark.parametrize("total", [10.0, 1000.0, 3e5])
def test_a_million_entries_in_float32(total):
    rng = np.random.default_rng(0)
    x = rng.normal(size=10**6).astype(np.float32)
    y = np.asarray(ft.CappedSimplex(total).project(x))
    assert y.min() >= 0
    assert y.max() <= 1
    np.testing.assert_allclose(y.sum(dtype=np.float64), total, rtol=1e-5)
    # The optimality condition: every free entry moved by the same amount.
    moved = (x - y)[(y > 0) & (y < 1)]
    assert np.ptp(moved) <= 1e-5 * max(1, abs(moved.mean()))


def test_huge_numbers():
    x = np.array([1e6, 1e6 - 0.25, -1e6, 3.0], np.float32)
    np.testing.assert_allclose(ft.CappedSimplex(1.5).project(x), [0.875, 0.625, 0, 0], atol=0.07)
    np.testing.assert_allclose(ft.Simplex(1.0).project(x).sum(), 1.0, rtol=1e-5)


def shifted(x, total, upper=np.inf, at_most=False):
    """Return clip(x - tau, 0, upper) with sum = total by sorting, in float64."""
    x = x.astype(np.float64)
    clipped = np.clip(x, 0, upper)
    if at_most and clipped.sum() <= total:
        return clipped
    ends = np.sort(np.append(x, x - upper)) if np.isfinite(upper) else np.sort(x)
    low, high = -1, len(ends) - 1  # the sum is total between these ends, or left of all of them
    while high - low > 1:
        middle = (low + high) // 2
        enough = np.clip(x - ends[middle], 0, upper).sum() > total
        low, high = (middle, high) if enough else (low, middle)
    middle = (ends[low] + ends[high]) / 2 if low >= 0 else ends[0] - 1
    inside = np.sum((x > middle) & (x - upper < middle))
    w = x - ends[high]
    return np.clip(w + (total - np.clip(w, 0, upper).sum()) / inside, 0, upper)


SHIFTS = {  # a set, and its description
    "simplex": (ft.Simplex(1.0), {"total": 1.0}),
    "small simplex": (ft.Simplex(1e-3), {"total": 1e-3}),
    "capped simplex": (ft.CappedSimplex(1.5), {"total": 1.5, "upper": 1.0, "at_most": True}),
    "low cap": (ft.CappedSimplex(100.0, 0.3), {"total": 100.0, "upper": 0.3, "at_most": True}),
    "symmetric": (ft.SymmetricNonNegative(3.0), {"total": 3.0, "at_most": True}),
}


MANY = [pytest.param(name, 1000, marks=pytest.mark.second_tier) for name in ("simplex", "low cap")]


@pytest.mark.parametrize(("name", "n"), [(name, n) for name in SHIFTS for n in (1, 7, 40)] + MANY)
def test_sums_are_exact_for_large_and_for_many_entries(name, n):
    constraint, description = SHIFTS[name]
    shape = (n, n)
    total, noise = description["total"], np.random.default_rng(0).normal(size=shape)
    for size in (1.0, 1e4, 1e8):
        for x in (size + noise, size * noise, -size + noise, size * np.ones(shape)):
            x = (x + x.T).astype(np.float32) / 2
            y = np.asarray(compiled(constraint, "project")(x))
            expected = shifted(x.ravel(), **description).reshape(shape)
            assert y.dtype == np.float32
            assert y.sum(dtype=np.float64) == pytest.approx(expected.sum(), rel=1e-6)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=3e-7 * total)
            assert np.array_equal(y, y.T)


def test_half_precision():
    many = jnp.full(70_000, 0.5, jnp.float16)
    total = np.asarray(ft.Simplex(70.0).project(many)).sum(dtype=np.float64)
    assert total == pytest.approx(70.0, rel=1e-3)


def test_a_set_over_a_subtree_holds_for_all_its_numbers():
    x = {"a": jnp.array([1.0, 1.0]), "b": jnp.array(1.0)}
    y = ft.Simplex(1.0).project(x)
    np.testing.assert_allclose(y["a"], [1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(y["b"], 1 / 3, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_changes_of_variable():
    x = jnp.array([0.1, 0.5])
    for change in (ft.Log(), ft.Logit(0.0, 1.0), ft.Logit(-1.0, 2.0)):
        np.testing.assert_allclose(
            change.from_unconstrained(change.to_unconstrained(x)), x, rtol=1e-12
        )
        assert change.contains(x)
    assert ft.Log().project(jnp.array(-1.0)) > 0
    assert 0 < ft.Logit(0.0, 1.0).project(jnp.array(1.0)) < 1


CHANGES = [
    ft.Log(),
    *[
        ft.Logit(*bounds)
        for bounds in [
            (0.0, 1.0),
            (-1.0, 0.0),
            (0.9, 0.999),
            (-3e4, 5e4),
            (0.0, 1e-3),
            (1e3, 1001.0),
        ]
    ],
    ft.Logit(-1e6, 1e6),
]


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("change", CHANGES, ids=repr)
@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_a_change_of_variable_comes_back_from_its_ends(change, dtype):
    if isinstance(change, ft.Logit):
        lower, upper = jnp.array([change.lower, change.upper]).astype(dtype)
        span = upper - lower
        if span == 0 or not jnp.isfinite(span):
            with pytest.raises(ValueError, match="has no numbers between the bounds"):
                change.check_start(lower)
            return
    outer = Outer(optax.sign_sgd(0.5), change)
    ends = jnp.array([-jnp.inf, -1e3, 1e3, jnp.inf], dtype)  # of the unconstrained variable
    x = change.project(change.from_unconstrained(ends))
    np.testing.assert_array_equal(x, change.project(x))
    assert x.dtype == dtype
    assert change.contains(x)
    change.check_start(x)
    u = change.to_unconstrained(x)
    slope = jax.jvp(change.from_unconstrained, (u,), (jnp.ones_like(u),))[1]
    assert np.all(np.isfinite(u))
    assert np.all(slope > 0)
    again = change.project(change.from_unconstrained(u))
    np.testing.assert_allclose(again.astype(float), x.astype(float), rtol=0.3)
    inwards = jnp.array([-1.0, -1.0, 1.0, 1.0], dtype)  # a descent goes the other way
    moved, _ = outer.update(x, outer.init(x), jnp.array(1.0), inwards)
    if dtype != jnp.float16 or change != ft.Logit(1e3, 1001.0):  # which is 1000.5 alone
        assert np.all((moved - x) * inwards < 0), (x, moved)


def test_logits_are_exact_at_both_bounds_and_in_the_middle():
    for lower, upper in [(-1.0, 0.0), (0.0, 1.0), (-2.0, 3.0)]:
        logit = ft.Logit(lower, upper)
        u = np.linspace(-12, 12, 25).astype(np.float32)
        x = logit.from_unconstrained(u)
        exact = lower + (upper - lower) / (1 + np.exp(-u.astype(np.float64)))
        np.testing.assert_allclose(x, exact, rtol=1e-6, atol=1e-7 * max(abs(lower), abs(upper)))
        slope = jax.jvp(logit.from_unconstrained, (u,), (np.ones_like(u),))[1]
        s = 1 / (1 + np.exp(-u.astype(np.float64)))
        np.testing.assert_allclose(slope, (upper - lower) * s * (1 - s), rtol=1e-5)
    near = np.array([-1e-5], np.float32)
    logit = ft.Logit(-1.0, 0.0)
    np.testing.assert_allclose(
        logit.from_unconstrained(logit.to_unconstrained(near)), near, rtol=2e-6
    )


BOX, LOG, SIMPLEX = ft.Box(0.0, 0.2), ft.Log(), ft.Simplex(1.0)


def test_numbers_of_any_type_are_taken():
    for one in (1, np.float32(1), np.int64(1), jnp.array(1.0), jnp.bfloat16(1)):
        sets = [ft.Simplex(one), ft.CappedSimplex(one, one), ft.SymmetricNonNegative(one)]
        sets += [ft.Logit(0, one), ft.Box([0, -1], one)]
        for constraint in sets:
            assert jax.eval_shape(constraint.project, jnp.eye(2)).dtype == jnp.float32
    assert ft.CappedSimplex(1e9, np.inf).contains(jnp.ones(2))  # more than can be reached
    assert ft.Box(np.zeros((2, 2)), np.inf).contains(jnp.eye(2))
    make = jax.jit(lambda r: ft.Box(-r, r).project(ft.Simplex(r).project(jnp.array([2.0, 0.0]))))
    np.testing.assert_allclose(make(0.5), [0.5, 0.0])


class Tuple(NamedTuple):
    lr: Any
    penalty: Any = None


class Module(eqx.Module):
    lr: Any
    penalty: Any = None
    name: str = eqx.field(static=True, default="rates")


LR, PENALTY = jnp.array(0.3), {"w": jnp.array([0.5, -0.2]), "b": [jnp.array(0.1)]}
CONTAINERS = {  # hyperparameters, and their constraints
    "dict": ({"lr": LR, "penalty": PENALTY}, {"lr": BOX, "penalty": {"w": SIMPLEX}}),
    "ordered": (OrderedDict(lr=LR, penalty=PENALTY), {"lr": BOX, "penalty": {"w": SIMPLEX}}),
    "list": ([LR, PENALTY], [BOX, {"w": SIMPLEX}]),
    "tuple": ((LR, PENALTY), (BOX, {"w": SIMPLEX})),
    "NamedTuple": (Tuple(LR, PENALTY), Tuple(BOX, {"w": SIMPLEX})),
    "NamedTuple, dict": (Tuple(LR, PENALTY), {"lr": BOX, "penalty": {"w": SIMPLEX}}),
    "Module": (Module(LR, PENALTY), Module(BOX, {"w": SIMPLEX})),
    "Module, dict": (Module(LR, PENALTY), {"lr": BOX, "penalty": {"w": SIMPLEX}}),
    "Module, renamed": (Module(LR, PENALTY, name="mine"), Module(BOX, {"w": SIMPLEX})),
    "Module in a list": ([Module(LR), Tuple(PENALTY)], [{"lr": BOX}, Tuple({"w": SIMPLEX})]),
    "empty": ([LR, PENALTY, (), {}], [BOX, {"w": SIMPLEX}, (), {}]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_constraints_are_a_prefix_of_any_container(name):
    hparams, constraints = CONTAINERS[name]
    full = check_constraints(constraints, hparams)
    check_starts(full, hparams)
    y = project(full, hparams)
    assert jax.tree.structure(y) == jax.tree.structure(hparams)
    expected = [jnp.array(0.2), jnp.array(0.1), jnp.array([0.85, 0.15])]  # lr, b, w
    for leaf, value in zip(jax.tree.leaves(y), expected, strict=True):
        np.testing.assert_allclose(leaf, value, rtol=1e-6)


@pytest.mark.parametrize("kind", [Tuple, Module])
@pytest.mark.parametrize("form", ["same", "dict", "left out"])
@pytest.mark.second_tier
def test_the_drivers_take_hyperparameters_with_fields(kind, form):
    hparams = kind(jnp.array(0.1), jnp.array([0.5, 0.5]))
    constraints = kind(LOG, SIMPLEX) if form == "same" else {"lr": LOG, "penalty": SIMPLEX}
    if form == "left out":
        constraints = {"penalty": SIMPLEX}
    dynamics = ft.Training(
        lambda w, h, x: jnp.sum((w - x) ** 2) + jnp.sum(h.penalty * w**2), lambda h: optax.sgd(h.lr)
    )
    problem = ft.Problem(
        dynamics, lambda s, h, x: s.params @ jnp.arange(2.0), jnp.zeros(2), jnp.ones((3, 2))
    )
    result = ft.minimize(
        problem, hparams, steps=2, optimizer=optax.sgd(0.5), constraints=constraints
    )
    tuner = ft.RealTime(
        dynamics, lambda s, h, x: s.params @ jnp.arange(2.0), constraints=constraints
    )
    state, _ = tuner.update(tuner.init(jnp.zeros(2), hparams), jnp.ones((3, 2)), None)
    for found in (result.hparams, state.hparams):
        assert jax.tree.structure(found) == jax.tree.structure(hparams)
        assert float(jnp.sum(found.penalty)) == pytest.approx(1.0)
        assert not np.allclose(found.penalty, hparams.penalty)
        assert found.lr != hparams.lr
    with pytest.raises(ValueError, match=r"hparams\.lr: .*Start inside"):
        ft.minimize(
            problem, kind(0 * hparams.lr, hparams.penalty), steps=1, constraints={"lr": LOG}
        )


def test_constraints_that_do_not_fit():
    hparams = {"lr": jnp.array(0.1), "net": {"w": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"constraints\['rate'\] names no hyperparameter"):
        check_constraints({"rate": ft.NonNegative()}, hparams)
    with pytest.raises(TypeError, match=r"the constraint of hparams\['lr'\] is the float 1.0"):
        check_constraints({"lr": 1.0}, hparams)
    with pytest.raises(ValueError, match=r"do not fit hparams\['lr'\], which is float32\[\]"):
        check_constraints({"lr": ft.Box(np.zeros(3), np.ones(3))}, hparams)
    with pytest.raises(ValueError, match=r"does not fit hparams\['net'\]: .*square matrices"):
        check_constraints({"net": ft.SymmetricNonNegative()}, hparams)
    with pytest.raises(TypeError, match=r"constraints of hparams are 1, but it has 2 parts"):
        check_constraints((ft.NonNegative(),), (jnp.array(0.1), jnp.array(0.1)))
    with pytest.raises(TypeError, match=r"is a list, which does not fit.*the same container"):
        check_constraints([ft.NonNegative()], (jnp.array(0.1),))
    with pytest.raises(TypeError, match=r"constraint of hparams is a dict, which does not fit"):
        check_constraints({0: ft.NonNegative()}, [jnp.array(0.1)])
    with pytest.raises(TypeError, match=r"of hparams is float32\[\], which does not fit"):
        check_constraints(jnp.array(0.1), jnp.array(0.1))
    for fields in (Tuple(jnp.array(0.1), jnp.ones(2)), Module(jnp.array(0.1), jnp.ones(2))):
        with pytest.raises(ValueError, match=r"'rate'\] names no .*has \['lr', 'penalty'\]"):
            check_constraints({"rate": ft.NonNegative()}, fields)
        with pytest.raises(TypeError, match=r"constraint of hparams\.lr is float32\[\]"):
            check_constraints(fields, fields)
        with pytest.raises(TypeError, match=r"constraint of hparams is a Tuple, which does not"):
            check_constraints(Tuple(None), {"lr": jnp.array(0.1)})
    with pytest.raises(TypeError, match=r"is a class; write `NonNegative\(...\)`"):
        check_constraints({"lr": ft.NonNegative}, hparams)
    for change, start in ((ft.Log(), 0.0), (ft.Log(), np.inf), (ft.Logit(), 1.0)):
        with pytest.raises(ValueError, match=rf"starts at {start}, .*Start inside"):
            change.check_start(jnp.array(start))
    with pytest.raises(ValueError, match=r"starts at -3\.5 in 2 of 1,500 entries, outside Log"):
        ft.Log().check_start(jnp.ones(1500).at[7:9].set(-3.5))
