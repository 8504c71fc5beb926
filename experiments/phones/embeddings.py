"""Context-dependent phonetic embeddings: the auxiliary task of the speech experiment.

A phone between two neighbours (a triphone) is described by the phones that are spoken around it in the
training transcripts: positions -2 to 2, itself included. The matrix of positive pointwise mutual
information

    M[t, (j, p)] = max(0, log P(phone p at position j | triphone t) / P(phone p at position j)),

with 20 triphones of average surroundings added to the counts of each (one that was heard once says
little), is centred and reduced to its first 300 principal components. So triphones that occur in like
contexts, and of like phones, are close. (Badino, 2016, learns such embeddings with a network; what
matters here is a secondary target that knows the context.)
"""

import numpy as np

from .speech.corpus import Corpus

REACH = 2
PRIOR = 20
SIZE = 300


def context_embeddings(corpus: Corpus, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings (triphones, size), and each frame's row among them; 0 outside training.

    Their mean square over the training frames is 1.
    """
    edge = len(corpus.phones)  # stands for the silence beyond an utterance
    spoken, around = [], []
    for u in np.flatnonzero(corpus.part == 0):
        first, last = corpus.first_token[u : u + 2]
        padded = np.pad(corpus.tokens[first:last], REACH, constant_values=edge)
        around.append(np.lib.stride_tricks.sliding_window_view(padded, 2 * REACH + 1))
        spoken.append(np.arange(first, last))
    spoken, around = np.concatenate(spoken), np.concatenate(around)
    _, kind = np.unique(around[:, REACH - 1 : REACH + 2], axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    counts = np.zeros((kind.max() + 1, 2 * REACH + 1, edge + 1))
    for j in range(2 * REACH + 1):
        np.add.at(counts[:, j], (kind, around[:, j]), 1)

    usual = counts.sum(axis=0) / counts.sum(axis=(0, 2))[:, None]
    smooth = counts + PRIOR * usual
    ratio = smooth / smooth.sum(axis=2, keepdims=True) / np.maximum(usual, 1e-12)
    M = np.log(np.maximum(ratio, 1.0)).reshape(len(counts), -1)

    of_token = np.zeros(len(corpus.tokens), np.int32)
    of_token[spoken] = kind
    rows = corpus.rows("train")
    weight = np.bincount(of_token[corpus.token[rows]], minlength=len(M)) / len(rows)
    M = M - weight @ M
    _, directions = np.linalg.eigh((M * weight[:, None]).T @ M)
    table = M @ directions[:, ::-1][:, :size]
    table /= np.sqrt(np.sum(weight[:, None] * table**2) / table.shape[1])
    if table.shape[1] < size:  # fewer phones than components
        table = np.pad(table, ((0, 0), (0, size - table.shape[1])))
    of_frame = np.where(corpus.token >= 0, of_token[np.maximum(corpus.token, 0)], 0)
    return table.astype(np.float32), of_frame.astype(np.int32)
