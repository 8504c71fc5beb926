"""Reverse mode over many steps, with states on a disk.

The T steps are cut into segments of c. On the way forward the state at which each begins is written to
a file while the device computes the next; on the way back it is read ahead, the segment is computed
again on the device with its c states kept there, and the adjoint goes back through it:

    disk: T / c states,    device: c states (and gradients),    time: each step computed once more.

After each segment the adjoint and the sum so far are written too, so that a call which was killed, on
either way, continues where it was. Files carry what they belong to and a checksum of their content.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._problem.arguments import Compiled, Output, Structure
from .._problem.checks import check_count
from .._problem.draws import Drawn, as_problem
from .._problem.problem import Problem, ProblemLike, opened, validated
from .._problem.system import System, make_system
from .base import AbstractEngine, Hypergradient
from .memory import free_bytes, parse_bytes
from .nonfinite import FORWARD, NonFiniteError, explain, is_finite, when_checked
from .products import error_gradients, pull_rows
from .reverse import Reverse
from .schedules import Adjoint, take

SUFFIX = ".foretune"  # of the names of files: the mark by which they are known
AHEAD = 2  # states that wait to be written


class ReverseOnDisk(AbstractEngine):
    """The exact hypergradient by reverse mode, with states on a disk: for very many steps.

    Costs what `Reverse(store="segments")` does in time, with a share of the states on a disk instead
    of the device. A call that was killed continues where it was when it is made again with the same
    numbers: data, parameters, hyperparameters. What cannot be compared is yours to keep as it was: the
    functions. It runs on one process, and outside of `jax.jit` only.

    Args:
        folder: where the files `*.foretune` go, made if need be; another one for each call that may
            run at the same time. They are removed at the end of a call, and at its beginning where
            they belong to another.
        segment: the steps between two states on the disk, whose states are held on the device. By
            default about the root of all steps, fewer where `memory` allows no more.
        memory: bytes of the device for the states of a segment, or a text like "4GiB"; by default
            half of what is free.
        store: what is kept within a segment, as in `Reverse`.
        transpose: as in `Reverse`.

    >>> import foretune as ft, jax.numpy as jnp, optax, tempfile
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=6),
    ...     validation=jnp.array(1.0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = ft.ReverseOnDisk(folder, segment=2)(problem, {"lr": jnp.array(0.25)})
    >>> float(found.value), float(found.grad["lr"])  # f = (1 - 2 lr)^12
    (0.000244140625, -0.01171875)
    """

    folder: str
    segment: int | None
    memory: int | None
    store: str | int
    transpose: str

    def __init__(
        self,
        folder: Any,
        *,
        segment: int | None = None,
        memory: Any = None,
        store: str | int = "gradients",
        transpose: str = "forward",
    ):
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(
                f"ReverseOnDisk({folder!r:.60}): give a folder, as text or `pathlib.Path`; the "
                "problem goes to the engine, `ReverseOnDisk(folder)(problem, hparams)`."
            )
        if segment is not None:
            check_count(segment, f"ReverseOnDisk(segment={segment})")
        self.folder, self.segment = os.fspath(folder), segment
        self.memory = None if memory is None else parse_bytes(memory, "ReverseOnDisk")
        self.store, self.transpose = store, transpose
        _ = self._within.schedule  # its checks

    @property
    def _within(self) -> Reverse:
        return Reverse(self.store, transpose=self.transpose)

    @property
    def other_mode(self) -> str:
        """`Forward`."""
        return FORWARD

    def lower(self, problem: Problem | Drawn, hparams: PyTree) -> jax.stages.Lowered:
        """Return the largest of the programs: the way back through one segment."""
        arrays, structure = validated(problem, hparams)
        s = jax.eval_shape(lambda arrays: _start.function(structure, arrays), arrays)
        length = self._length(opened(structure, arrays)[0].steps, s)
        end = jax.eval_shape(lambda a, s: _end.function(structure, a, s), arrays, s)
        return _back.lower(self._within, structure, length, arrays, s, np.int32(0), end[1])

    def __call__(
        self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None
    ) -> Hypergradient:
        """Return the error at `hparams`, its gradient and the final state."""
        arrays, structure = validated(as_problem(problem, key), hparams)
        if any(isinstance(array, Tracer) for array in arrays):
            raise TypeError(
                "ReverseOnDisk is a loop on the host with files, which cannot be inside `jax.jit`, "
                "`jax.vmap` or another transformation. Call it outside, or take "
                '`foretune.Reverse(store="segments")`.'
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"ReverseOnDisk runs on one process, here are {jax.process_count()}. Take "
                '`foretune.Reverse(store="segments")`.'
            )
        s_0 = _start(structure, arrays)
        steps = opened(structure, arrays)[0].steps
        length = self._length(steps, s_0)
        files = _Files(Path(self.folder), _fingerprint(arrays, steps, length))
        with files:
            s_T = self._forward(files, structure, arrays, s_0, steps, length)
            found = self._backward(files, structure, arrays, s_0, s_T, steps, length)
        files.remove()
        if when_checked() is not False and not is_finite((found.value, found.grad)):
            raise NonFiniteError(explain(*opened(structure, arrays), found, self.other_mode))
        return found

    def _length(self, steps: int, s_0: PyTree) -> int:
        """Return the steps of a segment: equal ones where that is possible, and at most T."""
        if self.segment is not None:
            return min(self.segment, steps)
        bytes_ = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(s_0))
        limit = self.memory or free_bytes() / 2
        most = max(1, int(min(limit / (2 * max(bytes_, 1)), math.isqrt(steps - 1) + 1)))
        return next((c for c in range(most, most // 2, -1) if steps % c == 0), most)

    def _forward(
        self,
        files: "_Files",
        structure: Structure,
        arrays: list[Array],
        s_0: PyTree,
        steps: int,
        length: int,
    ) -> PyTree:
        """Return s_T; the state at which each segment begins is on the disk then."""
        if files.has("end"):
            return files.read("end", s_0)
        firsts = range(0, steps, length)
        done = next((t for t in reversed(firsts) if files.has(_name(t))), 0)
        s = files.read(_name(done), s_0) if done else s_0
        for first in range(done, steps, length):
            files.write(_name(first), s)
            s = _advance(
                structure, arrays, s, np.int32(first), np.int32(min(length, steps - first))
            )
        files.write("end", s)
        return s

    def _backward(
        self,
        files: "_Files",
        structure: Structure,
        arrays: list[Array],
        s_0: PyTree,
        s_T: PyTree,
        steps: int,
        length: int,
    ) -> Hypergradient:
        """Return the hypergradient; after each segment the adjoint before it is on the disk."""
        errors, adjoint = _end(structure, arrays, s_T)
        firsts = list(range(0, steps, length))
        if files.has("adjoint"):
            adjoint, left = files.read("adjoint", (adjoint, np.zeros((), np.int32)))
            firsts = firsts[: int(left)]
        files.flush()
        ahead = files.ahead(_name(firsts[-1]), s_0) if firsts else None
        for k in reversed(range(len(firsts))):
            s = files.placed(ahead, s_0)
            ahead = files.ahead(_name(firsts[k - 1]), s_0) if k else None
            count = min(length, steps - firsts[k])
            adjoint = _back(self._within, structure, count, arrays, s, np.int32(firsts[k]), adjoint)
            files.write("adjoint", (adjoint, np.array(k, np.int32)))
        value, grad, state = _finish(structure, arrays, errors, adjoint, s_T)
        return Hypergradient(value, grad, state.tree())


class _Programs(Compiled):
    """A compiled function, and the function itself."""

    def __init__(self, function: Callable[..., Any], static: int):
        super().__init__(function, static)
        self.function = function


def _system(structure: Structure, arrays: list[Array]) -> tuple[System, PyTree]:
    problem, hparams = opened(structure, arrays)
    return make_system(problem, hparams), hparams


def _initial(structure, arrays):
    system, hparams = _system(structure, arrays)
    return system.initial(hparams)


def _advanced(structure, arrays, s, first, count):
    system, hparams = _system(structure, arrays)
    # the length is not known to the compiler: a shorter segment is the same program
    step = lambda t, s: system.step(s, hparams, take(system.xs, t))  # noqa: E731
    return lax.fori_loop(first, first + count, step, s)


def _at_end(structure, arrays, s_T):
    system, hparams = _system(structure, arrays)
    errors, alpha_T, g = error_gradients(system, s_T, hparams)
    return errors, Adjoint(alpha_T, g)


def _through(engine, structure, count, arrays, s, first, adjoint):
    """Return the adjoint before a segment."""
    system, hparams = _system(structure, arrays)
    cut = lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count)  # noqa: E731
    part = system._replace(xs=jax.tree.map(cut, system.xs), steps=count)
    part, schedule = engine.transposing(part), engine.schedule
    _, memory = schedule.forward(part, hparams, s)
    return schedule.backward(part, hparams, memory, adjoint)


def _finished(structure, arrays, errors, adjoint, s_T):
    system, hparams = _system(structure, arrays)
    _, pull_initial = eqx.filter_vjp(system.initial, hparams)
    (g_initial,) = pull_rows(pull_initial, adjoint.alpha)
    rows = jax.tree.map(lambda a, b: a + b, adjoint.g, g_initial)
    return system.value(errors), system.gradient(rows), Output(system.restore(s_T))


_start = _Programs(_initial, 1)
_advance = Compiled(_advanced, 1)
_end = _Programs(_at_end, 1)
_back = Compiled(_through, 3)
_finish = Compiled(_finished, 1)


class _Files:
    """The files of one call: pytrees of arrays by name, written and read by a thread of their own."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint
        self._waiting: list[Future[None]] = []

    def __enter__(self) -> "_Files":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove(lambda name: not self.has(name))  # of a call that is not made again
        self._writer, self._reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        if kind is None:
            self.flush()  # and raise what went wrong in it

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def has(self, name: str) -> bool:
        """Return whether the file is there, and belongs to this call."""
        try:
            with self.path(name).open("rb") as file:
                return json.loads(file.readline()).get("fingerprint") == self.fingerprint
        except (OSError, ValueError, AttributeError):
            return False

    def write(self, name: str, tree: PyTree) -> None:
        """Write a pytree whole or not at all, later; wait where several wait already."""
        self._waiting.append(self._writer.submit(self._write, name, tree))
        while len(self._waiting) > AHEAD:
            self._waiting.pop(0).result()

    def flush(self) -> None:
        """Wait until all is written."""
        while self._waiting:
            self._waiting.pop(0).result()

    def _write(self, name: str, tree: PyTree) -> None:
        parts = [_bytes(leaf) for leaf in jax.tree.leaves(tree)]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        header = {"fingerprint": self.fingerprint, "name": name, "crc32": crc}
        path = self.path(name)
        new = path.with_name(f".{path.name}.new")
        with new.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            for part in parts:
                file.write(part)
        os.replace(new, path)

    def ahead(self, name: str, like: PyTree) -> Future[list[np.ndarray]]:
        """Begin to read the file of a pytree of the same shapes."""
        return self._reader.submit(self._read, name, like)

    def placed(self, ahead: Any, like: PyTree) -> PyTree:
        """Return what was read, where the arrays of `like` are."""
        leaves, treedef = jax.tree.flatten(like)
        return jax.tree.unflatten(treedef, map(_placed, ahead.result(), leaves))

    def read(self, name: str, like: PyTree) -> PyTree:
        """Return the pytree of a file."""
        return self.placed(self.ahead(name, like), like)

    def _read(self, name: str, like: PyTree) -> list[np.ndarray]:
        path = self.path(name)
        shapes = [jax.eval_shape(_raw, leaf) for leaf in jax.tree.leaves(like)]
        try:
            with path.open("rb") as file:
                header = json.loads(file.readline())
                content = file.read()
        except (FileNotFoundError, ValueError) as error:
            raise OSError(_damaged(path, "it is missing or has no header")) from error
        size = sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)
        if len(content) != size:
            raise OSError(_damaged(path, f"it holds {len(content)} bytes in place of {size}"))
        if zlib.crc32(content) != header.get("crc32"):
            raise OSError(_damaged(path, "its checksum is wrong"))
        parts, at = [], 0
        for shape in shapes:
            count = math.prod(shape.shape)
            parts.append(np.frombuffer(content, shape.dtype, count, at).reshape(shape.shape))
            at += count * shape.dtype.itemsize
        return parts

    def remove(self) -> None:
        """Remove the files of this call."""
        self._remove(self.has)

    def _remove(self, which: Callable[[str], bool]) -> None:
        for path in self.folder.glob(f"*{SUFFIX}"):
            if which(path.name.removesuffix(SUFFIX)):
                path.unlink()


def _name(first: int) -> str:
    return f"state_{first:09d}"


def _damaged(path: Path, why: str) -> str:
    name = path.name.removesuffix(SUFFIX)
    what = f"the state before step {int(name[6:]) + 1}" if name[:6] == "state_" else name
    return (
        f"{path}, {what} of ReverseOnDisk, is damaged: {why}. Remove the files *{SUFFIX} of that "
        "folder and call the engine again; check the disk where it happens again."
    )


def _raw(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _bytes(leaf: Any) -> memoryview:
    return np.ascontiguousarray(_raw(leaf)).reshape(-1).view(np.uint8).data


def _placed(part: np.ndarray, like: Any) -> Any:
    if not isinstance(like, jax.Array):
        return part
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(part), impl=jax.random.key_impl(like))
    return jax.device_put(part, like.sharding)


def _fingerprint(arrays: list[Array], steps: int, length: int) -> str:
    """Return what the files belong to: all numbers of the problem, and the steps of a segment."""
    digest = hashlib.blake2b(f"{steps} {length}".encode(), digest_size=16)
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()
