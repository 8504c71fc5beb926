"""Diagnostics: what of a hypergradient may be believed."""
