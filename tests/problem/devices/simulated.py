"""Everything on 8 simulated devices beside the same on one; prints differences and facts as JSON.

python -m tests.problem.devices.simulated FOLDER   (with --xla_force_host_platform_device_count=8)
"""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import foretune as ft

from ...compilations import compilations
from . import tasks


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)


def main(folder):
    from .collectives import collectives

    hparams, report = tasks.hyperparameters(), {"devices": jax.device_count()}
    data, split = ft.mesh(), ft.mesh(data=2, model=4)
    tangents, both = ft.mesh(tangents=8), ft.mesh(data=2, tangents=4)

    problem = tasks.problem(ft.Minibatches(tasks.DATA, tasks.INDICES))
    alone = ft.Reverse()(problem, hparams)

    def compare(name, engine, problem, alone=alone, hparams=hparams):
        result = engine(problem, hparams)
        report[name] = distance((result.value, result.grad), (alone.value, alone.grad))
        return result

    placed = ft.shard(problem, data)
    for store in ("states", "everything", "segments", 2):
        compare(f"reverse, {store}", ft.Reverse(store=store), placed)
    compare("forward", ft.Forward(), placed)
    stacked = problem.replace(batches=problem.batches.batch(problem.batches.indices))
    compare("stacked", ft.Reverse(), ft.shard(stacked, data))
    folds = tasks.folds()
    compare("folds", ft.Reverse(), ft.shard(folds, data), ft.Reverse()(folds, hparams))

    specs = {"a": P(None, "model"), "b": P("model")}
    result = compare("parameters", ft.Reverse(), ft.shard(problem, split, params=specs))
    report["parameters stay split"] = result.state.params["a"].sharding.spec == specs["a"]

    compare("tangents", ft.Forward(mesh=tangents), ft.shard(problem, tangents))
    compare("tangents and data", ft.Forward(mesh=both, chunk=6), ft.shard(problem, both))
    program = ft.Forward(mesh=tangents).lower(ft.shard(problem, tangents), hparams)
    exchanged = collectives(program.compile().as_text())
    report["tangents: in the loop"] = sum(c.in_loop for c in exchanged)
    report["tangents: at the end"] = [c.bytes // 8 for c in exchanged]

    plain = problem.replace(
        dynamics=ft.Training(tasks.plain_loss, tasks.optimizer), validation=None
    )
    others = tasks.hyperparameters(weights=False)
    scores = ft.attribute(plain, others, tasks.VALIDATION)
    queries, mixed = ft.mesh(queries=8), ft.mesh(data=2, queries=4)
    split = ft.attribute(ft.shard(plain, queries), others, tasks.VALIDATION, mesh=queries)
    report["queries"] = distance(tuple(split), tuple(scores))
    six = jax.tree.map(lambda leaf: leaf[:6], tasks.VALIDATION)  # no multiple of 4
    split = ft.attribute(ft.shard(plain, mixed), others, six, mesh=mixed, chunk=3)
    report["queries and data"] = distance(split[:2], (scores.scores[:6], scores.errors[:6]))
    report["queries: exchanged"] = len(collectives(tasks.way_back(plain, others, queries)))

    def descend(mesh, steps, name):
        rows = NamedSharding(mesh, P("data"))
        weights = hparams | {"weight": jax.device_put(hparams["weight"], rows)}
        result = tasks.minimized(ft.shard(tasks.problem(), mesh), weights, steps, folder / name)
        report["weights stay split"] = result.hparams["weight"].sharding.spec == P("data")
        return result

    descend(data, 2, "8")
    shutil.copytree(folder / "8", folder / "8 then 4")
    result = descend(ft.mesh(data=4), 4, "8 then 4")
    report["minimize"] = tasks.as_lists(result.hparams)
    report["records"] = len(result.history)

    mesh = ft.mesh(data=4, tangents=2)
    batches = [ft.shard(batch, mesh) for batch in tasks.stream()]
    validation = ft.shard(tasks.VALIDATION, mesh)
    with compilations("_program") as compiled:
        tasks.tuned(batches, validation, 2, mesh, folder / "realtime")
        result = tasks.tuned(batches, validation, 4, mesh, folder / "realtime")
    report["real time"] = tasks.as_lists(result.hparams)
    report["real time: compiled"] = len(compiled)
    report["real time: Z stays split"] = result.state.Z.params["a"].sharding.spec == P("tangents")
    print(json.dumps(report))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(Path(sys.argv[1]))
