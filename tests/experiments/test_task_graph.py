"""Task interactions: the objective, its constraints, the estimator, the plot and the experiment."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression

import foretune as ft
from experiments.multitask import graph
from experiments.multitask.classifier import TaskGraphClassifier, scaled
from experiments.multitask.plot import plot_task_graph

DIGITS: Any = load_digits(return_X_y=True)
QUICK = {"steps": 20, "hyper_steps": 4, "progress": False, "random_state": 0}


def few(per_class=4, classes=4, seed=0):
    """Return a few digits of each of some classes, and the rest of them."""
    X, y = DIGITS
    order = np.random.default_rng(seed).permutation(np.flatnonzero(y < classes))
    rank = np.zeros(len(y), int)
    for k in range(classes):
        of_class = order[y[order] == k]
        rank[of_class] = np.arange(len(of_class))
    labelled, rest = order[rank[order] < per_class], order[rank[order] >= per_class]
    return X[labelled], y[labelled], X[rest], y[rest]


def plain_score(X, y, X_test, y_test):
    return LogisticRegression(max_iter=1000).fit(X, y).score(X_test, y_test)


def small_rows(dtype: Any = np.float32, splits=2, n=12, d=3, classes=3):
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(n) % classes, (splits, 1))
    x = rng.normal(size=(splits, n, d)) / np.sqrt(d) + 0.5 * np.eye(classes, d)[y]
    return graph.Rows(x.astype(dtype), y)


def small_plan(rows, outer=0):
    return graph.joined(
        [graph.make_plan(y, 3, outer, np.random.default_rng(k)) for k, y in enumerate(rows.y)]
    )


def test_the_penalty_is_the_sum_over_pairs():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, 1, 4, 3))
    C = rng.uniform(size=(2, 1, 4, 4))
    C, rho = C + C.transpose(0, 1, 3, 2), rng.uniform(size=(2, 1, 4))
    expected = [
        sum(
            C[s, 0, j, k] * np.sum((w[s, 0, j] - w[s, 0, k]) ** 2)
            for j in range(4)
            for k in range(4)
        )
        + sum(rho[s, 0, k] * np.sum(w[s, 0, k] ** 2) for k in range(4))
        for s in range(2)
    ]
    found = graph.penalty(*map(jnp.asarray, (w, C, rho)))
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_hypergradients_of_all_hyperparameters():
    rows = small_rows(np.float64)
    problem = graph.graph_problem(rows, small_plan(rows, outer=3), graph.all_pairs(3), steps=8)
    shape = (2, 4)
    rng = np.random.default_rng(0)
    C = rng.uniform(0.01, 0.1, size=(*shape, 3, 3))
    hparams = {
        "C": jnp.asarray(C + C.transpose(0, 1, 3, 2)),
        "rho": jnp.asarray(rng.uniform(0.1, 0.2, size=shape)),
        "scale": jnp.full(shape, 2.0),
    }
    ft.check_hypergradient(problem, hparams, verbose=False)
    grad = ft.Reverse()(problem, hparams).grad
    alone = graph.graph_problem(
        graph.Rows(rows.x[:1], rows.y[:1]),
        graph.joined([graph.make_plan(rows.y[0], 3, 3, np.random.default_rng(0))]),
        graph.all_pairs(3),
        steps=8,
    )
    first = ft.Reverse()(alone, jax.tree.map(lambda leaf: leaf[:1], hparams)).grad
    np.testing.assert_allclose(grad["C"][:1], first["C"], rtol=1e-9)  # splits do not mix


def test_all_pairs_alike_is_a_plain_penalty():
    rows, K = small_rows(), 3
    pairs = graph.train(
        rows, {"C": jnp.full((2, 1), 0.05), "rho": jnp.full((2, 1), 0.1)}, graph.all_pairs(K), 50
    )
    plain = graph.train(rows, {"rho": jnp.full((2, 1), 0.1 + 2 * K * 0.05)}, graph.all_pairs(K), 50)
    np.testing.assert_allclose(pairs["w"], plain["w"], atol=1e-5)


def test_a_plan_shows_no_row_to_those_that_it_judges():
    y = np.repeat(np.arange(4), 7)
    plan = graph.make_plan(y, 5, 3, np.random.default_rng(0))
    assert not np.any(plan.train & plan.held)
    assert not np.any((plan.train | plan.held) & plan.outer)
    assert np.all(plan.held[:, 0, 0].sum(0) == 1)  # each row once
    assert np.all(plan.outer[0].sum(0) == 1)
    for mask in plan.train.reshape(-1, 28):
        assert set(y[mask]) == {0, 1, 2, 3}


class Watch(ft.Callback):
    def __init__(self):
        self.graphs = []

    def step(self, run):
        if run.hparams["C"].ndim == 4:
            self.graphs.append(np.asarray(run.hparams["C"]))


@pytest.mark.parametrize("total", [None, 0.05])
def test_the_graph_stays_in_its_set_after_every_step(total):
    rows, watch = small_rows(), Watch()
    keep, _ = graph.tune(
        "full",
        rows,
        small_plan(rows),
        graph.all_pairs(3),
        total=total,
        steps=15,
        hyper_steps=12,
        callbacks=lambda phase: [watch],
    )
    assert len(watch.graphs) == 13
    for C in [*watch.graphs, np.asarray(keep.hparams["C"])]:
        assert np.array_equal(C, C.swapaxes(-1, -2))  # to the bit
        assert C.min() >= 0
        assert np.all(np.diagonal(C, axis1=-2, axis2=-1) == 0)
        if total is not None:
            assert C.sum((-1, -2)).max() <= total * (1 + 1e-5)
    assert any(not np.array_equal(C, watch.graphs[0]) for C in watch.graphs)


def test_only_what_is_surely_better_is_kept():
    values = iter([[1.0, 1.0, 1.0], [0.9, 0.8, 0.85], [0.2, 1.9, 0.0], [0.5, 0.5, 0.5]])
    mask = np.array([[True, True, True]])
    keep = graph.Keep(lambda params, h: (np.array([next(values)]), mask), margin=2.0)

    class Run:
        history, state = [], type("S", (), {"params": None})
        step, hparams = 0, {}

    for step in range(4):
        Run.step = step
        Run.hparams = {"rho": jnp.full((1, 1), float(step))}
        keep.step(Run)
    assert keep.steps.tolist() == [3]  # step 2 has a lower mean than 1, by less than its error
    assert float(keep.hparams["rho"][0, 0]) == 3.0


def test_the_estimator_learns_from_few_rows():
    X, y, X_test, y_test = few()
    model = TaskGraphClassifier(**QUICK).fit(X, y)
    assert model.score(X_test, y_test) > plain_score(X, y, X_test, y_test) - 0.02
    assert model.task_graph_.shape == (4, 4)
    assert np.array_equal(model.task_graph_, model.task_graph_.T)
    assert model.rho_ > 0
    assert [r["step"] for r in model.history_] == list(range(5))
    probabilities = model.predict_proba(X_test)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-9)
    assert np.array_equal(model.predict(X_test), probabilities.argmax(1))
    again = TaskGraphClassifier(**QUICK).fit(sparse.csr_matrix(X), y)
    np.testing.assert_allclose(again.coef_, model.coef_, atol=1e-6)
    np.testing.assert_allclose(
        again.decision_function(sparse.csr_matrix(X_test[:5])), model.decision_function(X_test[:5])
    )
    copy: Any = clone(model)
    assert copy.get_params() == model.get_params()


def test_the_other_graphs_labels_of_any_kind_and_a_validation_set():
    X, y, X_test, y_test = few()
    names = np.array(["zero", "one", "two", "three"])
    uniform = TaskGraphClassifier(graph="uniform", **QUICK).fit(X, names[y])
    off = uniform.task_graph_[~np.eye(4, dtype=bool)]
    assert off.min() == off.max() > 0
    assert uniform.score(X_test, names[y_test]) > plain_score(X, y, X_test, y_test) - 0.02
    none: Any = TaskGraphClassifier(graph="none", **QUICK).fit(X, y)
    assert not none.task_graph_.any()
    assert none.rho_.shape == (4,)
    A = np.kron(np.eye(2), np.ones((2, 2)))
    known = TaskGraphClassifier(graph=A, **QUICK).fit(X, y)
    assert known.task_graph_[0, 1] == known.task_graph_[2, 3] > 0
    assert known.task_graph_[0, 2] == 0
    bounded = TaskGraphClassifier(total=0.01, **QUICK).fit(X[::2], y[::2], X[1::2], y[1::2])
    assert 0 < bounded.task_graph_.sum() <= 0.01 * (1 + 1e-5)


def test_wide_rows_are_rotated_without_changing_the_model():
    X, y, *_ = few(per_class=3)
    z, back = scaled(X)
    assert z.shape == (12, 12)
    centred = (X - X.mean(0)) / back.length
    rows, pattern = graph.Rows(z[None], y[None]), graph.all_pairs(4)
    hparams = {"rho": jnp.full((1, 1), 0.1)}
    narrow = graph.train(rows, hparams, pattern, 30)["w"][0, 0] @ back.rotation.T
    wide = graph.Rows(centred[None].astype(np.float32), y[None])
    np.testing.assert_allclose(
        narrow, graph.train(wide, hparams, pattern, 30)["w"][0, 0], atol=1e-5
    )


X4, Y4, *_ = few()


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, (X4, Y4 % 2), "2 classes: a graph of classes needs three"),
        ({}, (X4, np.r_[0, Y4[1:] + 5]), "only 1 row"),
        ({}, (np.ones((16, 3)), Y4), "every feature of X is constant"),
        ({}, (X4, Y4, X4[Y4 < 3], Y4[Y4 < 3]), "rows of every class"),
        ({"graph": np.eye(4)}, (X4, Y4), "no edge"),
        ({"graph": np.ones((3, 3))}, (X4, Y4), r"shape \(3, 3\), and y has 4 classes"),
        ({"graph": np.triu(np.ones((4, 4)))}, (X4, Y4), "symmetric"),
    ],
)
def test_bad_input_is_refused(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        TaskGraphClassifier(**{**QUICK, **options}).fit(*arguments)


def test_too_few_rows_for_early_stopping_are_said():
    X, y, *_ = few(per_class=2, classes=3)
    with pytest.warns(UserWarning, match="only 2 rows"):
        TaskGraphClassifier(**{**QUICK, "hyper_steps": 1}).fit(X, y)


def test_the_plot_names_classes_and_draws_the_strongest_edges():
    C = np.array([[0, 3.0, 0], [3, 0, 1], [0, 1, 0]])
    axes = Figure().add_subplot()
    plot_task_graph(C, ["cat", "dog", "car"], axes, edges=1)
    assert {"cat", "dog", "car"} == {text.get_text() for text in axes.texts}
    assert len(axes.lines) == 1
    plot_task_graph(np.zeros((3, 3)), "abc", axes)
    assert len(axes.lines) == 1
    with pytest.raises(ValueError, match="not symmetric"):
        plot_task_graph(np.triu(C), "abc", axes)


def test_the_scale_stays_finite_where_every_row_is_right_and_unfitted_models_say_so():
    X = np.repeat(10 * np.eye(3), 5, axis=0) + np.random.default_rng(0).normal(size=(15, 3))
    model = TaskGraphClassifier(graph="uniform", **{**QUICK, "hyper_steps": 30})
    with pytest.raises(NotFittedError):
        model.predict(X)
    model.fit(X, np.repeat(["a", "b", "c"], 5))
    assert 1 < model.scale_ < 10
    assert model.score(X, np.repeat(["a", "b", "c"], 5)) == 1


@pytest.fixture
def tiny(tmp_path):
    from experiments.multitask.experiment import Settings

    x, y = load_iris(return_X_y=True)
    np.savez(tmp_path / "iris.npz", x=x, y=y)
    return Settings(
        data=str(tmp_path / "iris.npz"),
        seeds=2,
        per_class=4,
        steps=5,
        iterations=2,
        paper_steps=5,
        paper_iterations=3,
    )


def test_the_experiment_and_its_report(tmp_path, tiny, monkeypatch):
    from experiments.multitask import experiment as multitask

    out = tmp_path / "run"
    real = multitask.Runner.folds

    def interrupted(self, method):
        if method == "HMTL":
            raise KeyboardInterrupt
        return real(self, method)

    monkeypatch.setattr(multitask.Runner, "folds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        multitask.run(out, tiny)
    done = {path.name: path.stat().st_mtime_ns for path in (out / "stages").iterdir()}
    assert "iris,_NMTL,_folds.npz" in done
    monkeypatch.setattr(multitask.Runner, "folds", real)
    page = multitask.run(out, tiny)
    assert all((out / "stages" / name).stat().st_mtime_ns == when for name, when in done.items())
    result = json.loads((out / "result.json").read_text())
    rows = result["tables"][0]["rows"]
    methods = {row[0] for row in rows}
    assert {"no regulariser", "STL", "NMTL", "HMTL", "HMTL-S", "logistic regression"} <= methods
    assert len(result["values"]["iris"]["HMTL"]["folds"]["accuracy"]) == 2
    assert len(result["figures"]) == 3
    assert not list((out / "checkpoints").iterdir())  # no longer needed
    html = page.read_text()
    assert "data:image/svg+xml" in html
    assert "HMTL-S" in html
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {r["seed"] for r in records} == {0, 1}
    assert sum(r["series"] == "iris, HMTL, folds, full" for r in records) == 2 * 3


def test_the_experiment_needs_enough_rows(tmp_path, tiny):
    from experiments.multitask import experiment as multitask
    from foretune.apps._tables import DataError

    with pytest.raises(DataError, match="with 61 rows each"):
        multitask.run(tmp_path / "run", tiny._replace(per_class=30))
    assert not (tmp_path / "run").exists()


def test_known_groups_and_the_contrast_between_them():
    from experiments.multitask.groups import ANIMALS, VEHICLES, known_groups
    from experiments.multitask.page import contrast

    names = sorted(ANIMALS | VEHICLES)
    graph = known_groups(names)
    assert graph is not None
    assert graph[names.index("cat"), names.index("dog")] > 0
    assert graph[names.index("cat"), names.index("ship")] == 0
    assert contrast(graph + 1.0, names) == pytest.approx(1 + graph.max(), rel=1e-6)
    assert known_groups(["a", "b"]) is None
    assert contrast(np.ones((2, 2)), ["a", "b"]) is None


def test_the_features_in_the_data_folder():
    import os

    from experiments.datasets import load
    from experiments.multitask.groups import known_groups

    if not os.path.isdir(os.path.join(os.environ.get("FORETUNE_DATA", ""), "cifar")):
        pytest.skip("no features of CIFAR: FORETUNE_DATA names no folder with cifar/ in it")
    for name, K in (("cifar10", 10), ("cifar100", 100)):
        data = load(name)
        assert data.x.shape[1] == 1280
        assert len(np.unique(data.y)) == K
        groups = known_groups(data.class_names or [])
        assert groups is not None
        assert groups.shape == (K, K)
