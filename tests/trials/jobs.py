"""Runs in processes of their own, each of which something happens to at a chosen moment.

A process that has imported everything, and has not started JAX, forks one child for each run: without
the imports a run takes a second. One child stays, for runs to which nothing happens: it has compiled
all programs, and takes a tenth of that. `Server` is that process as a test sees it.

A moment is the n-th event of a kind that Python sees below a folder. "write": a file is opened to be
written, half of what is written to it is there, it is synced, it or a folder is made, renamed or
removed. "read": a file is opened to be read. "evaluation": a hypergradient, or the callbacks after it.
Which files there are does not matter.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Trap:
    """Counts the events of a kind below a folder, and acts at the n-th (0: never).

    The action is a signal to the process itself, an error ("full" and "unreadable" once, "stays full"
    from then on), or to wait until whoever opens the pipe of that path to write closes it.
    """

    def __init__(self, kind, folder, number=0, action="SIGKILL"):
        self.kind, self.folder, self.number, self.action = kind, str(folder), number, action
        self.seen, self._lock = [], threading.Lock()

    def set(self):
        sys.addaudithook(self._audit)
        builtins.open = io.open = self._opened(io.open)
        os.fsync = self._before(os.fsync)
        os.write = self._before(os.write)

    def event(self, kind, what):
        if kind != self.kind:
            return
        with self._lock:
            self.seen.append(what)
            count = len(self.seen)
        if not self.number or count < self.number:
            return
        if self.action == "stays full" or (self.action == "full" and count == self.number):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *what[1:])
        if self.action == "unreadable" and count == self.number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), *what[1:])
        if self.action.startswith("SIG") and count == self.number:
            os.kill(os.getpid(), getattr(signal, self.action))
        if os.path.isabs(self.action) and count == self.number:
            Path(self.action).read_text()

    def _audit(self, name, arguments):
        if name == "open":
            path, _, flags = arguments
            kind = "write" if flags & TO_WRITE else "read"
        elif name in CHANGES:
            (path, *_), kind = arguments, "write"
            if arguments[-1] != -1 and name in ("os.remove", "os.rmdir"):
                path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), path)
        else:
            return
        if (inside := self._inside(path)) is not None:
            self.event(kind, (name, inside))

    def _inside(self, path):
        if isinstance(path, int):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{path}")
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        path = os.path.abspath(os.fsdecode(path))
        return path if path == self.folder or path.startswith(self.folder + os.sep) else None

    def _before(self, call):
        def counted(file, *rest):
            if (inside := self._inside(file)) is not None:
                self.event("write", (call.__name__, inside))
            return call(file, *rest)

        return counted

    def _opened(self, open_):
        def opened(file, mode="r", *rest, **options):
            it = open_(file, mode, *rest, **options)
            writes = set(mode) & set("wxa+")
            return HalfWritten(it, self) if writes and self._inside(file) is not None else it

        return opened


class HalfWritten:
    """A file of which half is written when the trap may act."""

    def __init__(self, file, trap):
        self._file, self._trap = file, trap

    def write(self, content):
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._trap.event("write", ("half", self._trap._inside(self._file.fileno())))
        return half + self._file.write(content[half:])

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)


def minimize(folder, trap, steps=2, keep=1):
    """Offline: checkpoints and a history."""
    import jax
    import optax

    import foretune as ft

    from ..problems import regression, squared_error

    def error(state, hparams, batch):
        jax.debug.callback(lambda: trap.event("evaluation", ("objective",)))
        return squared_error(state, hparams, batch)

    # A program that calls Python is not kept, and is compiled in each process.
    watched = {"objective": error} if trap.kind == "evaluation" else {}
    problem, hparams = regression(steps=4, **watched)
    return ft.minimize(
        problem, hparams, steps=steps, optimizer=optax.adam(0.01),
        constraints={"lr": ft.NonNegative()}, callbacks=callbacks(folder, trap, keep),
        score=scored(trap),
    )  # fmt: skip


def real_time(folder, trap, steps=3, keep=1):
    """During training: checkpoints and a history."""
    import itertools

    import jax.numpy as jnp
    import numpy as np

    import foretune as ft

    from ..problems import momentum, penalised, squared_error

    def stream(seed, name):
        rng = np.random.default_rng(seed)
        for _ in itertools.count():
            trap.event("evaluation", (name,))
            x = rng.normal(size=(8, 3)).astype(np.float32)
            yield x, (x @ np.ones(3)).astype(np.float32)

    tuner = ft.RealTime(
        ft.Training(penalised, momentum), squared_error, constraints={"lr": ft.NonNegative()}
    )
    params = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
    hparams = {"lr": jnp.array(0.01), "decay": jnp.array(0.02)}
    return tuner.run(
        stream(0, "training stream"), stream(1, "validation stream"), params=params,
        hparams=hparams, window=2, steps=steps, callbacks=callbacks(folder, trap, keep),
        score=scored(trap),
    )  # fmt: skip


def callbacks(folder, trap, keep):
    import foretune as ft

    files = [ft.Checkpoint(f"{folder}/state", keep=keep), ft.History(f"{folder}/metrics.jsonl")]
    return [watch(trap, "first"), *files, watch(trap, "last")]


def watch(trap, name):
    """Return a callback that is an event of an evaluation."""
    import foretune as ft

    class Watch(ft.Callback):
        def step(self, run):
            trap.event("evaluation", (name,))

    return Watch()


def scored(trap):
    def score(record):
        trap.event("evaluation", ("score",))
        return record["value"]

    return score


def clean(folder, trap):
    """`foretune clean` into a run's folder, of which the files are the answer."""
    import functools

    from sklearn.naive_bayes import GaussianNB

    from foretune import cli
    from foretune.apps import LabelCleaner, _files

    _files.LabelCleaner = functools.partial(LabelCleaner, GaussianNB())  # trained at once
    table, checked = f"{folder}-data/train.csv", f"{folder}-data/checked.csv"
    cli.app(["clean", table, "--clean", checked, "--out", str(folder)])


