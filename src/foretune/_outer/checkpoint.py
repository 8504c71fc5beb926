"""Checkpoints of a run, on Orbax: save as it goes, go on from the last complete one.

A checkpoint holds everything that decides how the run goes on, its history, a description of what it
belongs to, and a digest of its arrays. One that cannot be read, or whose digest is wrong, is skipped
with a warning for the one before it; one that belongs to another run is refused.
"""

import hashlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._problem.checks import check_count, describe, named_leaves
from .callbacks import Callback, _writable_folder
from .run import numbers


class Checkpoint(Callback):
    """Saves the run every few steps, and resumes it when the directory holds one.

    Args:
        directory: where the checkpoints are; made if need be.
        every: the steps between two of them. One is saved at the end, too.
        keep: how many are kept.

    A resumed run repeats the evaluation it was in, and goes on as if it had never stopped: its
    results are the same to the bit on the same machine. The directory of a run with other shapes,
    another start, other constraints or another kind of optimizer is refused with a `ValueError`; the
    optimizer's constants, the functions and the data are yours to keep. Arrays are saved whole, so a
    run may go on with another number of devices or processes (then to rounding, not to the bit).

    >>> import foretune as ft
    >>> checkpoint = ft.Checkpoint("runs/clean", every=10)
    """

    resumes = True

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 2):
        check_count(every, f"Checkpoint(every={every})")
        check_count(keep, f"Checkpoint(keep={keep})")
        self.directory, self.every, self.keep = Path(directory).absolute(), every, keep
        self._manager: Any = None
        self._saved: int | None = None

    def start(self, run: Any) -> None:
        """Resume the run, if the directory holds one."""
        import orbax.checkpoint as ocp

        _writable_folder(self.directory)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                arrays, meta = self._read(step, run)
            except _AnotherRun:
                raise
            except Exception as error:
                warnings.warn(
                    f"the checkpoint of step {step} in {self.directory} cannot be used "
                    f"({type(error).__name__}: {error!s:.200}) and is passed over.",
                    stacklevel=2,
                )
                shutil.rmtree(self.directory / str(step), ignore_errors=True)
                self._manager.reload()
                continue
            run.step, run.history = step, meta["history"]
            run.carry = _with_arrays(run.carry, arrays)
            self._saved = step
            return
        if steps:
            raise RuntimeError(
                f"none of the checkpoints in {self.directory} can be read. Remove the folder to "
                "start anew."
            )

    def step(self, run: Any) -> None:
        """Save, every few steps."""
        if run.step % self.every == 0:
            self._save(run)

    def end(self, run: Any) -> None:
        """Save the last state."""
        if self._manager is not None:
            self._save(run)
            self._manager.close()

    def _save(self, run: Any) -> None:
        import orbax.checkpoint as ocp

        # A step that could not be evaluated is not saved: the run can go on before it, otherwise.
        if run.step == self._saved or not run.whole:
            return
        arrays = numbers(run.carry)
        meta = {
            # The record of this very step is made again when the run resumes.
            "history": run.history[: run.step],
            "belongs_to": _description(run),
            "digest": _digest(arrays),
        }
        parts = ocp.args.Composite(
            carry=ocp.args.StandardSave({str(i): a for i, a in enumerate(arrays)}),
            meta=ocp.args.JsonSave(meta),
        )
        self._manager.save(run.step, args=parts, force=True)
        self._saved = run.step

    def _read(self, step: int, run: Any) -> tuple[list[Any], dict[str, Any]]:
        import orbax.checkpoint as ocp

        only_meta = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = self._manager.restore(step, args=only_meta)["meta"]
        if meta["belongs_to"] != _description(run):
            raise _AnotherRun(self.directory, meta["belongs_to"], _description(run))
        like = {str(i): a for i, a in enumerate(numbers(run.carry))}
        both = ocp.args.Composite(carry=ocp.args.StandardRestore(like))
        restored = self._manager.restore(step, args=both)["carry"]
        arrays = [np.asarray(restored[str(i)]) for i in range(len(like))]
        if _digest(arrays) != meta["digest"]:
            raise ValueError("its arrays are not those that were saved")
        return arrays, meta


class _AnotherRun(ValueError):
    """The folder belongs to another run."""

    def __init__(self, directory: Path, theirs: dict[str, str], ours: dict[str, str]):
        names = sorted(set(theirs) | set(ours))
        lines = [
            "  the starting values of the hyperparameters or parameters"
            if name == "start"
            else f"  {name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
            for name in names
            if theirs.get(name) != ours.get(name)
        ]
        super().__init__(
            f"{directory} holds another run, with another problem or optimizer. What differs:\n"
            + "\n".join(lines[:8])
            + "\nGive another directory, or remove this one."
        )


def _with_arrays(carry: Any, arrays: list[Any]) -> Any:
    """Return the carry with other arrays in the places of its own, on the same devices."""
    remaining = iter(arrays)

    def replaced(leaf):
        if not eqx.is_array(leaf):
            return leaf
        array = jnp.asarray(next(remaining))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        spread = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
        return jax.device_put(array, leaf.sharding) if spread else array

    return jax.tree.map(replaced, carry)


def _digest(arrays: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _description(run: Any) -> dict[str, str]:
    leaves = {path: describe(leaf) for path, leaf in named_leaves(run.carry, "").items()}
    return leaves | run.settings
