"""The outer loop: one driver, the descent on hyperparameters, callbacks, stopping rules."""
