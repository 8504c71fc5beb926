"""PyTorch alone: the training unrolled with `create_graph=True`, then one backward pass."""
# pyright: reportMissingImports=false

import torch
from torch.nn import functional as F

from . import Program
from .problems import Spec
from .torch_models import Arrays, loss, network, results


def make(spec: Spec, library: str = "") -> Program:
    """Return the hypergradient by automatic differentiation of the unrolled training."""
    arrays = Arrays(spec)

    def run():
        h = arrays.leaves()
        eta, mu = spec.rates(h)
        w, v = [p.clone().requires_grad_() for p in arrays.params], None
        for t in range(spec.steps):
            x, y = arrays.batch(t)
            g = torch.autograd.grad(loss(network(w, x), y, w, h), w, create_graph=True)
            v = step_velocity(v, g, mu)
            w = [w - eta * v for w, v in zip(w, v, strict=True)]
        x, y = arrays.validation
        value = F.cross_entropy(network(w, x), y)
        return results(value, h, torch.autograd.grad(value, list(h.values())))

    return Program(run, "unrolled")


def step_velocity(v, g, mu):
    """v_t = mu v_{t-1} + g_t, with v_0 = 0 and nothing to do for a momentum that is 0."""
    constant_zero = not isinstance(mu, torch.Tensor) and mu == 0
    if v is None or constant_zero:
        return g
    return [mu * v + g for v, g in zip(v, g, strict=True)]
