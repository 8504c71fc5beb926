"""Data sets for the experiments, tables from files, and label noise: `pip install "foretune[data]"`."""

from ._noise import corrupt as corrupt
from ._sets import DataError as DataError
from ._sets import Dataset as Dataset
from ._sets import load as load
from ._tables import Table as Table
from ._tables import read_table as read_table

__all__ = ["DataError", "Dataset", "Table", "corrupt", "load", "read_table"]
