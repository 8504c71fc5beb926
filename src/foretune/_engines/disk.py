"""Reverse mode over many steps, with states on a disk.

The T steps are cut into segments of c. On the way forward the state at which each begins is written to
a file while the device computes the next; on the way back it is read ahead, the segment is computed
again with its c states (and gradients) on the device, and the adjoint goes back through it.

After each segment the adjoint and the sum so far are written too, so that a call which was killed, on
either way, continues where it was. Files carry what they belong to and a checksum of their content.
"""

import contextlib
import functools
import itertools
import math
import operator
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._files.arrays import Damaged, load_arrays, load_header, save_arrays
from .._files.digests import as_numbers, digest, key_data, with_numbers
from .._files.files import as_path, locked, make_folder, remove_unfinished, set_aside
from .._problem.arguments import Compiled, Output, Structure
from .._problem.checks import check_count
from .._problem.draws import Drawn, as_problem
from .._problem.problem import Problem, ProblemLike, opened, validated
from .._problem.system import System, make_system
from .._problem.warn import warn
from .base import AbstractEngine, Hypergradient
from .memory import free_bytes, tree_bytes
from .nonfinite import FORWARD, NonFiniteError, explain, is_finite, when_checked
from .products import error_gradients, pull_rows
from .schedules import Adjoint, Loop, pulled

SUFFIX = ".foretune"  # of the names of files: the mark by which they are known
AHEAD = 2  # states that wait to be written


