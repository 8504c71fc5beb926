"""Engines: ways to compute the gradient of the response f(lambda) = E(s_T(lambda), lambda)."""
