"""Draw a smooth and a rough response with the tangent that the exact hypergradient is.

python -m benchmarks.draw_responses [--out docs/img/responses.svg]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import foretune as ft
from benchmarks.responses import RESPONSES

REACH, POINTS = 0.3, 121


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/img/responses.svg"))
    arguments = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "foretune"  # the same file each time
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for ax, name in zip(axes, ("tanh network", "recurrent"), strict=True):
        problem, hparams, _ = RESPONSES[name]()[:3]
        change = np.linspace(-REACH, REACH, POINTS)
        rates = hparams["lr"] * jnp.exp(change)
        errors = [float(problem.response(hparams | {"lr": rate})[0]) for rate in rates]
        value, grad, _ = ft.Reverse()(problem, hparams)
        slope = float(grad["lr"] * hparams["lr"])
        ax.plot(change, errors, color="#2b6cb0", linewidth=1, label="error")
        low, high = min(errors), max(errors)
        ax.plot(change, float(value) + slope * change, "--", color="#c53030", label="hypergradient")
        ax.set_ylim(low - 0.2 * (high - low), high + 0.2 * (high - low))
        ax.set(title=f"{name}: slope {slope:.2g}", xlabel="change of log(learning rate)")
        ax.legend(frameon=False)
        jax.clear_caches()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
