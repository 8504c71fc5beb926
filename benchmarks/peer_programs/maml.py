"""The process of one library that learns sinusoids by MAML: it prints one line of JSON.

    python -m benchmarks.peer_programs.maml '{"library": "higher", "steps": 100, "inner": 5, ...}'

Each library is used as its own examples of MAML do: a clone or a context for each task, and a backward
pass after it, so that one task's graph is held at a time. `torch.func` does all tasks side by side.
"""
# pyright: reportMissingImports=false

import time
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np

from .worker import answer, resident_peak

SIZES, TASKS, POINTS = (1, 40, 40, 1), 25, 10
RATE, OUTER_RATE = 0.01, 1e-3
STORES = {
    "foretune": "everything",
    "foretune, Reverse()": "states",
    'foretune, Reverse("segments")': "segments",
    "foretune, Reverse(8)": 8,
}
Found = dict[str, Any]


def first_weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the weights that all begin with, each layer's as inputs x outputs."""
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(a, b)) / a**0.5, np.zeros(b)) for a, b in pairwise(SIZES)]
    return [(w.astype(np.float32), b.astype(np.float32)) for w, b in layers]


def first_tasks() -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of the tasks that all are compared on: support and query, tasks, points, 1."""
    rng = np.random.default_rng(1)
    amplitude, phase = rng.uniform(0.1, 5, (TASKS, 1, 1)), rng.uniform(0, np.pi, (TASKS, 1, 1))
    x = rng.uniform(-5, 5, (2, TASKS, POINTS, 1))
    return x.astype(np.float32), (amplitude * np.sin(x + phase)).astype(np.float32)


def in_torch(library: str, inner: int) -> tuple[Callable[[int], Any], Callable[[], np.ndarray]]:
    """Return a function that makes outer steps, and one for the gradient at the first tasks."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(SIZES)]
    net = nn.Sequential(*chain(*layers))[:-1]
    with torch.no_grad():
        for layer, (w, b) in zip(net[::2], first_weights(), strict=True):
            layer.weight.copy_(torch.tensor(w.T))
            layer.bias.copy_(torch.tensor(b))
    weights = list(net.parameters())
    backward = TORCH[library](net, inner)
    adam = torch.optim.Adam(weights, OUTER_RATE)

    def drawn():
        amplitude = 0.1 + 4.9 * torch.rand(TASKS, 1, 1)
        x = 10 * torch.rand(2, TASKS, POINTS, 1) - 5
        return x, amplitude * torch.sin(x + torch.pi * torch.rand(TASKS, 1, 1))

    def steps(count):
        for _ in range(count):
            adam.zero_grad()
            backward(*drawn(), F.mse_loss)
            adam.step()

    def gradient():
        adam.zero_grad()
        x, y = map(torch.tensor, first_tasks())
        backward(x, y, F.mse_loss)
        grads = [w.grad.T if w.grad.ndim == 2 else w.grad for w in weights]
        return np.concatenate([g.numpy().ravel() for g in grads])

    return steps, gradient


def by_torch(net, inner):
    """Unrolled by hand."""
    import torch
    from torch.func import functional_call

    names, weights = zip(*net.named_parameters(), strict=True)

    def backward(x, y, loss):
        for task in range(TASKS):
            w = weights
            for _ in range(inner):
                out = functional_call(net, dict(zip(names, w, strict=True)), x[0, task])
                grads = torch.autograd.grad(loss(out, y[0, task]), w, create_graph=True)
                w = [p - RATE * g for p, g in zip(w, grads, strict=True)]
            out = functional_call(net, dict(zip(names, w, strict=True)), x[1, task])
            (loss(out, y[1, task]) / TASKS).backward()

    return backward


def by_torch_func(net, inner):
    """All tasks side by side: `torch.func.vmap` of `torch.func.grad`."""
    import torch
    from torch.func import functional_call, grad, vmap

    named = dict(net.named_parameters())

    def backward(x, y, loss):
        def support(w, x, y):
            return loss(functional_call(net, w, x), y)

        def error(w, x, y):
            for _ in range(inner):
                g = grad(support)(w, x[0], y[0])
                w = {name: w[name] - RATE * g[name] for name in w}
            return support(w, x[1], y[1])

        torch.mean(vmap(error, (None, 1, 1))(named, x, y)).backward()

    return backward


