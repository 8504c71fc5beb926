"""What a problem is made of: a dynamics with its data, its start and its error."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

Objective = Callable[..., Array]  # (state, hparams, validation) -> scalar


class Definition(eqx.Module):
    """The parts of a `Problem`, as systems and checks see them."""

    dynamics: Any  # a `Dynamics`: users know which, and its fields
    objective: Objective | dict[str, Objective]
    init: PyTree
    batches: Any  # `Batches`
    validation: PyTree
    trajectory: bool = eqx.field(static=True)

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return self.batches.steps

    @property
    def starts_from_function(self) -> bool:
        """Whether `init` is a function of the hyperparameters."""
        # An Equinox model is callable as well, but holds arrays: it is a start, not a function.
        arrays = jax.Array | jax.ShapeDtypeStruct
        holds_arrays = any(isinstance(leaf, arrays) for leaf in jax.tree.leaves(self.init))
        partial = isinstance(self.init, jax.tree_util.Partial | eqx.Partial)
        return partial or (callable(self.init) and not holds_arrays)

    def start(self, hparams: PyTree) -> PyTree:
        """Return the user's s_0."""
        params = self.init(hparams) if self.starts_from_function else self.init
        return self.dynamics.init(params, hparams)

    @property
    def objectives(self) -> dict[str | None, Objective]:
        """The objectives by hyperparameter name, sorted; a single one has the name None."""
        if not isinstance(self.objective, dict):
            return {None: self.objective}
        return {name: self.objective[name] for name in sorted(self.objective)}
