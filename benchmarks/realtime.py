"""Real-time tuning of a 15-million-parameter network beside its plain training, in one run.

    python -m benchmarks.realtime [--small] [--m 3 6] [--out benchmarks/results/realtime-h200.json]

The network of the paper's speech experiment: 1353-2000-2000-2000-2000 with heads of 183 classes and
300 outputs; batches of 500, windows of 200 minibatches, SGD with momentum; learning rate, momentum and
the weight of the second head are tuned (m = 3), or also label smoothing, a penalty and a temperature
(m = 6). The data is random with labels from a random linear teacher: what is measured is time, memory,
and how hypergradients agree where Z is computed from less (bfloat16, a part of the minibatch).

"Plain" is the training alone over the same window. Each tangent costs at most the arithmetic of two
training steps, so 1 + 2m = 7 is what the arithmetic allows for; GEMMs over m tangents at once are
larger and run faster. The bound is what this machine would need for the arithmetic at the rate of a
large GEMM, and for the bytes of weights, momentum, gradients and tangents at the rate of a copy.
"""

import argparse
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import record, time_in_turns

HPARAMS = {
    3: {"lr": 0.075, "momentum": 0.5, "rho": 1.6},
    6: {"lr": 0.075, "momentum": 0.5, "rho": 1.6, "smooth": 0.1, "l2": 1e-5, "temperature": 1.0},
}
CONSTRAINTS = {
    "lr": ft.NonNegative(),
    "momentum": ft.Box(0.0, 0.999),
    "rho": ft.NonNegative(),
    "smooth": ft.Box(0.0, 0.5),
    "l2": ft.NonNegative(),
    "temperature": ft.Box(0.5, 2.0),
}
TANGENTS = {
    "bfloat16": jnp.bfloat16,
    "a half of the rows": 0.5,
    "a quarter": 0.25,
    "an eighth": 0.125,
    "a quarter, bfloat16": (0.25, jnp.bfloat16),
}


