"""Wrong labels in a table, found with 47 checked rows; then the model without them.

A fifth of the diagnoses in scikit-learn's breast-cancer table are swapped. `LabelCleaner` ranks the
labels by how suspicious they are; what is kept trains a better model than all labels together.

    pip install ".[apps,data]"
    python examples/label_cleaner.py
"""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from foretune.apps import LabelCleaner

# %% The data
x, y = map(np.asarray, load_breast_cancer(return_X_y=True))
rng = np.random.default_rng(0)
order = rng.permutation(len(y))
train, checked, test = np.split(order, [330, 377])
wrong = rng.permutation(330) < 66
given = np.where(wrong, 1 - y[train], y[train])

# %% The cleaner
cleaner = LabelCleaner(random_state=0).fit(x[train], given, x[checked], y[checked])

found = cleaner.suspects_
print(f"{wrong.sum()} of {len(train)} labels are wrong; {len(checked)} others were checked")
print(f"suspects: {found.sum()}, of which {(found & wrong).sum()} are wrong")
print(f"the most suspicious rows: {cleaner.ranking_[:5]}")

# %% The model without the suspects
everything = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
everything.fit(np.concatenate([x[train], x[checked]]), np.concatenate([given, y[checked]]))
print(f"test accuracy with all labels: {everything.score(x[test], y[test]):.1%}")
print(f"test accuracy without the suspects: {cleaner.score(x[test], y[test]):.1%}")
