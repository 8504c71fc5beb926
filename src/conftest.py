"""The examples in the docstrings of `foretune.torch` run where its extra is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") and find_spec("torchax") else ["foretune/torch"]
