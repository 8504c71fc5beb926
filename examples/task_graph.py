"""Few labelled rows of many classes: a learnt graph of classes against logistic regression.

    pip install ".[apps]"
    python examples/task_graph.py [--per-class 5] [--plot graph.svg]

The digits of scikit-learn, a few of each. Takes about half a minute on two CPU cores.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit

from foretune.apps import TaskGraphClassifier, plot_task_graph

# %% Options
parser = argparse.ArgumentParser(description="A graph of classes, learnt from a few rows.")
parser.add_argument("--per-class", type=int, default=5, help="labelled rows of each digit")
parser.add_argument("--hyper-steps", type=int, default=40)
parser.add_argument("--plot", help="where to draw the graph")
arguments = parser.parse_args()

# %% The data
X, y = load_digits(return_X_y=True)
split = StratifiedShuffleSplit(1, train_size=10 * arguments.per_class, random_state=0)
labelled, rest = next(split.split(X, y))

# %% Logistic regression
plain = GridSearchCV(LogisticRegression(max_iter=2000), {"C": np.logspace(-4, 2, 7)}, cv=5)
plain.fit(X[labelled], y[labelled])
right = np.mean(plain.predict(X[rest]) == y[rest])
print(f"logistic regression: accuracy {100 * right:.1f} %")

# %% A graph of classes
for graph in ("uniform", "full"):
    model = TaskGraphClassifier(graph=graph, hyper_steps=arguments.hyper_steps, random_state=0)
    model.fit(X[labelled], y[labelled])
    accuracy = 100 * model.score(X[rest], y[rest])
    print(f"graph={graph!r}: accuracy {accuracy:.1f} %, step {model.best_step_} was kept")

# %% The drawing
axes = plot_task_graph(model)
if arguments.plot:
    axes.figure.savefig(arguments.plot)
