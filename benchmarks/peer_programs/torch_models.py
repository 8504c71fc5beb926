"""Model, loss and error in PyTorch, as functions of weights and as modules."""
# pyright: reportMissingImports=false

import torch
from torch.nn import functional as F

from .problems import Spec


class Arrays:
    """The arrays of a problem on the device."""

    def __init__(self, spec: Spec):
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def move(array):
            return torch.as_tensor(array, device=device)

        self.data = move(spec.data[0]), move(spec.data[1]).long()
        self.validation = move(spec.validation[0]), move(spec.validation[1]).long()
        self.indices = None if spec.indices is None else move(spec.indices).long()
        self.params = [move(leaf) for layer in spec.params for leaf in layer]
        self.hparams = {name: move(h) for name, h in spec.hparams.items()}
        self.spec = spec

    def batch(self, t: int):
        """Return the examples of step t."""
        if self.indices is None:
            return self.data
        rows = self.indices[t]
        return self.data[0][rows], self.data[1][rows]

    def leaves(self):
        """Return the hyperparameters, to be differentiated."""
        return {name: h.clone().requires_grad_() for name, h in self.hparams.items()}

    def module(self):
        """Return the model as a module with the initial weights."""
        net = module_of([tuple(W.shape) for W in self.params[::2]]).to(self.data[0].device)
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), self.params, strict=True):
                parameter.copy_(value)
        return net


def results(value, hparams, grads):
    """Return error and gradient, when they are computed, as the host's numbers."""
    found = {name: g.detach().cpu().numpy() for name, g in zip(hparams, grads, strict=True)}
    return float(value.detach()), found


def network(params, x):
    """Return the logits: convolutions with 2 x 2 means between them, then linear layers."""
    layers = list(zip(params[::2], params[1::2], strict=True))
    for i, (W, b) in enumerate(layers):
        if W.ndim == 4:
            x = torch.tanh(F.conv2d(x, W, b, padding=1))
            x = F.avg_pool2d(x, 2) if i < 2 else x.flatten(1)
        else:
            x = F.linear(x, W, b)
            x = torch.tanh(x) if i < len(layers) - 1 else x
    return x


def module_of(shapes):
    """Return the same model as a `torch.nn.Sequential`."""
    nn, found = torch.nn, []
    for i, shape in enumerate(shapes):
        if len(shape) == 4:
            found += [nn.Conv2d(shape[1], shape[0], 3, padding=1), nn.Tanh()]
            found.append(nn.AvgPool2d(2) if i < 2 else nn.Flatten())
        else:
            found.append(nn.Linear(shape[1], shape[0]))
            found += [nn.Tanh()] if i < len(shapes) - 1 else []
    return nn.Sequential(*found)


def loss(logits, labels, params, hparams):
    """L(w, h, batch) from the logits of the batch."""
    if "weight" in hparams:
        value = (hparams["weight"] * F.cross_entropy(logits, labels, reduction="none")).mean()
    else:
        value = F.cross_entropy(logits, labels)
    if "decay" in hparams:
        squares = torch.stack([(W**2).sum() for W in params[::2]])
        value = value + 0.5 * (hparams["decay"] * squares).sum()
    return value
