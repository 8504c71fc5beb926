"""higher: `innerloop_ctx`, with learning rate and momentum as overrides."""
# pyright: reportMissingImports=false

import higher
import torch
from torch.nn import functional as F

from . import Program
from .problems import Spec
from .torch_models import Arrays, loss, results


def make(spec: Spec, library: str = "") -> Program:
    """Return the hypergradient through the differentiable optimizer."""
    arrays = Arrays(spec)
    net = arrays.module()

    def run():
        h = arrays.leaves()
        eta, mu = (float(rate) for rate in spec.rates(h))
        override = {name: [h[name]] for name in ("lr", "momentum") if name in h}
        plain = torch.optim.SGD(net.parameters(), lr=eta, momentum=mu)
        with higher.innerloop_ctx(net, plain, override=override or None) as (model, optimizer):
            for t in range(spec.steps):
                x, y = arrays.batch(t)
                optimizer.step(loss(model(x), y, list(model.parameters()), h))
            x, y = arrays.validation
            value = F.cross_entropy(model(x), y)
            return results(value, h, torch.autograd.grad(value, list(h.values())))

    return Program(run, "innerloop_ctx")
