# pyright: reportMissingImports=false
"""torchax's environment, in which PyTorch's operations run on JAX arrays, mended in five places.

- Batch normalisation moves its running statistics, which torchax leaves where they are.
- Random numbers come from the key of the call, and without one there are none.
- What is computed under `torch.no_grad` is a constant, as it is in PyTorch.
- A tensor that the module merely holds (in a list, say) is a constant where it meets a JAX array.
- A custom `torch.autograd.Function` is refused: JAX would differentiate its forward pass.
"""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, PyTree
from torch.utils import _pytree as pytree
from torchax import tensor
from torchax.ops.mappings import t2j
from torchax.view import NarrowInfo, View

IN_PLACE = re.compile(r"(\w*[^_]_|__(i\w+|setitem)__)")  # add_, copy_, __iadd__


class Environment(tensor.Environment):
    """Runs a module's operations in JAX; `with environment.running(key): ...`."""

    def __init__(self):
        super().__init__()
        aten = torch.ops.aten
        self.override_op_definition(aten.native_batch_norm, _batch_norm)
        self.override_op_definition(aten._native_batch_norm_legit.default, _batch_norm)
        # Instance normalisation writes its running statistics through an alias.
        self.override_op_definition(aten.alias, _alias, is_view_op=True)

    @contextlib.contextmanager
    def running(self, key: Array | None) -> Iterator[None]:
        """Turn PyTorch's operations into JAX's, with random numbers from `key` (or None)."""
        with (
            warnings.catch_warnings(),
            self.override_property(prng=key),
            torch.enable_grad(),  # a `no_grad` around the call would make all of it constant
            self,
            torch.device("jax"),
        ):
            # PyTorch's integers have 64 bits, JAX's have 32 unless asked for more.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype")
            yield

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> Array:
        """Return the next random key of this call."""
        if self.param.prng is None:
            raise ValueError(
                "the module draws random numbers (dropout and the like) but there is no key. Give "
                "`apply(..., key=key)`, the key that `Training(..., key=jax.random.key(0))` passes "
                "to the loss, or evaluate with `train=False`."
            )
        return super().get_and_rotate_prng_key()

    def dispatch(
        self, func: Callable, types: tuple, args: tuple, kwargs: dict[str, PyTree] | None
    ) -> PyTree:
        """Run one operation."""
        if not torch._C._is_fwd_grad_enabled():
            raise NotImplementedError(
                f"{name_of(func)} is called in a custom torch.autograd.Function (or in inference_mode)"
                ", whose backward pass JAX cannot use. Write it with PyTorch's operations; "
                "`y + (x - y).detach()` has the value of x and the gradient of y."
            )
        args, kwargs = self._prepared(func, args, kwargs or {})
        return super().dispatch(func, types, args, kwargs)

    def _prepared(
        self, func: Callable, args: tuple, kwargs: dict[str, PyTree]
    ) -> tuple[tuple, dict[str, PyTree]]:
        """Return the arguments, constants among them as such."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(map(is_jax, tensors)):
            return args, kwargs
        target = args[0] if args and IN_PLACE.fullmatch(name_of(func)) else kwargs.get("out")
        if isinstance(target, torch.Tensor) and not is_jax(target):
            raise NotImplementedError(
                f"{name_of(func)} changes a tensor that the module holds and that is not a buffer. "
                "Register it, `self.register_buffer(name, tensor)`, and it is part of the state."
            )

        # A view must stay one, for changes in place; what is then computed from it is constant.
        view = target is None and getattr(self._ops.get(func), "is_view_op", False)

        def prepared(x):
            if is_jax(x) and (x is target or view or torch.is_grad_enabled()):
                return x
            return tensor.Tensor(jax.lax.stop_gradient(to_jax(x)), self)

        return pytree.tree_map_only(torch.Tensor, prepared, (args, kwargs))


@functools.cache
def environment() -> Environment:
    """Return the one environment of this library; torchax's own is left as it is."""
    return Environment()


def is_jax(x: object) -> bool:
    """Return whether a tensor is a JAX array in PyTorch's clothes."""
    return isinstance(x, tensor.Tensor | View)


def to_jax(x: torch.Tensor) -> Array:
    """Return a tensor's JAX array, a copy where it is PyTorch's: shared memory follows its changes."""
    return x.jax() if is_jax(x) else jnp.array(t2j(x.detach(), use_dlpack=False), copy=True)


def to_torch(x: Array) -> torch.Tensor:
    """Return a copy of a JAX array as a tensor; NumPy knows no bfloat16, so that comes as float32."""
    return torch.from_numpy(np.array(x, np.float32 if x.dtype == jnp.bfloat16 else x.dtype))


def name_of(func: Callable) -> str:
    """Return `add_` for aten::add_.Tensor and for torch.Tensor.add_."""
    own = getattr(func, "name", None)
    name = own() if own else getattr(func, "__name__", str(func))
    return name.split("::")[-1].split(".")[0]


def _alias(x):
    return View(x, NarrowInfo(...), x._env)


def _batch_norm(x, weight, bias, mean, variance, training, momentum, eps):
    """Normalise by the batch (training) or the running statistics, and move the latter in place.

    The running variance follows the unbiased one, n / (n - 1) times that of the batch.
    """
    x_, channels = x.jax(), (1, -1) + (1,) * (x.ndim - 2)
    if training or mean is None:
        axes = (0, *range(2, x.ndim))
        mu, var = jnp.mean(x_, axes), jnp.var(x_, axes)
        if mean is not None:
            n = x_.size / x_.shape[1]
            for running, batch in ((mean, mu), (variance, var * n / (n - 1))):
                old = running.jax()
                new = (1 - momentum) * old + momentum * batch
                running.copy_(tensor.Tensor(new.astype(old.dtype), x._env))
    else:
        mu, var = mean.jax(), variance.jax()
    scale = jax.lax.rsqrt(var + eps)
    y = (x_ - mu.reshape(channels)) * scale.reshape(channels)
    if weight is not None:
        y = y * weight.jax().reshape(channels)
    if bias is not None:
        y = y + bias.jax().reshape(channels)
    wrap = functools.partial(tensor.Tensor, env=x._env)
    return wrap(y.astype(x_.dtype)), wrap(mu), wrap(scale)
