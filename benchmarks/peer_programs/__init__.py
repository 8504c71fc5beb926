"""One module per library of `benchmarks/peers.py`, each with `make(spec, library) -> Program`."""

from collections.abc import Callable
from typing import Any, NamedTuple

LIBRARIES = {
    "foretune": "foretune_programs",
    "foretune, Auto": "foretune_programs",
    "JAX by hand": "jax_program",
    "TorchOpt": "torchopt_program",
    "higher": "higher_program",
    "betty": "betty_program",
    "torch": "torch_program",
}
IN_JAX = ("foretune", "foretune, Auto", "JAX by hand")
PACKAGES = ("torch", "torchopt", "higher", "betty-ml", "numpy")


class Program(NamedTuple):
    """A library's hypergradient of one problem."""

    run: Callable[[], tuple[float, dict[str, Any]]]
    """Returns the error and its gradient when both are computed."""
    note: str = ""
    """How the library was used, where there is a choice."""
    compiled_bytes: Callable[[], int] | None = None
    """The compiler's figure for temporary arrays and results, for a library that has a compiler."""
