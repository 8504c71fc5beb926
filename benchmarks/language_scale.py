"""Hypergradients of a language model of GPT-2's size, and of ten thousand steps of a smaller one.

    python -m benchmarks.language_scale size [--quick] [--minutes 8] [--out FILE.json]
    python -m benchmarks.language_scale disk [--quick] [--steps 10000] [--folder DIR] [--out FILE.json]

size: 110 million weights (12 layers of 768, 32768 tokens), sequences of 512, 16 of them, bfloat16, 32
steps of AdamW; its hyperparameters are the weight of each of eight sources and the learning rate in
four blocks of steps. Seconds of plain training and of hypergradients, by what is stored, by how the
gradient is transposed, and by what the loss keeps for its derivatives; the memory that the compiler
plans; the seconds of the first call. On a smaller size, how far float32 and bfloat16 hypergradients are
from float64.

disk: 10.8 million weights (6 layers of 384, bytes), sequences of 256, 32 of them, 10,000 steps, with
`ReverseOnDisk`.

Tokens are random, with frequencies that differ by source. Figures are written as they come.
"""

import functools
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import command_line, record, timed
from experiments.language.model import hidden, initial
from foretune._engines.memory import program_bytes
from foretune._problem.problem import validated

SOURCES, BLOCKS, AT_ONCE = 8, 4, 4
GPT2 = {
    "layers": 12, "width": 768, "heads": 12, "context": 512, "batch": 16, "steps": 32,
    "vocabulary": 32768,
}  # fmt: skip
LONG = {
    "layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 32, "steps": 10_000,
    "vocabulary": 256,
}  # fmt: skip
SMALL = {
    "layers": 2, "width": 64, "heads": 2, "context": 32, "batch": 8, "steps": 12, "vocabulary": 256,
}  # fmt: skip
TINY = {
    "layers": 2, "width": 8, "heads": 2, "context": 8, "batch": 2, "steps": 8, "vocabulary": 64,
}  # fmt: skip
ENGINES = {
    "segments, light": (ft.Reverse(store="segments"), True),
    "segments": (ft.Reverse(store="segments"), False),
    "gradients": (ft.Reverse(store="gradients"), False),
    "states": (ft.Reverse(), False),
    "segments, reverse": (ft.Reverse(store="segments", transpose="reverse"), False),
}
"""Engines, and whether the loss is light: see `language`."""


