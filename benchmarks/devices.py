"""What devices exchange during a hypergradient, from the collectives of the compiled programs.

    python -m benchmarks.devices [--steps 100] [--devices 2 8] [--out FILE.json]

A network 1353-2000x4-483 (d = 15.7 million weights), batches of 512 split over the devices, SGD with
momentum and a learning rate in m = 8 blocks of steps; the hypergradient of the 8 rates. The programs
are compiled for simulated devices and not run: the figures are bytes, the same on any machine with
these versions, and no times.

"A step" counts the arrays that take part in exchanges, for each step of the training (all passes over
it), "outside" those before and after; "sent" is what each device sends for one hypergradient, with
rings (`collectives.py` has the factors). The last columns are a projection, not a measurement: the
milliseconds that exchanges take in each step on n devices,

    2 (n - 1) / n * bytes / bandwidth + 2 ceil(log2 n) * latency * (collectives in a step),

for links of 50 GB/s a device (a 400 Gb/s network) and 5 microseconds a hop, not overlapped with
computation.
"""

import argparse
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.collectives import collectives
from benchmarks.harness import record

SIZES, RATES, BATCH = (1353, 2000, 2000, 2000, 2000, 483), 8, 512
BANDWIDTH, LATENCY, PROJECTED = 50e9, 5e-6, (8, 64, 256, 1024)


def loss(params: Any, hparams: Any, batch: Any) -> jax.Array:
    z, labels = batch
    for layer in params[:-1]:
        z = jax.nn.relu(z @ layer["w"] + layer["b"])
    logits = z @ params[-1]["w"] + params[-1]["b"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def make(steps: int) -> tuple[ft.Problem, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], 1024)
    params = [
        {"w": jnp.asarray(rng.normal(size=(a, b)) * (2 / a) ** 0.5, "float32"), "b": jnp.zeros(b)}
        for a, b in itertools.pairwise(SIZES)
    ]
    problem = ft.Problem(
        ft.Training(
            loss, lambda h: optax.sgd(lambda t: h["lr"][jnp.asarray(t) * RATES // steps], 0.9)
        ),
        lambda state, h, batch: loss(state.params, h, batch),
        params,
        ft.Minibatches((x, y), rng.integers(0, 1024, (steps, BATCH))),
        (x, y),
    )
    return problem, {"lr": jnp.full(RATES, 0.05)}


def programs(problem: ft.Problem, hparams: Any, devices: int) -> dict[str, jax.stages.Lowered]:
    data, tangents = ft.mesh(data=devices), ft.mesh(tangents=devices)
    split, whole = ft.shard(problem, data), ft.shard(problem, tangents)
    arrays, static = eqx.partition(split, eqx.is_array)
    train = jax.jit(lambda arrays, h: eqx.combine(arrays, static).response(h)[0])
    stores = ("states", "everything", "segments")
    return {
        "plain training, split data": train.lower(arrays, hparams),
        **{
            f"Reverse({store}), split data": ft.Reverse(store=store).lower(split, hparams)
            for store in stores
        },
        "Forward, split data": ft.Forward().lower(split, hparams),
        "Forward, split tangents": ft.Forward(mesh=tangents).lower(whole, hparams),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))

    problem, hparams = make(arguments.steps)
    d = sum(leaf.size for leaf in jax.tree.leaves(problem.init))
    print(f"d = {d}, m = {RATES}, T = {arguments.steps}, float32")
    ahead = "".join(f"{f'n={n}':>8}" for n in PROJECTED)
    print(f"{'':36}{'a step':>13}{'in d':>7}{'outside':>12}{'sent by each':>17}{ahead}")
    results: dict[str, Any] = {"weights": d, "hyperparameters": RATES, "steps": arguments.steps}
    results["projection"] = {"bytes a second": BANDWIDTH, "seconds a hop": LATENCY}
    for devices in arguments.devices:
        for name, lowered in programs(problem, hparams, devices).items():
            found = collectives(lowered.compile().as_text() or "")
            inside = sum(c.bytes * c.times for c in found if c.in_loop) / arguments.steps
            outside = sum(c.bytes * c.times for c in found if not c.in_loop)
            sent = sum(c.sent for c in found)
            times = sum(c.times for c in found if c.in_loop) / arguments.steps
            projected = {n: round(1e3 * projection(inside, times, n), 3) for n in PROJECTED}
            name = f"{name}, {devices}"
            results[f"{name} devices"] = {
                "bytes a step": inside,
                "bytes outside the loops": outside,
                "bytes sent by each device": round(sent),
                "projected milliseconds a step, by devices": projected,
                "collectives": [c._asdict() for c in found],
            }
            ahead = "".join(f"{projected[n]:8.2f}" for n in PROJECTED)
            print(
                f"{name:36}{inside:13,.0f}{inside / 4 / d:7.2f}{outside:12,.0f}{sent:17,.0f}{ahead}"
            )
    if arguments.out:
        record(arguments.out, results)


def projection(inside: float, collectives: float, n: int) -> float:
    """Return the seconds that the exchanges of a step take on n devices; no measurement."""
    hops = 2 * math.ceil(math.log2(n)) * LATENCY * collectives
    return 2 * (n - 1) / n * inside / BANDWIDTH + hops


if __name__ == "__main__":
    main()