def by_higher(net, inner):
    """`innerloop_ctx`, with the initial weights not copied."""
    import higher
    import torch

    plain = torch.optim.SGD(net.parameters(), RATE)

    def backward(x, y, loss):
        for task in range(TASKS):
            with higher.innerloop_ctx(net, plain, copy_initial_weights=False) as (model, optimizer):
                for _ in range(inner):
                    optimizer.step(loss(model(x[0, task]), y[0, task]))
                (loss(model(x[1, task]), y[1, task]) / TASKS).backward()

    return backward


def by_torchopt(net, inner):
    """`MetaSGD`, and the module's state put back after each task."""
    import torchopt

    optimizer = torchopt.MetaSGD(net, lr=RATE)

    def backward(x, y, loss):
        start = torchopt.extract_state_dict(net, by="reference")
        of_optimizer = torchopt.extract_state_dict(optimizer, by="reference")
        for task in range(TASKS):
            for _ in range(inner):
                optimizer.step(loss(net(x[0, task]), y[0, task]))
            (loss(net(x[1, task]), y[1, task]) / TASKS).backward()
            torchopt.recover_state_dict(net, start)
            torchopt.recover_state_dict(optimizer, of_optimizer)

    return backward


def by_learn2learn(net, inner):
    """`MAML`, a clone for each task, and `adapt`."""
    import learn2learn

    maml = learn2learn.algorithms.MAML(net, lr=RATE)

    def backward(x, y, loss):
        for task in range(TASKS):
            learner = maml.clone()
            for _ in range(inner):
                learner.adapt(loss(learner(x[0, task]), y[0, task]))
            (loss(learner(x[1, task]), y[1, task]) / TASKS).backward()

    return backward


TORCH = {
    "torch": by_torch,
    "torch.func": by_torch_func,
    "higher": by_higher,
    "TorchOpt": by_torchopt,
    "learn2learn": by_learn2learn,
}
LIBRARIES = (*TORCH, *STORES)


def in_foretune(library: str, inner: int) -> tuple[Callable[[int], Any], Callable[[], np.ndarray]]:
    """Return the same by `minimize`, with the states stored as the library's name says."""
    import jax
    import optax

    import foretune as ft
    from benchmarks import meta

    unroll = inner if library == "foretune" and inner < 10 else 1
    engine: Any = ft.Reverse(STORES[library], unroll=unroll)
    case = meta.CASES["sinusoids"]()
    draw = ft.Mean.of_draws(meta.tasks_of(case, inner), TASKS)
    weights = jax.tree.map(jax.numpy.asarray, first_weights())
    adam = optax.adam(OUTER_RATE)

    def steps(count):
        if count == 1:
            return jax.block_until_ready(engine(draw, weights, key=jax.random.key(1)).grad)
        options: Any = dict(optimizer=adam, engine=engine, key=jax.random.key(1))
        return ft.minimize(draw, weights, steps=count, **options)

    def gradient():
        x, y = first_tasks()

        def problem(task):
            support, query = [(x[i, task], y[i, task]) for i in range(2)]
            given = meta.tasks_of(case, inner)(jax.random.key(0))
            return given.replace(batches=ft.FullBatch(support, inner), validation=query)

        grad = engine(ft.Mean([problem(task) for task in range(TASKS)]), weights).grad
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grad)])

    return steps, gradient


def measure(found: Found, request: Found) -> None:
    """Weigh an outer step; or compute the gradient to be compared, and time outer steps."""
    library = request["library"]
    make = in_torch if library in TORCH else in_foretune
    steps, gradient = make(library, request["inner"])
    if request["weigh"]:
        found["bytes"] = resident_peak(lambda: steps(1))
        return
    found["gradient"] = gradient().astype(float).tolist()
    count = request["steps"]
    began = time.perf_counter()
    steps(count)  # compiles, where there is something to compile
    found["first_call"] = time.perf_counter() - began
    found["seconds"], found["of_processor"] = [], []
    for _ in range(request["rounds"]):
        began, processor = time.perf_counter(), time.process_time()
        steps(count)
        found["seconds"].append((time.perf_counter() - began) / count)
        found["of_processor"].append((time.process_time() - processor) / count)


if __name__ == "__main__":
    answer(measure)