def tokens(vocabulary: int, context: int, windows: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of tokens, and the source of each."""
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, vocabulary + 1)
    rows = []
    for _ in range(SOURCES):
        p = frequency * rng.uniform(0.1, 1.0, vocabulary)
        rows.append(rng.choice(vocabulary, (windows // SOURCES, context + 1), p=p / p.sum()))
    return np.concatenate(rows).astype(np.int32), np.repeat(np.arange(SOURCES), windows // SOURCES)


def language(
    dtype: Any, light: bool = False, /, *, layers: int, width: int, heads: int, context: int,
    batch: int, steps: int, vocabulary: int,
) -> tuple[ft.Problem, dict[str, Any]]:  # fmt: skip
    """Return the problem, whose loss is computed in `dtype`, and its hyperparameters.

    A light loss keeps matrix products of its layers alone, and has logits of `AT_ONCE` sequences at a
    time.
    """
    windows, source = tokens(vocabulary, context)
    rng = np.random.default_rng(1)

    def head(params, x, after):
        out = x @ params["embed"].T
        out = out.astype(np.promote_types(out.dtype, np.float32))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, after), -1)

    def losses(params, windows):
        x, after = hidden(params, windows[:, :-1], heads, light), windows[:, 1:]
        if not light:
            return head(params, x, after)
        one = jax.checkpoint(lambda entry: head(params, *entry), prevent_cse=False)
        return jax.lax.map(one, (x, after), batch_size=AT_ONCE)

    def loss(params, hparams, batch):
        share = SOURCES * hparams["sources"] / jnp.sum(hparams["sources"])
        return jnp.mean(share[batch[1]] * losses(params, batch[0]))

    def optimizer(hparams):
        rate = lambda t: hparams["lr"][t * BLOCKS // steps]  # noqa: E731
        return optax.adamw(rate, eps_root=1e-8)

    training = ft.Training(loss, optimizer)
    problem = ft.Problem(
        training if dtype == np.float32 else training.in_precision(dtype),
        lambda state, hparams, windows: jnp.mean(losses(state.params, windows)),
        initial(jax.random.key(0), layers, width, context, vocabulary),
        ft.Minibatches((windows, source), rng.integers(0, len(windows), (steps, batch))),
        windows[rng.integers(0, len(windows), batch)],
    )
    return problem, {"sources": jnp.ones(SOURCES), "lr": jnp.full(BLOCKS, 3e-4)}


def plain_program(problem: ft.Problem, hparams: Any) -> tuple[Any, Any]:
    """Return plain training as a program of arrays, and the arrays."""
    arrays, static = eqx.partition((problem, hparams), eqx.is_array)

    def plain(arrays):
        problem, hparams = eqx.combine(arrays, static)
        return problem.response(hparams)

    return jax.jit(plain), arrays


def first_call(lower: Callable[[], Any], arrays: Any) -> tuple[dict[str, float], Any]:
    """Return seconds of the first call and of later ones and the memory, and the program."""
    began = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(arrays))
    first = time.perf_counter() - began
    _, seconds = timed(lambda: program(arrays))
    figures = {
        "seconds": seconds,
        "first call": first,
        "tracing": traced - began,
        "compiling": compiled - traced,
        "GiB": program_bytes(program) / 2**30,
    }
    return figures, program


def distance(found: Any, exact: Any) -> float:
    """Return |found - exact| / |exact|."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
        for tree in (found, exact)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def of_size(sizes: dict[str, int], until: float, write: Callable[[Any], None]) -> None:
    """Measure plain training and every engine, and how exact hypergradients are."""
    problem, hparams = language(jnp.bfloat16, **sizes)
    count = sum(leaf.size for leaf in jax.tree.leaves(problem.init))
    results: dict[str, Any] = {"sizes": sizes, "weights": count}
    program, arrays = plain_program(problem, hparams)
    plain, _ = first_call(lambda: program.lower(arrays), jax.device_put(arrays))
    results["plain"] = plain
    write(results)
    reference = None
    for name, (engine, light) in ENGINES.items():
        if sizes is TINY and name != "segments":
            continue
        if time.perf_counter() > until:
            results[name] = "no time left"
            write(results)
            continue
        try:
            case = language(jnp.bfloat16, light, **sizes)
            arrays = jax.device_put(validated(*case)[0])
            figures, program = first_call(functools.partial(engine.lower, *case), arrays)
            grad = jax.device_get(program(arrays)[1])
        except jax.errors.JaxRuntimeError as error:  # out of memory
            results[name] = f"{type(error).__name__}: {error!s:.200}"
            write(results)
            continue
        reference = grad if reference is None else reference
        figures["times plain training"] = figures["seconds"] / plain["seconds"]
        figures["first call, times plain"] = figures["first call"] / plain["first call"]
        figures["from the first engine's"] = distance(grad, reference)
        results[name] = figures
        write(results)
        del program
    if sizes is not TINY:
        results["precision"] = precision(SMALL)
        write(results)


def precision(sizes: dict[str, int]) -> dict[str, float]:
    """Return how far hypergradients of a small model are from those in float64."""
    found = {}
    with jax.default_matmul_precision("highest"):
        for name, dtype in {"float32": np.float32, "bfloat16 loss": jnp.bfloat16}.items():
            problem, hparams = language(dtype, **sizes)
            for transpose in ("forward", "reverse"):
                engine = ft.Reverse(transpose=transpose)
                found[f"{name}, {transpose}"] = jax.device_get(engine(problem, hparams).grad)
        problem, hparams = language(np.float32, **sizes)
        arrays = jax.device_get((problem.init, hparams))  # the same numbers, in float64
    with jax.enable_x64(True):
        wide = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
        init, hparams64 = jax.tree.map(wide, arrays)
        problem64, _ = language(np.float32, **sizes)
        exact = ft.Reverse()(problem64.replace(init=init), hparams64).grad
        exact = jax.device_get(exact)
    return {name: distance(grad, exact) for name, grad in found.items()}


def on_disk(sizes: dict[str, int], folder: str | None, write: Callable[[Any], None]) -> None:
    """Measure a long training, and check a short one of the same kind."""
    results: dict[str, Any] = {"sizes": sizes}
    where = tempfile.mkdtemp(prefix="states-", dir=folder)
    results["disk, GiB free"] = shutil.disk_usage(where).free / 2**30
    try:
        problem, hparams = language(jnp.bfloat16, **sizes)
        program, arrays = plain_program(problem, hparams)
        plain, _ = first_call(lambda: program.lower(arrays), arrays)
        results["plain"] = plain
        write(results)
        _, s_T = jax.eval_shape(program, arrays)
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(s_T))
        engine = ft.ReverseOnDisk(where)
        jax.config.update("jax_compilation_cache_dir", where)  # the call finds the program there
        began = time.perf_counter()
        memory = program_bytes(engine.lower(problem, hparams).compile())
        results["compiling, seconds"] = time.perf_counter() - began
        began = time.perf_counter()
        found = jax.block_until_ready(engine(problem, hparams))
        seconds = time.perf_counter() - began
        length = math.isqrt(sizes["steps"])
        results["ReverseOnDisk"] = {
            "seconds, with compiling": seconds,
            "times plain training": seconds / plain["seconds"],
            "a state, MiB": state / 2**20,
            "on disk, GiB, about": sizes["steps"] / length * state / 2**30,
            "GiB": memory / 2**30,
            "value": float(found.value),
            "gradient's largest entry": max(
                float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(found.grad)
            ),
        }
        write(results)
        short = {**sizes, "steps": max(BLOCKS * BLOCKS, sizes["steps"] // 50)}
        problem, hparams = language(jnp.bfloat16, **short)
        began = time.perf_counter()
        found = ft.ReverseOnDisk(where)(problem, hparams)
        results["short"] = {"steps": short["steps"], "seconds": time.perf_counter() - began}
        exact = ft.Reverse(store="segments")(problem, hparams)
        results["short"]["from Reverse(store='segments')"] = distance(found.grad, exact.grad)
        write(results)
    finally:
        shutil.rmtree(where, ignore_errors=True)


def main() -> None:
    """Run the parts that are asked for."""
    parser = command_line(__doc__, out="language_scale.json")
    parser.add_argument("parts", nargs="+", choices=["size", "disk"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no engine after that")
    parser.add_argument("--steps", type=int, help="of the training on disk")
    parser.add_argument("--folder", help="a folder on the disk for the states")
    arguments = parser.parse_args()
    if arguments.quick:  # programs are compiled once and run a few times
        jax.config.update("jax_disable_most_optimizations", True)
    until = time.perf_counter() + 60 * arguments.minutes
    results: dict[str, Any] = {}

    def writer(part):
        def write(found):
            results[part] = found
            record(arguments.out, results)
            print(part, list(found.items())[-1], flush=True)

        return write

    if "size" in arguments.parts:
        of_size(TINY if arguments.quick else GPT2, until, writer("size"))
    if "disk" in arguments.parts:
        sizes = {**TINY, "steps": 16} if arguments.quick else LONG  # as many as the short one
        sizes = {**sizes, "steps": arguments.steps or sizes["steps"]}
        on_disk(sizes, arguments.folder, writer("disk"))


if __name__ == "__main__":
    main()
