"""What fits a tuner: states, windows and validation data like those before, and what is said else."""

import contextlib
from collections.abc import Iterator

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import PyTree

from .._constraints.base import check_constraints
from .._outer.update import Outer
from .._problem.checks import describe, describe_tree, named_leaves
from .._problem.training import Training, TrainState
from .window import RealTimeState, TunerSettings


class Misfit(ValueError):
    """Something that does not fit, in an error that says all about it."""


class Shapes:
    """What a tuner was given last that fitted, for what is said of something that does not."""

    def __init__(self):
        self.known: dict[str, dict[str, str]] = {}

    def note(self, **given: PyTree) -> None:
        """Take these for what fits."""
        self.known |= {name: shapes_of(tree, name) for name, tree in given.items()}

    @contextlib.contextmanager
    def explaining(self, **given: PyTree) -> Iterator[None]:
        """Add to an error, of checks, what has changed since all was well."""
        try:
            yield
        except Misfit:
            raise
        except Exception as error:
            known = [name for name in given if name in self.known]
            lines = [
                _differences(shapes_of(given[name], name), self.known[name], "it was")
                for name in known
            ]
            if changed := "\n".join(filter(None, lines)):
                advice = " Is the state that of another tuner?" if "  state" in changed else ""
                raise ValueError(
                    "`update` was given something that differs from before, and does not fit:\n"
                    f"{changed}\nWith it: {type(error).__name__}: {error}{advice}"
                ) from error
            if getattr(error, "__notes__", ()):  # it comes from the user's code
                for name in set(given) - set(known):
                    error.add_note(f"foretune: given with\n{describe_tree(given[name], name)}")
            raise
        self.note(**given)


def shapes_of(tree: PyTree, name: str) -> dict[str, str]:
    """Return what the leaves are, by path."""
    return {path: describe(leaf) for path, leaf in named_leaves(tree, name).items()}


def _differences(now: dict[str, str], old: dict[str, str], was: str, most: int = 6) -> str:
    """Return in which leaves two trees differ, the first few of them."""
    paths = [path for path in {**now, **old} if now.get(path) != old.get(path)]
    lines = [
        f"  {path} is {now.get(path, 'absent')}, {was} {old.get(path, 'absent')}" for path in paths
    ]
    return "\n".join(lines[:most] + ["  ..."] * (len(lines) > most))


def check_state(settings: TunerSettings, state: RealTimeState) -> None:
    """Raise where a state is not one of this tuner: its optimizers' states, and the columns of Z."""
    outer = Outer(settings.optimizer, check_constraints(settings.constraints, state.hparams))
    expected = {"opt_state": jax.eval_shape(outer.init, state.hparams)}
    dynamics, train = settings.dynamics, state.train
    if isinstance(dynamics, Training) and isinstance(train, TrainState):
        begun = (train.params, train.model_state) if dynamics.has_state else train.params
        expected["train"] = eqx.filter_eval_shape(dynamics.init, begun, state.hparams)
    if state.Z is not None:
        m = sum(leaf.size for leaf in jax.tree.leaves(state.hparams))
        moving = eqx.filter(state.train, eqx.is_inexact_array)
        expected["Z"] = jax.tree.map(lambda s: jax.ShapeDtypeStruct((m, *s.shape), s.dtype), moving)
    for name, tree in expected.items():
        given = shapes_of(getattr(state, name), f"state.{name}")
        if lines := _differences(given, shapes_of(tree, f"state.{name}"), "it should be"):
            raise Misfit(
                f"this state does not fit this tuner:\n{lines}\nIt is that of a tuner with another "
                "optimizer, other hyperparameters or other parameters. Begin with `init` of this one."
            )


def check_not_donated(tree: PyTree) -> None:
    """Raise where an `update` has reused the memory of a state."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    if any(not isinstance(array, Tracer) and array.is_deleted() for array in arrays):
        raise ValueError(
            "this state has been given to an `update` that reused its memory (`donate=True`). "
            "Continue from the state that it returned, or leave `donate` out."
        )
