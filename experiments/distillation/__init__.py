"""Distilled data: a few learnt images in the place of a training set."""
