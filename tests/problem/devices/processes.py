"""One of several processes with two devices each; the first prints results as JSON.

python -m tests.problem.devices.processes PORT COUNT RANK FOLDER
"""

import json
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import foretune as ft
from foretune._files.digests import on_host

from . import tasks


def main(folder):
    mesh = ft.mesh()
    hparams, report = tasks.hyperparameters(), {"devices": jax.device_count()}
    rows = NamedSharding(mesh, P("data"))
    size, rank = tasks.N // jax.process_count(), jax.process_index()
    own = slice(rank * size, (rank + 1) * size)  # the examples that this process has

    def gathered(tree, part=own):
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(rows, leaf[part]), tree
        )

    data = gathered(tasks.DATA)
    assert not data[0].is_fully_addressable
    problem = ft.shard(tasks.problem(ft.FullBatch(data, steps=tasks.STEPS)), mesh)
    spread = hparams | {"weight": jax.device_put(hparams["weight"], rows)}
    value, grad, _ = on_host(ft.Reverse()(problem, spread))
    report["reverse"] = tasks.as_lists((value, grad))

    tangents = ft.mesh(tangents=jax.device_count())
    everywhere = ft.shard(tasks.problem(), tangents)
    value, grad, _ = ft.Forward(mesh=tangents)(everywhere, hparams)
    report["forward"] = tasks.as_lists((value, grad))

    tasks.minimized(problem, spread, 2, f"{folder}/minimize")
    result = tasks.minimized(problem, spread, 4, f"{folder}/minimize")
    report["records"] = len(result.history)
    report["last value"] = result.history[-1]["value"]
    report["minimize"] = tasks.as_lists(on_host(result.hparams))

    def second_stops(run):
        return "of its own" if rank == 1 and run.step == 1 else None

    result = tasks.minimized(problem, spread, 4, stop=second_stops)
    report["stopped"] = [result.stopped, len(result.history)]

    half = slice(rank * 4, (rank + 1) * 4)
    batches = (gathered(batch, half) for batch in tasks.stream())
    result = tasks.tuned(batches, gathered(tasks.VALIDATION, half), mesh=mesh)
    report["real time"] = tasks.as_lists(result.hparams)
    try:
        ft.mesh(data=2)
    except ValueError as error:
        report["refused"] = str(error)
    if rank == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    port, count, rank, folder = sys.argv[1:]
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(count), int(rank), initialization_timeout=60
    )
    main(folder)
    jax.distributed.shutdown()