def make(small: bool, m: int) -> dict[str, Any]:
    """Return dynamics, error, parameters, hyperparameters, a window and validation data."""
    sizes = [123, 64, 64] if small else [1353, 2000, 2000, 2000, 2000]
    steps, batch, n = (10, 50, 1000) if small else (200, 500, 50_000)
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def layer(a, b):
        return {"w": jax.random.normal(next(keys), (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}

    pairs = itertools.pairwise(sizes)
    params = {
        "hidden": [layer(a, b) for a, b in pairs],
        "states": layer(sizes[-1], 183),
        "embedding": layer(sizes[-1], 300),
    }
    x = jax.random.normal(next(keys), (n, sizes[0]))
    labels = jnp.argmax(x @ jax.random.normal(next(keys), (sizes[0], 183)), axis=1)
    targets = x @ jax.random.normal(next(keys), (sizes[0], 300)) / sizes[0] ** 0.5
    indices = jax.random.randint(next(keys), (steps, batch), n // 10, n)

    def heads(params, x):
        for hidden in params["hidden"]:
            x = jax.nn.relu(x @ hidden["w"] + hidden["b"])
        return [x @ params[h]["w"] + params[h]["b"] for h in ("states", "embedding")]

    def losses(params, batch):
        x, labels, targets = batch
        logits, embedding = heads(params, x)
        first = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(first), 0.5 * jnp.mean((embedding - targets) ** 2)

    def loss(params, hparams, batch):
        if m == 3:
            first, second = losses(params, batch)
            return first + hparams["rho"] * second
        x, labels, targets = batch
        logits, embedding = heads(params, x)
        log_p = jax.nn.log_softmax(logits / hparams["temperature"])
        given = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
        first = -jnp.mean((1 - hparams["smooth"]) * given + hparams["smooth"] * jnp.mean(log_p, 1))
        second = 0.5 * jnp.mean((embedding - targets) ** 2)
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return first + hparams["rho"] * second + 0.5 * hparams["l2"] * penalty

    data = (x, labels, targets)
    return {
        "dynamics": ft.Training(loss, lambda h: optax.sgd(h["lr"], h["momentum"])),
        "error": lambda state, h, batch: losses(state.params, batch)[0],
        "params": params,
        "hparams": jax.tree.map(jnp.asarray, HPARAMS[m]),
        "window": ft.Minibatches(data, indices),
        "validation": jax.tree.map(lambda leaf: leaf[: n // 10], data),
        "batch": batch,
    }


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def rates(small: bool) -> dict[str, float]:
    """Return what this machine does at best: operations and bytes per second."""
    n = 256 if small else 8192

    def rate(dtype):
        a = jnp.ones((n, n), dtype)
        program = jax.jit(lambda a: lax.fori_loop(0, 10, lambda _, b: (a @ b).astype(dtype), a))
        seconds, _ = time_in_turns({"gemm": lambda: program(a)}, 3)
        return 10 * 2 * n**3 / seconds["gemm"]

    big = jnp.ones(n * n)
    scale = jax.jit(lambda a: lax.fori_loop(0, 20, lambda _, b: b * 1.0001, a), donate_argnums=0)
    seconds, _ = time_in_turns({"copy": lambda: scale(big.copy())}, 3)
    return {
        "gemm_float32_per_s": rate(jnp.float32),
        "gemm_bfloat16_per_s": rate(jnp.bfloat16),
        "bytes_per_s": 20 * 2 * big.nbytes / seconds["copy"],
    }


def bounds(parts: dict[str, Any], m: int, rate: dict[str, float]) -> dict[str, float]:
    """Return the lower bound of a step's milliseconds, plain and with m tangents."""
    P = sum(leaf.size for leaf in jax.tree.leaves(parts["params"]))
    # Forward, and backward to weights and to inputs; the first layer needs no gradient of its input.
    first = parts["params"]["hidden"][0]["w"].size
    operations = 2 * parts["batch"] * (3 * P - first)
    # Read and write weights and momentum, write and read gradients: six passes; the same per tangent.
    passes = 6 * 4 * P

    def milliseconds(count):
        arithmetic = operations * count["operations"] / rate["gemm_float32_per_s"]
        return 1e3 * (arithmetic + passes * count["bytes"] / rate["bytes_per_s"])

    return {
        "parameters": P,
        "operations_per_plain_step": operations,
        "bytes_per_plain_step": passes,
        "bound_plain_ms": milliseconds({"operations": 1, "bytes": 1}),
        "bound_realtime_ms": milliseconds({"operations": 1 + 2 * m, "bytes": 1 + m}),
    }


def speed(parts: dict[str, Any], rounds: int) -> dict[str, Any]:
    window, validation = parts["window"], parts["validation"]
    hparams = parts["hparams"]
    dynamics, error = parts["dynamics"], parts["error"]
    steps = window.steps

    @functools.partial(jax.jit, donate_argnums=0)
    def plain(state, hparams, window):
        def step(state, x):
            return dynamics.step(state, hparams, window.batch(x)), None

        return lax.scan(step, state, window.xs)[0]

    states: dict[str, Any] = {"plain": copied(dynamics.init(parts["params"], hparams))}

    def plain_window():
        states["plain"] = plain(states["plain"], hparams, window)
        return states["plain"]

    programs: dict[str, Any] = {"plain": plain_window}
    memory: dict[str, Any] = {}
    variants: dict[str, Any] = {"real-time": {}}
    variants |= {f"real-time, tangents: {name}": {"tangents": t} for name, t in TANGENTS.items()}
    variants["real-time, rollback=None"] = {"rollback": None, "discount": 1.0}
    still = optax.sgd(0.0)  # the hyperparameters stay: each round does the same work
    for name, options in variants.items():
        tuner = ft.RealTime(dynamics, error, still, constraints=constraints(hparams), **options)
        states[name] = tuner.init(parts["params"], hparams)
        analysis = tuner.lower(states[name], window, validation).compile().memory_analysis()
        memory[name] = {
            "state_mb": sum(x.nbytes for x in jax.tree.leaves(states[name].train)) / 1e6,
            "Z_mb": sum(x.nbytes for x in jax.tree.leaves(states[name].Z)) / 1e6,
            "temporary_mb": analysis.temp_size_in_bytes / 1e6 if analysis else None,
        }

        def one_window(name=name, tuner=tuner):
            states[name], log = tuner.update(states[name], window, validation)
            return log["value"]

        programs[name] = one_window
    seconds, ratio = time_in_turns(programs, rounds)
    return {
        "ms_per_step": {name: 1e3 * s / steps for name, s in seconds.items()},
        "ratio_to_plain": {name: ratio(name, "plain") for name in programs},
        "memory": memory,
    }


def constraints(hparams: Any) -> dict[str, Any]:
    return {name: CONSTRAINTS[name] for name in hparams}


def whole_run(parts: dict[str, Any], windows: int, rounds: int) -> dict[str, Any]:
    """Return the time of a tuned run with a horizon beside a plain one, validation included in both."""
    dynamics, error, hparams = parts["dynamics"], parts["error"], parts["hparams"]
    window, validation = parts["window"], parts["validation"]

    @functools.partial(jax.jit, donate_argnums=0)
    def plain(state, hparams, window):
        step = lambda state, x: (dynamics.step(state, hparams, window.batch(x)), None)  # noqa: E731
        state = lax.scan(step, state, window.xs)[0]
        return state, error(state, hparams, validation)

    def plain_run():
        state, value = copied(dynamics.init(parts["params"], hparams)), None
        for _ in range(windows):
            state, value = plain(state, hparams, window)
        return value

    programs: dict[str, Any] = {"plain": plain_run}
    undone: dict[str, int] = {}  # windows that end early, and so cost less
    for name, tangents in {"exact tangents": None, "a quarter": 0.25}.items():
        tuner = ft.RealTime(
            dynamics,
            error,
            constraints=constraints(hparams),
            horizon=windows * window.steps,
            tangents=tangents,
            donate=True,
        )

        def tuned_run(tuner=tuner, name=name):
            state, logs = tuner.init(parts["params"], hparams), []
            for _ in range(windows):
                state, log = tuner.update(state, window, validation)
                logs.append(log)
            undone[name] = sum(int(log["undone"]) for log in logs)
            return logs[-1]["value"]

        programs[name] = tuned_run
    seconds, ratio = time_in_turns(programs, rounds)
    return {
        "minibatches": windows * window.steps,
        "seconds": seconds,
        "windows undone": undone,
        "ratio_to_plain": {name: ratio(name, "plain") for name in programs},
    }


def agreement(parts: dict[str, Any], windows: int) -> list[dict[str, Any]]:
    """Return how the hypergradient from less agrees with the exact one, window by window."""
    hparams, rows = parts["hparams"], []
    still = optax.sgd(0.0)
    tuners = {
        name: ft.RealTime(parts["dynamics"], parts["error"], still, discount=1.0, tangents=tangents)
        for name, tangents in {"exact": None, **TANGENTS}.items()
    }
    states = {name: tuner.init(parts["params"], hparams) for name, tuner in tuners.items()}
    for k in range(windows):
        grads = {}
        for name, tuner in tuners.items():
            states[name], log = tuner.update(states[name], parts["window"], parts["validation"])
            grads[name] = np.array([float(log["hypergradient"][h]) for h in hparams])
        exact = grads.pop("exact")
        for name, rough in grads.items():
            size = float(np.linalg.norm(rough) / np.linalg.norm(exact))
            cosine = float(exact @ rough / np.linalg.norm(exact) / np.linalg.norm(rough))
            rows.append({"tangents": name, "window": k + 1, "cosine": cosine, "size": size})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small network, to try the script")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--m", type=int, nargs="+", choices=list(HPARAMS), default=list(HPARAMS))
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()

    rate, results = rates(arguments.small), {}
    for m in arguments.m:
        parts = make(arguments.small, m)
        bound = bounds(parts, m, rate)
        timing = speed(parts, arguments.rounds)
        for name, ms in timing["ms_per_step"].items():
            kind = "plain" if name == "plain" else "realtime"
            print(
                f"m = {m}: {name:<40} {ms:8.3f} ms a step, {timing['ratio_to_plain'][name]:5.2f} x "
                f"plain; bound {bound[f'bound_{kind}_ms']:.3f} ms",
                flush=True,
            )
        run = whole_run(parts, 20, max(arguments.rounds // 2, 1))
        print(f"m = {m}: whole run with a horizon", run, flush=True)
        results[f"m={m}"] = {"bounds": bound, **timing, "whole run": run}
        for row in (rows := agreement(parts, 5)):
            print(f"m = {m}: {row}", flush=True)
        results[f"m={m}"]["agreement"] = rows
        if arguments.out:
            record(arguments.out, {"machine": rate, **results})


if __name__ == "__main__":
    main()
