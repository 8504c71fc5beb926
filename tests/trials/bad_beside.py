# ruff: noqa: E501
# fmt: off
"""Callbacks, checkpoints, stopping rules and Optuna's trials, given the wrong things."""

import json

import jax.numpy as jnp
import numpy as np

import foretune as ft

from .given import NAN, file, folder, hparams, minimized, problem


def resumed(damage, **changes):
    """Run with a checkpoint, damage its folder, and run again."""
    where = folder()
    minimized(callbacks=[ft.Checkpoint(where)])
    damage(where)
    return minimized(callbacks=[ft.Checkpoint(where)], **({"steps": 3} | changes))


def cut(where, names="*", keep=0):
    """Cut all files of all checkpoints."""
    for path in where.glob(f"foretune_*/**/{names}"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:keep])


def cut_newest(where):
    for path in (where / "foretune_2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def history_resumed(content):
    where = folder()
    path = where / "metrics.jsonl"
    minimized(callbacks=[ft.Checkpoint(where / "c"), ft.History(path)])
    path.write_bytes(content)
    return minimized(steps=3, callbacks=[ft.Checkpoint(where / "c"), ft.History(path)])


class Fails(ft.Callback):
    def step(self, run):
        raise ValueError("mine")


def trial(**options):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(**options).ask()


def fo():
    import foretune.optuna

    return foretune.optuna


LINE = json.dumps({"step": 0, "value": 1.0}) + "\n"
ROWS = [
    ("a checkpoint without a name", lambda: ft.Checkpoint(""), ValueError, "Checkpoint('')", "no name"),
    ("a checkpoint every 0", lambda: ft.Checkpoint("a", every=0), ValueError, "every=0"),
    ("a checkpoint every 1.5", lambda: ft.Checkpoint("a", every=1.5), ValueError, "every=1.5"),
    ("no checkpoint to keep", lambda: ft.Checkpoint("a", keep=0), ValueError, "keep=0"),
    ("a checkpoint in a file", lambda: minimized(callbacks=[ft.Checkpoint(file("a", "x"))]), OSError, "cannot write to the folder"),
    ("a checkpoint under a file", lambda: minimized(callbacks=[ft.Checkpoint(file("a", "x") / "b")]), OSError, "cannot write to the folder"),
    ("a checkpoint in /proc", lambda: minimized(callbacks=[ft.Checkpoint("/proc/none")]), OSError, "cannot write to the folder"),
    ("all checkpoints cut", lambda: resumed(cut), ValueError, "none of the checkpoints", "can be read"),
    ("the newest checkpoint cut", lambda: resumed(cut_newest), UserWarning, "step 2", "is skipped"),
    ("the metadata of all cut", lambda: resumed(lambda w: cut(w, "metadata")), ValueError, "none of the checkpoints"),
    ("a checkpoint of another start", lambda: resumed(lambda w: None, hparams=hparams(lr=0.2)), ValueError, "initial hyperparameters"),
    ("a checkpoint of other constraints", lambda: resumed(lambda w: None, constraints={"lr": ft.NonNegative()}), ValueError, "constraints"),
    ("a checkpoint of another problem", lambda: resumed(lambda w: None, given=problem(steps=4)), ValueError, "inner steps"),
    ("a history of an earlier run", lambda: minimized(callbacks=[ft.History(file("m.jsonl", LINE * 2))]), FileExistsError, "holds 2 records of an earlier run"),
    ("a history under a file", lambda: minimized(callbacks=[ft.History(file("a", "x") / "m.jsonl")]), OSError, "cannot write to the folder"),
    ("a resumed history of another run", lambda: history_resumed(b'{"step": 0, "value": 7.0}\n'), FileExistsError, "another run"),
    ("a resumed history that is no JSON", lambda: history_resumed(b"not json\n"), FileExistsError, "another run"),
    ("a board in a file", lambda: minimized(callbacks=[ft.TensorBoard(file("a", "x"))]), OSError, "cannot write to the folder"),
    ("a callback that fails", lambda: minimized(callbacks=[Fails()]), ValueError, "mine"),
    ("a patience of 0", lambda: ft.NoImprovement(0), ValueError, "patience=0"),
    ("a patience of half", lambda: ft.NoImprovement(0.5), ValueError, "patience=0.5"),
    ("a patience of text", lambda: ft.NoImprovement("3"), ValueError, "patience='3'"),
    ("seconds of NaN", lambda: ft.TimeLimit(NAN), ValueError, "seconds=nan"),
    ("negative seconds", lambda: ft.TimeLimit(-1), ValueError, "seconds=-1"),
    ("Optuna: a default of integers", lambda: fo().warm_start(trial(), {"lr": 1}), TypeError, "hparams['lr']"),
    ("Optuna: a default of None", lambda: fo().warm_start(trial(), {"lr": None}), ValueError, "hparams['lr']"),
    ("Optuna: no default", lambda: fo().warm_start(trial(), {}), ValueError, "no hyperparameters"),
    ("Optuna: two directions", lambda: fo().warm_start(trial(directions=["minimize"] * 2), {"lr": 0.1}), ValueError, "2 objectives"),
    ("Optuna: pruning every 0", lambda: fo().Pruning(trial(), every=0), ValueError, "every=0"),
    ("Optuna: pruning a study that maximizes", lambda: minimized(callbacks=[fo().Pruning(trial(direction="maximize"))]), ValueError, "the study maximizes"),
    ("Optuna: pruning by a metric that is none", lambda: minimized(callbacks=[fo().Pruning(trial(), metric="accuracy")]), UserWarning, "had nothing to report"),
    ("Optuna: pruning by several errors", lambda: ft.minimize(problem(objective=dict.fromkeys(("lr", "decay"), _squared)), hparams(), steps=1, callbacks=[fo().Pruning(trial())]), ValueError, "several errors"),
    ("Optuna: to keep without a value", lambda: fo().keep(trial(), {"lr": jnp.array(0.1)}), ValueError, "needs `value=`"),
    ("Optuna: to keep a value of text", lambda: fo().keep(trial(), {"lr": 0.1}, value="good"), ValueError, "keep's value"),
    ("Optuna: to keep two values", lambda: fo().keep(trial(), {"lr": 0.1}, value=np.zeros(2)), ValueError, "not one number"),
    ("Optuna: to keep integers", lambda: fo().keep(trial(), {"lr": 1}, value=0.5), TypeError, "hparams['lr']"),
    ("Optuna: a study that maximizes an error", lambda: fo().keep(trial(direction="maximize"), minimized()), ValueError, "the study maximizes"),
    ("Optuna: no trial to prune", lambda: fo().prune_nonfinite(None).__enter__(), TypeError, "prune_nonfinite takes the trial"),
]


def _squared(state, hparams, batch):
    return jnp.mean((batch[0] @ state.params["w"] - batch[1]) ** 2)
