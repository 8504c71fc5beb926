# ruff: noqa: E501
# fmt: off
"""`attribute` given the wrong things, and its results read from what is none."""

import jax
import jax.numpy as jnp
import numpy as np

import foretune as ft

from ..problems import squared_error
from .given import INF, KEY, NAN, USUAL, data, file, folder, hparams, problem

X, Y = data()


def attributed(queries=USUAL, hparams_=USUAL, given=None, **options):
    queries = (X[:2], Y[:2]) if queries is USUAL else queries
    chosen = hparams() if hparams_ is USUAL else hparams_
    return ft.attribute(given or problem(), chosen, queries, **options)


def loaded(scores, share=1.0):
    path = folder() / "a.npz"
    ft.Attribution(scores, np.zeros(2), share).save(path)
    return ft.Attribution.load(path)


ROWS = [
    ("no queries", lambda: attributed([]), ValueError, "queries", "holds no example"),
    ("queries None", lambda: attributed(None), ValueError, "queries is None", "holds no example"),
    ("queries of no name", lambda: attributed({}), ValueError, "queries", "holds no example"),
    ("queries of no rows", lambda: attributed((X[:0], Y[:0])), ValueError, "queries holds no example"),
    ("queries of text", lambda: attributed("valid.csv"), ValueError, "queries is the str 'valid.csv'"),
    ("queries that are numbers", lambda: attributed((1.0, 2.0)), ValueError, "needs a leading axis"),
    ("queries of one function", lambda: attributed(squared_error), TypeError, "a list of objectives"),
    ("queries of other columns", lambda: attributed((X[:, :2], Y)), ValueError, "like the validation data"),
    ("queries of other lengths", lambda: attributed((X, Y[:2])), ValueError, "differ"),
    ("queries of functions of one", lambda: attributed([lambda state: 0.0]), TypeError, "objective(state, hparams, validation)"),
    ("a query whose error is a vector", lambda: attributed([lambda s, h, v: s.params["w"]]), ValueError, "one scalar, not float32[3]", "objective(state"),
    ("a second query whose error is a vector", lambda: attributed([squared_error, lambda s, h, v: s.params["w"]]), ValueError, "one scalar, not float32[3]"),
    ("a problem whose error is a vector", lambda: attributed(given=problem(objective=lambda s, h, b: s.params["w"])), ValueError, "one scalar, not float32[3]"),
    ("hparams without what the optimizer needs", lambda: attributed(USUAL, {}), ValueError, "there is no 'lr'", "init(params, hparams)"),
    ("a rate of NaN", lambda: attributed(USUAL, hparams(lr=NAN)), ft.NonFiniteError, "hparams['lr'] itself is not finite"),
    ("an infinite rate", lambda: attributed(USUAL, hparams(lr=INF)), ft.NonFiniteError, "hparams['lr'] itself is not finite"),
    ("hparams None", lambda: attributed(USUAL, None), TypeError, "hparams is None", "`{}`"),
    ("hparams an empty list", lambda: attributed(USUAL, []), TypeError, "hparams is a list", "`{}`"),
    ("hparams a count", lambda: attributed(USUAL, 3), TypeError, "hparams is the int 3"),
    ("losses a number", lambda: attributed(losses=3), TypeError, "`losses(params, hparams, batch)` must be a function"),
    ("losses of nothing", lambda: attributed(losses=lambda: 0.0), TypeError, "losses(params, hparams, batch)"),
    ("losses that are one", lambda: attributed(losses=lambda p, h, b: jnp.zeros(())), TypeError, "a number for each of the"),
    ("groups of text", lambda: attributed(groups="a"), TypeError, "groups must be one integer"),
    ("groups too few", lambda: attributed(groups=[0, 1]), ValueError, "groups has 2 entries"),
    ("a group that would wrap", lambda: attributed(groups=np.array([2**32] + [0] * 19)), ValueError, "without gaps"),
    ("masked groups", lambda: attributed(groups=np.ma.array([0, 1] * 10, mask=[1] + [0] * 19)), TypeError, "one integer for each of 20 rows"),
    ("groups of floats", lambda: attributed(groups=np.array([0.0, 1.0] * 10)), TypeError, "float64[20]"),
    ("groups of truth values", lambda: attributed(groups=[True, False] * 10), TypeError, "bool[20]"),
    ("masked queries", lambda: attributed((np.ma.masked_less(X[:2], 0), Y[:2])), ValueError, "queries[0] has masked entries"),
    ("a share of None", lambda: attributed(share=None), ValueError, "share=None"),
    ("a chunk of 1.0", lambda: attributed(chunk=1.0), ValueError, "chunk=1.0"),
    ("a folder that is a number", lambda: attributed(folder=3), TypeError, "give a path"),
    ("queries that are a dict", lambda: attributed({"x": X[:2], "y": Y[:2]}), ValueError, "like the validation data"),
    ("change of all, said as text", lambda: attributed().change("all"), ValueError, "change('all')"),
    ("change by a slice", lambda: attributed().change(slice(3)), ValueError, "change(slice("),
    ("a share of NaN", lambda: attributed(share=NAN), ValueError, "share=nan"),
    ("a share of text", lambda: attributed(share="half"), ValueError, "share='half'"),
    ("a share of 0", lambda: attributed(share=0.0), ValueError, "share=0.0"),
    ("a chunk of 0", lambda: attributed(chunk=0), ValueError, "chunk=0"),
    ("a forward engine", lambda: attributed(engine=ft.Forward()), ValueError, "errors go back"),
    ("an engine of text", lambda: attributed(engine="reverse"), ValueError, "errors go back"),
    ("a folder without a name", lambda: attributed(folder=""), ValueError, "attribute(folder=...)"),
    ("a folder that is a file", lambda: attributed(folder=file("a", "x")), OSError, "cannot write to the folder"),
    ("a checkpoint", lambda: attributed(callbacks=[ft.Checkpoint("a")]), TypeError, "give `folder=`"),
    ("a key for a problem", lambda: attributed(key=KEY), TypeError, "a problem already"),
    ("a mean of problems", lambda: attributed(given=ft.Mean([problem(), problem()])), TypeError, "one training"),
    ("inside jit", lambda: jax.jit(lambda lr: attributed(USUAL, hparams(lr=lr)).scores)(0.1), TypeError, "outside of jax.jit"),
    ("NaN in a query", lambda: attributed((X[:2] * NAN, Y[:2])), ft.NonFiniteError, "query 0"),
    ("change of a row that is none", lambda: attributed().change([20]), ValueError, "20"),
    ("change of a row from the end", lambda: attributed().change([-1]), ValueError, "-1"),
    ("change of all, said as True", lambda: attributed().change(True), ValueError, "change(True)", "a mask of all 20"),
    ("change by a mask too short", lambda: attributed().change([True]), ValueError, "change([True])", "a mask of all 20"),
    ("change by a mask of two axes", lambda: attributed().change(np.ones((1, 20), bool)), ValueError, "a mask of all 20"),
    ("change of a row twice", lambda: attributed().change([1, 1]), ValueError, "left out once"),
    ("a saved one of text", lambda: loaded(np.full((2, 3), "a")), ValueError, "a.npz is no attribution", "<U1[2,3]"),
    ("a saved one of integers", lambda: loaded(np.zeros((2, 3), int)), ValueError, "a.npz is no attribution", "int64[2,3]"),
    ("a saved one of a single axis", lambda: loaded(np.zeros(2)), ValueError, "a.npz is no attribution", "float64[2]"),
    ("a saved one of other errors", lambda: loaded(np.zeros((3, 3))), ValueError, "a.npz is no attribution", "float64[3,3]"),
    ("a saved one of a share of 7", lambda: loaded(np.zeros((2, 3)), 7.0), ValueError, "a.npz is no attribution", "share 7.0"),
    ("a saved one of a share of NaN", lambda: loaded(np.zeros((2, 3)), NAN), ValueError, "a.npz is no attribution", "share nan"),
    ("a saved one that is none", lambda: ft.Attribution.load(file("a.npz", "x")), ValueError, "a.npz"),
]
