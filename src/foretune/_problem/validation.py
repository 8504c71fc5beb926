"""What is checked of a whole problem before anything is compiled, and the words it is reported in.

The checks trace the user's functions abstractly, without compilation, once per structure and shapes.
"""

import contextlib
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .arguments import PROGRAMS, Structure, unflatten
from .checks import describe, describe_tree, named_leaves
from .choices import cut_hparams
from .definition import Definition
from .jaxprs import inputs_of
from .system import is_abstract, make_system, owners, rows_of
from .training import Training
from .warn import warn

UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
TRACED = (
    "foretune: {what} is compiled, and cannot use NumPy, `float(...)`, `.item()` or an `if` on what it "
    "computes. Write it with jax.numpy (`jnp.where` for a choice)."
)


@functools.lru_cache(maxsize=PROGRAMS)
def check_shapes(
    structure: Structure, shapes: tuple[tuple, ...], smooth: bool = True
) -> tuple[str, ...]:
    """Raise where the parts of a problem do not fit each other, or the hyperparameters.

    Where the response must be `smooth`, return the paths of hyperparameters that set the
    probabilities of random choices; else it may depend on them without a derivative.
    """
    problem, hparams = unflatten(structure, (jax.ShapeDtypeStruct(*shape) for shape in shapes))
    _check_names(problem, hparams)
    with noting("init(params, hparams) of the dynamics", params=problem.init, hparams=hparams):
        s_0 = eqx.filter_eval_shape(lambda p, h: p.start(h), problem, hparams)
    batch = eqx.filter_eval_shape(lambda p: p.batches.first(), problem)
    call = "step(state, hparams, batch) of the dynamics"
    with noting(call, state=s_0, hparams=hparams, batch=batch):
        s_1 = eqx.filter_eval_shape(
            lambda p, h: p.dynamics.step(p.start(h), h, p.batches.first()), problem, hparams
        )
    _check_same_state(s_0, s_1)
    given = problem.validation
    for name in problem.objectives:
        label = "objective" if name is None else f"objective[{name!r}]"
        call = f"{label}(state, hparams, validation)"
        if given is None:
            call += " (validation is None: the problem was given no `validation=`)"
        with noting(call, state=s_0, hparams=hparams, validation=given):
            value = eqx.filter_eval_shape(
                lambda p, s, h, name=name: p.objectives[name](s, h, p.validation),
                *(problem, s_0, hparams),
            )
        _check_scalar(value, label)
    return _check_dependence(problem, hparams, smooth)


@functools.lru_cache(maxsize=PROGRAMS)
def warn_of_choices(structure: Structure, paths: tuple[str, ...]) -> None:
    """Warn, once for each problem, of hyperparameters with a gradient that is not all of it."""
    warn(
        f"the probabilities of random choices depend on {', '.join(paths)} (a comparison with random "
        "numbers, as in `jax.random.bernoulli`). A choice has no derivative, so the gradient is wrong. "
        "For a dropout rate use `foretune.dropout(x, rate, key=key)`, otherwise `foretune.Evolution`. "
        "Where it is meant, put `jax.lax.stop_gradient` on the probabilities."
    )


@contextlib.contextmanager
def noting(what: str, **arguments: PyTree):
    """Say with an error from the user's code what was called, and on what."""
    try:
        yield
    except Exception as error:
        shown = "\n".join(describe_tree(tree, name) for name, tree in arguments.items())
        context = f"foretune: this happened in {what}, with\n{shown}"
        kind: Any = type(error)
        if kind in (TypeError, ValueError, IndexError, AttributeError):
            raise kind(f"{error}\n{context}") from error
        if kind is KeyError:
            raise ValueError(f"there is no {error}.\n{context}") from error
        if isinstance(error, UNTRACEABLE):
            error.add_note(TRACED.format(what=what.partition("(")[0]))
        error.add_note(context)
        raise


def _check_names(problem: Definition, hparams: PyTree) -> None:
    if not isinstance(problem.objective, dict):
        return
    if not isinstance(hparams, dict):
        needed = "a dict of objectives needs a dict of hyperparameters with the same names"
        raise TypeError(f"{needed}; hparams is {describe(hparams)}.")
    unknown = sorted(set(problem.objective) - set(hparams), key=str)
    missing = sorted(set(hparams) - set(problem.objective), key=str)
    if unknown or missing:
        found = [f"objective[{name!r}] names no hyperparameter" for name in unknown]
        found += [f"hparams[{name!r}] has no objective" for name in missing]
        raise ValueError(f"{'; '.join(found)}. Give one for each top-level hyperparameter.")


