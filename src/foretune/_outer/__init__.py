"""The outer loop: constraints, the descent on hyperparameters, and what happens beside a run."""
