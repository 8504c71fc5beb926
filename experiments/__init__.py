"""The paper's experiments and their data, run from a checkout: `python -m experiments --help`."""
