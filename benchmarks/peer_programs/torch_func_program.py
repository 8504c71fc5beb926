"""`torch.func`: `grad` of a function whose steps call `grad`."""
# pyright: reportMissingImports=false

import torch
from torch.nn import functional as F

from . import Program
from .problems import Spec
from .torch_models import Arrays, loss, network, results
from .torch_program import step_velocity


def make(spec: Spec, library: str = "") -> Program:
    """Return the hypergradient by reverse mode over the steps' own gradients."""
    arrays = Arrays(spec)

    def inner(w, h, x, y):
        return loss(network(w, x), y, w, h)

    def response(h):
        eta, mu = spec.rates(h)
        w, v = list(arrays.params), None
        for t in range(spec.steps):
            g = torch.func.grad(inner)(w, h, *arrays.batch(t))
            v = step_velocity(v, g, mu)
            w = [w - eta * v for w, v in zip(w, v, strict=True)]
        x, y = arrays.validation
        return F.cross_entropy(network(w, x), y)

    def run():
        grads, value = torch.func.grad_and_value(response)(arrays.hparams)
        return results(value, grads, grads.values())

    return Program(run, "grad of grads")
