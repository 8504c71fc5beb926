# pyright: reportMissingImports=false
"""A `torch.nn.Module` as a pure JAX function of its parameters and buffers.

    y, b_t = apply(w, x, b_{t-1})        w: trained, b: running statistics and the like

The module's own `forward` is traced by JAX, each operation translated by torchax. PyTorch takes no part
in the computation; it sees the result when `Bridge.load` writes the weights back.
"""

import copy
import traceback
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, PyTree
from torch.utils import _pytree as pytree
from torchax.tensor import OperatorNotFound

from .._problem.checks import describe
from ._environment import environment, to_jax, to_torch


def bridge(module: torch.nn.Module) -> "Bridge":
    """Return `module`, a `torch.nn.Module` on the CPU, as a JAX function: a `Bridge`.

    >>> import foretune.torch as ftt, jax, jax.numpy as jnp, torch
    >>> model = ftt.bridge(torch.nn.Linear(2, 1, bias=False))
    >>> loss = lambda params: jnp.sum(model.apply(params, jnp.array([[3.0, 5.0]])))
    >>> jax.grad(loss)(model.params)["weight"]
    Array([[3., 5.]], dtype=float32)
    >>> module = model.load({"weight": jnp.ones((1, 2))})  # the module, with these weights
    """
    return Bridge(module)


class Bridge:
    """A PyTorch module as a pure function; made by `bridge(module)`."""

    module: torch.nn.Module
    """The module, which only `load` changes."""
    params: dict[str, Array]
    """Its trainable parameters by name. Those with `requires_grad=False` are constants."""
    buffers: dict[str, Array]
    """Its buffers (batch statistics, masks) by name: the model state."""

    def __init__(self, module: torch.nn.Module):
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            name = type(module).__name__
            raise TypeError(f"the module is compiled ({name}). Give the one before compilation.")
        self.module = module
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, x in tensors.items():
            _check_tensor(name, x)
        self.params = {n: to_jax(p) for n, p in module.named_parameters() if p.requires_grad}
        self.buffers = {name: to_jax(b) for name, b in module.named_buffers()}
        rest = tensors.keys() - self.params.keys() - self.buffers.keys()
        self._frozen = {name: to_jax(tensors[name]) for name in rest}
        # A copy of the structure, not of the tensors: calls leave the module's mode and state alone.
        self._copy = copy.deepcopy(module, {id(x): x for x in tensors.values()})

    def __repr__(self) -> str:
        size = sum(p.size for p in self.params.values())
        return f"Bridge({type(self.module).__name__}, {size:,} trainable weights)"

    def apply(
        self,
        params: Mapping[str, Array],
        *args: PyTree,
        buffers: Mapping[str, Array] | None = None,
        train: bool = False,
        key: Array | None = None,
        **kwargs: PyTree,
    ) -> PyTree:
        """Return `module(*args, **kwargs)` at these parameters and buffers, a pure function in JAX.

        Args:
            params, buffers: as in `Bridge.params` and `Bridge.buffers`.
            *args, **kwargs: inputs of the module's `forward`, with JAX or NumPy arrays.
            train: as after `module.train()`. The result is then the pair (output, new buffers).
            key: a random key, for dropout and the like.
        """
        self._check("params", params, self.params)
        buffers = self._check("buffers", buffers, self.buffers)
        env = environment()
        tensors = env.j2t_iso({**self._frozen, **params, **buffers})
        self._copy.train(train)
        try:
            with env.running(key):
                args, kwargs = pytree.tree_map(_input, (args, kwargs))
                args, kwargs = env.j2t_iso((args, kwargs))
                # Changed buffers, in place or replaced, are found in `tensors` afterwards.
                output = torch.func.functional_call(self._copy, tensors, args, kwargs)
                output = pytree.tree_map_only(torch.Tensor, to_jax, output)
                buffers = {n: to_jax(tensors[n]).astype(b.dtype) for n, b in buffers.items()}
        except Exception as error:
            where = self._where(error)
            if not isinstance(error, OperatorNotFound):
                error.add_note(f"foretune: this happened in {where}, called by `Bridge.apply`.")
                raise
            raise NotImplementedError(
                f"torchax does not carry {where} over to JAX: {error}. Write it with other operations "
                "of PyTorch, or look for a newer torchax."
            ) from error
        return (output, buffers) if train else output

    def load(
        self, params: Mapping[str, Array], buffers: Mapping[str, Array] | None = None
    ) -> torch.nn.Module:
        """Write parameters, and buffers where there are any, into the module, and return it."""
        self._check("params", params, self.params)
        buffers = self._check("buffers", buffers, self.buffers)
        new = {**params, **buffers}
        with torch.no_grad():
            for name, x in (*self.module.named_parameters(), *self.module.named_buffers()):
                if name in new:
                    x.copy_(to_torch(new[name]))
        return self.module

    def _check(
        self, what: str, given: Mapping[str, Array] | None, expected: dict[str, Array]
    ) -> dict[str, Array]:
        """Return what was given, or raise where names or shapes are not those of the module."""
        if given is None and not expected:
            return {}
        if given is None:
            raise ValueError(
                f"the module has buffers ({', '.join(expected)}), and none were given. In a training "
                "with `has_state=True` they are the model state, `state.model_state` in the objective; "
                "where they never change, give `Bridge.buffers`."
            )
        if given.keys() != expected.keys():
            names = f"{sorted(expected)}, got {sorted(given)}"
            raise ValueError(f"{what} must have the names of `Bridge.{what}`, {names}.")
        for name, x in expected.items():
            if np.shape(given[name]) != x.shape:
                raise ValueError(f"{what}[{name!r}] is {describe(given[name])}, not {describe(x)}.")
        return dict(given)

    def _where(self, error: Exception) -> str:
        """Return the innermost submodule in whose `forward` an error came up, by its path."""
        paths = {id(m): (path, m) for path, m in self._copy.named_modules()}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        owners = [id(frame.f_locals.get("self")) for frame in frames]
        inside = [paths[owner] for owner in owners if owner in paths]
        path, module = inside[-1] if inside else ("", self._copy)
        return f"the module {path!r} ({type(module).__name__})" if path else type(module).__name__


def _input(x: PyTree) -> PyTree:
    if isinstance(x, torch.Tensor):
        given = f"{x.dtype} of shape {tuple(x.shape)}"
        how = "give a JAX or NumPy array, `x.numpy()`. (PyTorch's own gradients would end here.)"
        raise TypeError(f"the input is a PyTorch tensor, {given}; {how}")
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def _check_tensor(name: str, x: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(x):
        raise ValueError(f"{name} has no shape yet: the module is lazy. Call it on a batch first.")
    if x.device.type != "cpu":
        raise ValueError(
            f"{name} is on the device {x.device}. Call `module.cpu()` first (on the device meta there "
            "are no values yet); JAX puts its copy on its own default device."
        )
    wide = x.dtype in (torch.float64, torch.complex128)
    if wide and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        wider = "switch JAX to 64 bits with `jax.config.update('jax_enable_x64', True)`"
        what = f"{name} is {x.dtype}, and JAX computes in 32 bits"
        raise ValueError(f"{what}. Call `module.float()`, or {wider}.")
