"""betty: an `IterativeProblem` of T steps under an upper problem that differentiates through them.

betty's usual way, `ImplicitProblem`, approximates (finite differences or a few terms of a series at the
last step) and knows nothing of the optimizer's constants. `IterativeProblem` is its exact one.
"""
# pyright: reportMissingImports=false

import logging

import torch
from betty.configs import Config, EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem, IterativeProblem
from torch.nn import functional as F

from . import Program
from .problems import Spec
from .torch_models import Arrays, loss, results


class Hyperparameters(torch.nn.Module):
    """The upper problem's module."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in values.items()})


class Inner(IterativeProblem):
    """The training."""

    def training_step(self, batch):
        """L(w, h, batch)."""
        x, y = batch
        return loss(self.fmodule(self.params, self.buffers, x), y, self.params, self.outer.leaves)

    def patch_optimizer(self):
        """Let the differentiable optimizer use the hyperparameters that are its constants."""
        super().patch_optimizer()
        for group in self.optimizer.param_groups:
            group.update({k: h for k, h in self.outer.leaves.items() if k in ("lr", "momentum")})


class Outer(ImplicitProblem):
    """The validation error; its step takes the gradient down instead of using it."""

    @property
    def leaves(self):
        """The hyperparameters by name."""
        return dict(self.module.values.items())

    def training_step(self, batch):
        """f(h), with the graph of the lower problem's steps behind it."""
        x, y = batch
        self.value = F.cross_entropy(
            self.inner.fmodule(self.inner.params, self.inner.buffers, x), y
        )
        return self.value

    def custom_optimizer_step(self):
        """Keep the gradient."""
        self.found = [p.grad for p in self.trainable_parameters()]


def make(spec: Spec, library: str = "") -> Program:
    """Return the hypergradient as the upper problem's gradient after T steps of the lower."""
    logging.getLogger("betty").disabled = True
    arrays = Arrays(spec)

    def run():
        net, hyper = arrays.module(), Hyperparameters(arrays.leaves())
        eta, mu = (float(rate) for rate in spec.rates(hyper.values))
        batches = [arrays.batch(t) for t in range(spec.steps)]
        inner = Inner(
            "inner",
            Config(unroll_steps=spec.steps, retain_graph=True),
            net,
            torch.optim.SGD(net.parameters(), lr=eta, momentum=mu),
            train_data_loader=batches,
        )
        outer = Outer(
            "outer",
            Config(first_order=False),
            hyper,
            train_data_loader=[arrays.validation],
        )
        dependencies = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
        Engine([outer, inner], EngineConfig(train_iters=spec.steps), dependencies).run()
        return results(outer.value, outer.leaves, outer.found)

    return Program(run, "IterativeProblem")
