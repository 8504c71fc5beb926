"""TorchOpt: `MetaSGD` steps on a module, whose graph is kept for a backward pass."""
# pyright: reportMissingImports=false

import torch
import torchopt
from torch.nn import functional as F

from . import Program
from .problems import Spec
from .torch_models import Arrays, loss, results


def make(spec: Spec, library: str = "") -> Program:
    """Return the hypergradient through the differentiable optimizer.

    Learning rate and momentum go in as tensors: documented as numbers, they are differentiable too.
    """
    arrays = Arrays(spec)
    net = arrays.module()
    start = torchopt.extract_state_dict(net, by="reference", detach_buffers=True)

    def run():
        torchopt.recover_state_dict(net, start)
        h = arrays.leaves()
        eta, mu = spec.rates(h)
        optimizer = torchopt.MetaSGD(net, lr=eta, momentum=mu, moment_requires_grad=True)
        for t in range(spec.steps):
            x, y = arrays.batch(t)
            optimizer.step(loss(net(x), y, list(net.parameters()), h))
        x, y = arrays.validation
        value = F.cross_entropy(net(x), y)
        found = results(value, h, torch.autograd.grad(value, list(h.values())))
        torchopt.stop_gradient(net)
        return found

    return Program(run, "MetaSGD")