def write_tables(folder):
    """Write the rows that `clean` reads."""
    import numpy as np

    rng = np.random.default_rng(0)
    data = Path(f"{folder}-data")
    data.mkdir(parents=True)
    for name, n in (("train", 24), ("checked", 12)):
        y = np.arange(n) % 2
        x = rng.normal(size=(n, 2)) + 2 * y[:, None]
        given = np.where(np.arange(n) < n // 4, 1 - y, y) if name == "train" else y
        rows = [
            f"{a:.3f},{b:.3f},{'no' if label else 'yes'}"
            for (a, b), label in zip(x, given, strict=True)
        ]
        (data / f"{name}.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")


def explain(folder, trap):
    """`foretune attribute` into a run's folder."""
    from foretune import cli

    table, queries = f"{folder}-data/train.csv", f"{folder}-data/checked.csv"
    options = ["--steps", "5", "--most", "2", "--out", str(folder)]
    cli.app(["attribute", table, queries, *options])


def attribute(folder, trap):
    """Chunks of queries, each a file."""
    import foretune as ft

    from ..problems import regression

    problem, hparams = regression(steps=4)
    x, y = problem.validation
    found = ft.attribute(
        problem, hparams, (x[:6], y[:6]), chunk=2, folder=f"{folder}/chunks",
        callbacks=[watch(trap, "chunk")],
    )  # fmt: skip
    return found.scores, found.errors


def disk(folder, trap):
    """States of reverse mode, and its adjoint."""
    import foretune as ft

    from ..problems import regression

    problem, hparams = regression(steps=9)
    return tuple(ft.ReverseOnDisk(folder, segment=3)(problem, hparams))


def history(folder, trap):
    """A file of records, without a checkpoint."""
    import foretune as ft

    return plainly(callbacks=[ft.History(f"{folder}/metrics.jsonl"), watch(trap, "record")])


def board(folder, trap):
    """Files for TensorBoard."""
    import foretune as ft

    return plainly(callbacks=[ft.TensorBoard(folder), watch(trap, "record")])


def programs(folder, trap):
    """Compiled programs that JAX keeps."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    return plainly()


def plainly(**options):
    """Minimize without files of its own."""
    import optax

    import foretune as ft

    from ..problems import regression

    problem, hparams = regression(steps=4)
    return ft.minimize(problem, hparams, steps=3, optimizer=optax.adam(0.01), **options)


def rehearse(folder, trap):
    """Trials on short trainings: checkpoints and a history."""
    import jax
    import jax.numpy as jnp

    import foretune as ft

    from ..problems import regression

    def make(steps, key):
        start = {"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}
        return regression(steps=steps)[0].replace(init=start)

    return ft.rehearse(
        make, {"lr": jnp.array(0.01), "decay": jnp.array(0.02)}, steps=128, cost=2.5,
        constraints={"lr": ft.Log()}, callbacks=callbacks(folder, trap, 1),
    )  # fmt: skip


def page(folder, trap):
    """The page of a run."""
    import numpy as np

    from foretune._files.files import write_whole
    from foretune.report import write_page

    Path(folder).mkdir(exist_ok=True)
    config = {"kind": "clean", "title": "a run", "settings": {}}
    write_whole(f"{folder}/config.json", json.dumps(config))
    lines = write_page(Path(folder)).read_text().splitlines()
    return (np.array(len(lines)),)


def experiment(folder, trap):
    """The folder of an experiment, with a file for each of its stages."""
    import numpy as np

    from experiments.multitask.experiment import Runner, Settings
    from experiments.runs import Phases, RunFolder

    with contextlib.closing(RunFolder(folder, kind="multitask", title="", settings={})) as run:
        runner, phases, found = Runner(run, "iris", None, Settings()), Phases(3), []
        for stage in range(3):
            numbers = {"accuracy": np.linspace(0, stage, 5), "C": np.eye(3)}
            stored = runner.once(
                f"method {stage}", "folds", lambda numbers=numbers: numbers, phases
            )
            found += [stored["accuracy"], stored["C"]]
            trap.event("evaluation", (f"stage {stage}",))
        run.write("result.json", {"headline": "done"})
        run.page()
    return tuple(found)


JOBS = {
    job.__name__: job
    for job in (
        *(minimize, real_time, clean, explain, attribute),
        *(disk, history, board, programs, experiment, rehearse, page),
    )
}


def answer_of(result):
    """Return a result as text that is equal where all its numbers are, to the bit."""
    import jax

    from foretune._files.digests import as_numbers

    if type(result) is tuple:  # of arrays
        return {"arrays": [leaf.tobytes().hex() for leaf in as_numbers(jax.device_get(result))]}
    leaves = as_numbers(jax.device_get((result.hparams, result.state, result.best)))
    arrays = [leaf.tobytes().hex() for leaf in leaves]
    return {"arrays": arrays, "value": float(result.value), "history": result.history}


def run_here(job, folder, trap):
    """Run in this process; return how it ended."""
    warnings.simplefilter("ignore")
    try:
        result = JOBS[job](folder, trap)
    except SystemExit as end:  # of the command line
        return {"code": end.code}
    except BaseException as error:
        words = "\n".join([str(error), *getattr(error, "__notes__", [])])
        kind = [base.__name__ for base in type(error).__mro__]
        return {"error": kind, "message": words, "trace": traceback.format_exc()}
    return {"result": answer_of(result), "stopped": getattr(result, "stopped", None)}


def fork(job, folder, kind="write", number=0, action="SIGKILL", largest=None, **environment):
    """Start a run in a child; return its process and the pipes of its answer and of what it says."""
    answer, said = os.pipe(), os.pipe()
    if pid := os.fork():
        os.close(answer[1])
        os.close(said[1])
        return pid, answer[0], said[0]
    try:
        os.setpgid(0, 0)
        os.dup2(said[1], 1)
        os.dup2(said[1], 2)
        os.environ.update(environment)
        trap = Trap(kind, os.path.abspath(folder), number, action)
        if largest is not None:
            import resource

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        trap.set()
        end = run_here(job, folder, trap) | {"events": trap.seen}
        trap.kind = None
        sys.stdout.flush()
        with os.fdopen(answer[1], "w") as file:
            json.dump(end, file)
    finally:
        os._exit(0)


def fork_resident():
    """Start the child that stays; return its process and the pipes to and from it."""
    there, back = os.pipe(), os.pipe()
    if pid := os.fork():
        os.close(there[0])
        os.close(back[1])
        return pid, os.fdopen(there[1], "w"), os.fdopen(back[0])
    try:
        os.close(there[1])
        said = os.memfd_create("said")
        os.dup2(said, 1)
        os.dup2(said, 2)
        trap = Trap(None, "")
        trap.set()
        with os.fdopen(there[0]) as requests, os.fdopen(back[1], "w") as replies:
            for line in requests:
                job, trap.folder, trap.kind = json.loads(line)
                trap.seen = []
                os.ftruncate(said, 0)
                os.lseek(said, 0, os.SEEK_SET)
                end = run_here(job, trap.folder, trap) | {"killed": None, "events": trap.seen}
                trap.kind = None
                sys.stdout.flush()
                end["said"] = Path(f"/proc/self/fd/{said}").read_text()
                replies.write(json.dumps(end) + "\n")
                replies.flush()
    finally:
        os._exit(0)


def end_of(pid, answer, said):
    """Wait for a child; return how it ended."""
    texts = [b"", b""]

    def drain(k, file):
        with os.fdopen(file, "rb") as pipe:
            texts[k] = pipe.read()

    threads = [threading.Thread(target=drain, args=pair) for pair in enumerate((answer, said))]
    for thread in threads:
        thread.start()
    _, status = os.waitpid(pid, 0)
    for thread in threads:
        thread.join()
    end = json.loads(texts[0] or "{}")
    killed = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
    return end | {"killed": killed, "said": texts[1].decode(errors="replace")}


def serve():
    """Answer requests, a line of JSON each."""
    import jax
    import matplotlib.figure  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import pandas
    from jax._src import xla_bridge

    import experiments.multitask.experiment  # noqa: F401
    import foretune.apps._explain
    import foretune.apps._files
    import foretune.cli  # noqa: F401

    from .. import problems  # noqa: F401

    jax.config.update("jax_compilation_cache_dir", os.environ["TRIALS_PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    pandas.DataFrame()
    children = {}
    assert not xla_bridge.backends_are_initialized()  # a child would have none of its threads
    _, to_resident, from_resident = fork_resident()
    for line in sys.stdin:
        request = json.loads(line)
        if "stays" in request:
            to_resident.write(json.dumps(request["stays"]) + "\n")
            to_resident.flush()
            reply = json.loads(from_resident.readline())
        elif "wait" in request:
            reply = end_of(*children.pop(request["wait"]))
        else:
            child = fork(**request)
            children[child[0]] = child
            reply = child[0]
        print(json.dumps(reply), flush=True)


class Server:
    """The process that forks the runs."""

    def __init__(self, programs):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trials.jobs"], cwd=ROOT, text=True,
            env=os.environ | {"PYTHONPATH": path, "TRIALS_PROGRAMS": str(programs)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def start(self, job, folder, **options):
        """Start a run; return its process."""
        return self._ask(job=job, folder=str(folder), **options)

    def wait(self, process):
        """Return how a run ended."""
        return self._ask(wait=process)

    def run(self, job, folder, **options):
        """Run; return how it ended."""
        return self.wait(self.start(job, folder, **options))

    def finish(self, job, folder, kind="write"):
        """Run to the end, in the child that stays."""
        return self._ask(stays=[job, str(folder), kind])

    def _ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    serve()
