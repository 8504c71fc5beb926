"""Constraints: where hyperparameters may be, exact projections, and changes of variable."""