class ReverseOnDisk(AbstractEngine):
    """The exact hypergradient by reverse mode, with states on a disk: for very many steps.

    Costs what `Reverse(store="segments")` does in time. A call that was killed continues where it was
    when it is made again with the same numbers and programs. For one process, outside of `jax.jit`.

    Args:
        folder: where the files `*.foretune` go, made if need be; one call at a time may have it. They
            are removed at the end of a call, and at its beginning where they belong to another one.
        segment: the steps between two states on the disk. By default about the root of all steps,
            fewer where half of the free memory holds no more states.

    >>> import foretune as ft, jax.numpy as jnp, optax, tempfile
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=6))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = ft.ReverseOnDisk(folder, segment=2)(problem, {"lr": jnp.array(0.25)})
    >>> float(found.value), float(found.grad["lr"])  # f = (1 - 2 lr)^12
    (0.000244140625, -0.01171875)
    """

    other_mode: ClassVar[str | None] = FORWARD
    folder: str
    segment: int | None

    def __init__(self, folder: Any, *, segment: int | None = None):
        if segment is not None:
            check_count(segment, f"ReverseOnDisk(segment={segment})")
        self.folder, self.segment = str(as_path(folder, "ReverseOnDisk")), segment

    def lower(self, problem: Problem | Drawn, hparams: PyTree) -> jax.stages.Lowered:
        """Return the largest of the programs: the way back through one segment."""
        arrays, structure = validated(problem, hparams)
        s = jax.eval_shape(functools.partial(_initial, structure), arrays)
        length = self._length(opened(structure, arrays)[0].steps, s)
        _, adjoint = jax.eval_shape(functools.partial(_at_end, structure), arrays, s)
        return _back.lower(structure, length, arrays, s, np.int32(0), adjoint)

    def __call__(
        self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None
    ) -> Hypergradient:
        arrays, structure = validated(as_problem(problem, key), hparams)
        if any(isinstance(array, Tracer) for array in arrays) or jax.process_count() > 1:
            raise TypeError(
                "ReverseOnDisk is a loop on the host: it cannot be inside `jax.jit` and the like, nor "
                'on several processes. Take `foretune.Reverse(store="segments")`.'
            )
        s_0 = _start(structure, arrays)
        steps = opened(structure, arrays)[0].steps
        length = self._length(steps, s_0)
        programs = _programs(structure, arrays, s_0)
        fingerprint = digest(f"{steps} {length} {digest(arrays)} {programs}")
        with _Files(Path(self.folder), fingerprint) as files:
            program = structure, arrays
            s_T = _forward(files, program, s_0, steps, length)
            found = _backward(files, program, s_0, s_T, steps, length)
            files.remove()
        if when_checked() is not False and not is_finite((found.value, found.grad)):
            raise NonFiniteError(explain(*opened(structure, arrays), found, self.other_mode))
        return found

    def _length(self, steps: int, s_0: PyTree) -> int:
        """Return the steps of a segment: equal ones where that is possible, and at most T."""
        if self.segment is not None:
            return min(self.segment, steps)
        fit = free_bytes() / (4 * max(tree_bytes(s_0), 1))
        most = max(1, int(min(fit, math.isqrt(steps - 1) + 1)))
        return next((c for c in range(most, most // 2, -1) if steps % c == 0), most)


def _forward(files: "_Files", program: tuple, s_0: PyTree, steps: int, length: int) -> PyTree:
    """Return s_T; the state at which each segment begins is on the disk then."""
    firsts = range(0, steps, length)
    there = itertools.takewhile(lambda t: files.has(_name(t)), firsts)  # one may not be written
    done = max(there, default=0)
    if done == firsts[-1] and files.has("end"):
        return files.read("end", s_0)
    s = files.read(_name(done), s_0) if done else s_0
    for first in range(done, steps, length):
        files.write(_name(first), s)
        s = _advance(*program, s, np.int32(first), np.int32(min(length, steps - first)))
    files.write("end", s)
    return s


def _backward(
    files: "_Files", program: tuple, s_0: PyTree, s_T: PyTree, steps: int, length: int
) -> Hypergradient:
    """Return the hypergradient; after each segment the adjoint before it is on the disk."""
    structure, arrays = program
    errors, adjoint = _end(*program, s_T)
    firsts = list(range(0, steps, length))
    if files.has("adjoint"):
        adjoint, left = files.read("adjoint", (adjoint, np.zeros((), np.int32)))
        firsts = firsts[: int(left)]
    files.flush()
    ahead = None
    for k in reversed(range(len(firsts))):
        s = with_numbers(s_0, (ahead or files.ahead(_name(firsts[k]), s_0)).result())
        ahead = files.ahead(_name(firsts[k - 1]), s_0) if k else None
        count, first = min(length, steps - firsts[k]), np.int32(firsts[k])
        adjoint = _back(structure, count, arrays, s, first, adjoint)
        files.write("adjoint", (adjoint, np.array(k, np.int32)))
    value, grad, state = _finish(*program, errors, adjoint, s_T)
    return Hypergradient(value, grad, state.tree())


def _system(structure: Structure, arrays: list[Array]) -> tuple[System, PyTree]:
    problem, hparams = opened(structure, arrays)
    return make_system(problem, hparams), hparams


def _initial(structure, arrays):
    system, hparams = _system(structure, arrays)
    return system.initial(hparams)


def _advanced(structure, arrays, s, first, count):
    system, hparams = _system(structure, arrays)
    # the length is not known to the compiler: a shorter segment is the same program
    loop = Loop(system, hparams)
    return lax.fori_loop(first, first + count, lambda t, s: loop.step(s, t), s)


def _at_end(structure, arrays, s_T):
    system, hparams = _system(structure, arrays)
    errors, alpha_T, g = error_gradients(system, s_T, hparams)
    return errors, Adjoint(alpha_T, g)


def _through(structure, count, arrays, s, first, adjoint):
    system, hparams = _system(structure, arrays)
    cut = lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count)  # noqa: E731
    part = system._replace(xs=jax.tree.map(cut, system.xs), steps=count)
    return pulled(Loop(part, hparams).with_gradients(s, 0, count)[1], adjoint)


def _finished(structure, arrays, errors, adjoint, s_T):
    system, hparams = _system(structure, arrays)
    _, pull_initial = eqx.filter_vjp(system.initial, hparams)
    (g_initial,) = pull_rows(pull_initial, adjoint.alpha)
    rows = jax.tree.map(operator.add, adjoint.g, g_initial)
    return system.value(errors), system.gradient(rows), Output(system.restore(s_T))


_start, _advance, _end = Compiled(_initial, 1), Compiled(_advanced, 1), Compiled(_at_end, 1)
_back, _finish = Compiled(_through, 2), Compiled(_finished, 1)


def _programs(structure: Structure, arrays: list[Array], s_0: PyTree) -> str:
    """Return a digest of what is computed, which is all that can be compared of functions."""
    t = np.int32(0)
    lowered = (
        _start.lower(structure, arrays),
        _end.lower(structure, arrays, s_0),
        _advance.lower(structure, arrays, s_0, t, t),
    )
    text = "".join(program.as_text() for program in lowered)
    return digest(re.sub(r"\b\d{9,}\b", "", text))  # without addresses in memory


class _Files:
    """The files of one call: pytrees of arrays by name, written and read by a thread of their own."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint
        self._waiting: list[Future[None]] = []

    def __enter__(self) -> "_Files":
        make_folder(self.folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            remove_unfinished(self.folder, _is_ours)
            self._remove_others()
            self._writer = stack.enter_context(ThreadPoolExecutor(1))
            self._reader = stack.enter_context(ThreadPoolExecutor(1))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def has(self, name: str) -> bool:
        """Return whether the file is there, and belongs to this call."""
        with contextlib.suppress(Damaged, OSError):
            return load_header(self.path(name)).get("fingerprint") == self.fingerprint
        return False

    def write(self, name: str, tree: PyTree) -> None:
        """Write a pytree whole or not at all, later; wait where several wait already."""
        self._waiting.append(self._writer.submit(self._write, name, tree))
        self.flush(AHEAD)

    def flush(self, left: int = 0) -> None:
        """Wait until so many files are left to be written."""
        while len(self._waiting) > left:
            self._waiting.pop(0).result()

    def _write(self, name: str, tree: PyTree) -> None:
        arrays = {str(i): array for i, array in enumerate(as_numbers(tree))}
        header = {"fingerprint": self.fingerprint, "name": name}
        try:
            save_arrays(self.path(name), arrays, header, sync=False)
        except OSError as error:
            raise OSError(
                error.errno,
                f"ReverseOnDisk cannot write {name}{SUFFIX} to {self.folder} ({error.strerror}). "
                "What is there is whole: make room, and call it again to continue.",
            ) from error

    def ahead(self, name: str, like: PyTree) -> Future[list[np.ndarray]]:
        """Begin to read the file of a pytree of the same shapes."""
        return self._reader.submit(self._read, name, like)

    def read(self, name: str, like: PyTree) -> PyTree:
        return with_numbers(like, self.ahead(name, like).result())

    def _read(self, name: str, like: PyTree) -> list[np.ndarray]:
        path = self.path(name)
        try:
            header, arrays = load_arrays(path)
        except (FileNotFoundError, Damaged) as error:
            raise OSError(_damaged(path, str(error))) from error
        if header != {"fingerprint": self.fingerprint, "name": name}:
            raise OSError(_damaged(path, "it belongs to another call."))
        shapes = [jax.eval_shape(key_data, leaf) for leaf in jax.tree.leaves(like)]
        return [arrays[str(i)].view(shape.dtype) for i, shape in enumerate(shapes)]

    def remove(self) -> None:
        self.flush()
        for path in self.folder.glob(f"*{SUFFIX}"):
            if _is_ours(path.name) and self.has(path.name.removesuffix(SUFFIX)):
                path.unlink()

    def _remove_others(self) -> None:
        """Remove the files of calls that are not made again; what cannot be read is set aside."""
        for path in self.folder.glob(f"*{SUFFIX}"):
            if not _is_ours(path.name):
                continue
            try:
                header, _ = load_arrays(path)  # all of it: what is damaged is computed again
            except Damaged:
                aside = set_aside(path).name
                warn(f"{path} is no file of ReverseOnDisk, or damaged, and is kept as {aside}.")
                continue
            if header.get("fingerprint") != self.fingerprint:
                path.unlink()


def _is_ours(name: str) -> bool:
    return re.fullmatch(rf"(state_\d{{9,}}|end|adjoint){SUFFIX}", name) is not None


def _name(first: int) -> str:
    return f"state_{first:09d}"


def _damaged(path: Path, why: str) -> str:
    name = path.name.removesuffix(SUFFIX)
    what = f"the state before step {int(name[6:]) + 1}" if name[:6] == "state_" else name
    again = "Call the engine again: it computes again what is missing."
    return f"{path}, {what} of ReverseOnDisk, cannot be used: {why} {again}"
