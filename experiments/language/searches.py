"""Searches over mixture, peak rate and constants by Optuna's samplers, `BESIDE` trials at a time."""

import json
import math
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.progress import track

from foretune._files.files import write_whole

from .methods import TIMES, Task, as_lists, best_of, train
from .model import BESIDE, Language

WORST = math.log(256)
"""The loss of a training that diverged: that of knowing nothing."""
RANGES = {"rate": (5e-4, 3e-2), "decay": (1e-3, 1.0), "1-b1": (0.01, 0.5), "1-b2": (1e-3, 0.3)}
"""All on a log scale. A mixture is -log of uniform numbers, over its sum: uniform on the simplex."""
FINALISTS = 8
"""The best trials, among which is chosen by several trainings of each."""


def search(task: Task, name: str, seed: int, start: dict, trials: int) -> dict[str, Any]:
    """Train with proposals, the start first, and choose among the best; continues after a trial."""
    optuna = import_optuna()
    language = task.language
    path = task.folder.path / "trials" / f"{name}-{seed}.jsonl".replace(" ", "-")
    path.parent.mkdir(exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    real = optuna.distributions.FloatDistribution
    space = {f"source {k}": real(1e-3, 1 - 1e-3) for k in range(len(language.text.names))}
    space |= {key: real(*ends, log=True) for key, ends in RANGES.items()}
    samplers = {"random search": optuna.samplers.RandomSampler, "TPE": optuna.samplers.TPESampler}
    options = {"constant_liar": True} if name == "TPE" else {}  # several are asked for at a time
    study = optuna.create_study(sampler=samplers[name](seed=1000 * seed + len(done), **options))
    if not done:
        study.enqueue_trial(encoded(start))
    for line in done:
        trial = optuna.trial.create_trial(
            params=line["point"], distributions=space, value=line["value"]
        )
        study.add_trial(trial)
    trials = BESIDE * max(1, math.ceil((trials - TIMES * FINALISTS) / BESIDE))
    left = range(len(done), trials, BESIDE)
    for _ in track(left, f"{name}, seed {seed}", disable=not sys.stdout.isatty(), transient=True):
        asked = [study.ask(space) for _ in range(BESIDE)]
        values = train(language, [decoded(language, trial.params) for trial in asked], seed)
        for trial, value in zip(asked, values, strict=True):
            study.tell(trial, min(value, WORST))
            done.append({"point": trial.params, "value": min(value, WORST)})
        write_whole(path, "".join(json.dumps(line) + "\n" for line in done))
    last = sorted(done[:trials], key=lambda line: line["value"])[:FINALISTS]
    points = [decoded(language, line["point"]) for line in last]
    best, value, choosing = best_of(language, points, seed)
    return {
        "validation": value,
        "hparams": as_lists(points[best]),
        "trainings": trials + choosing,
        "values": [line["value"] for line in done],
    }


def encoded(start: dict[str, Any]) -> dict[str, float]:
    """Return the start as a point of the space."""
    h = start["hparams"]
    share = np.asarray(h["sources"]) / np.mean(h["sources"])
    found = {f"source {k}": float(np.exp(-w)) for k, w in enumerate(share)}
    return found | {
        "rate": start["rate"],
        "decay": h["decay"],
        "1-b1": 1 - h["b1"],
        "1-b2": 1 - h["b2"],
    }


def decoded(language: Language, point: dict[str, float]) -> dict[str, Any]:
    """Return a point as hyperparameters."""
    weight = -np.log([point[f"source {k}"] for k in range(len(language.text.names))])
    found = language.start(point["rate"], weight / weight.sum())
    constants = {"decay": point["decay"], "b1": 1 - point["1-b1"], "b2": 1 - point["1-b2"]}
    return found | {name: jnp.asarray(value, jnp.float32) for name, value in constants.items()}


def import_optuna() -> Any:
    """Return Optuna, or say how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("the searches need Optuna: pip install 'foretune[optuna]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