def _check_same_state(before: PyTree, after: PyTree) -> None:
    old, new = named_leaves(before, "state"), named_leaves(after, "state")
    for path in [*old, *(path for path in new if path not in old)]:
        was, now = old.get(path), new.get(path)
        if not is_abstract(was) and not is_abstract(now):
            continue
        if path not in old or path not in new:
            found, lacking = ("s_1", "s_0") if path in new else ("s_0", "s_1")
            raise ValueError(
                f"a step changes the structure of the state: {path} ({describe(old.get(path, now))}) "
                f"is in {found} but not in {lacking}. It returned\n{describe_tree(after, 'state')}"
            )
        if describe(was) != describe(now):
            hint = "`step` must keep every shape and dtype."
            if not is_abstract(was):
                hint = "Return it from `init` as an array, `jnp.asarray(...)`."
            change = f"from {describe(was)} to {describe(now)}"
            raise ValueError(f"a step changes {path} {change}. {hint}")


def _check_scalar(value: Any, name: str) -> None:
    if not is_abstract(value) or value.shape != ():
        other = "Is a `return` missing?" if value is None else "Return one array of shape ()."
        remedy = "Reduce it, with `jnp.mean` say." if is_abstract(value) else other
        found = describe_tree(value, name)
        raise ValueError(f"the {name} must return one scalar, it returned\n{found}\n{remedy}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        found = f"the {name} must return a floating-point scalar, it returned {describe(value)}"
        raise TypeError(f"{found}. A count of errors has no gradient: use a smooth loss.")


def _check_dependence(problem: Definition, hparams: PyTree, smooth: bool) -> tuple[str, ...]:
    """Raise for a hyperparameter that cannot influence its error: its gradient would be 0.

    Return the paths of those with a gradient that leaves out their influence on random choices.
    """
    arrays, static = eqx.partition(problem, jax.tree.map(is_abstract, problem))

    def errors(arrays, hparams):
        system = make_system(eqx.combine(arrays, static), hparams)
        return system.errors(system.run(hparams), hparams)

    def tangents(arrays, hparams, direction):
        return jax.jvp(lambda h: errors(arrays, h), (hparams,), (direction,))[1]

    # A dependence that has a derivative is one of the errors' tangents on the direction. A
    # custom_vjp function has no tangent: there, dependence of the errors themselves must do.
    try:
        traced = jax.make_jaxpr(tangents)(arrays, hparams, hparams) if smooth else None
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        traced = None
    jaxpr = (traced or jax.make_jaxpr(errors)(arrays, hparams)).jaxpr

    rows, carried = rows_of(problem), getattr(problem.dynamics, "carried", ())
    paths = list(named_leaves(hparams, "hparams"))
    # The direction (or the hyperparameters) are the last inputs.
    named = zip(paths, owners(problem, hparams), range(-len(paths), 0), strict=True)
    unused = [path for path, owner, i in named if not inputs_of(jaxpr, rows[owner])[i]]
    unused = [path for path in unused if path not in carried]
    if unused:
        what = f"the response does not depend on {', '.join(unused)}"
        remedy = _remedy(problem, len(unused) == len(paths))
        raise ValueError(f"{what}: the hypergradient there would be 0 whatever its value. {remedy}")
    if not smooth:
        return ()
    first = len(jax.tree.leaves(arrays))
    return tuple(paths[i - first] for i in cut_hparams(jaxpr, range(first, first + len(paths))))


def _remedy(problem: Definition, all_unused: bool) -> str:
    remedy = (
        "Use it in the loss, the optimizer, the start or the objective (not only under "
        "`stop_gradient`, an integer cast or a comparison), or leave it out. A dropout rate "
        "needs `foretune.dropout`."
    )
    if all_unused:
        hint = "An accuracy, a sign or an argmax has no derivative."
        remedy = f"Does the objective depend on the trained state, and smoothly? {hint}"
    optimizer = problem.dynamics.optimizer if isinstance(problem.dynamics, Training) else None
    if isinstance(optimizer, optax.GradientTransformation):
        remedy += ' To tune the optimizer, give `optimizer=lambda h: optax.sgd(h["lr"])`.'
    return remedy
