"""Data sets for the experiments, tables from files, and label noise: `pip install "foretune[data]"`.

Speech (`synthetic_speech`, `timit`) needs `pip install "foretune[speech]"`.
"""

from ._alignment import alignment as alignment
from ._audio import Sound as Sound
from ._audio import read_sound as read_sound
from ._corpus import Corpus as Corpus
from ._noise import corrupt as corrupt
from ._sets import DataError as DataError
from ._sets import Dataset as Dataset
from ._sets import load as load
from ._synthetic import synthetic_speech as synthetic_speech
from ._tables import Table as Table
from ._tables import read_table as read_table
from ._timit import timit as timit

__all__ = [
    "Corpus",
    "DataError",
    "Dataset",
    "Sound",
    "Table",
    "alignment",
    "corrupt",
    "load",
    "read_sound",
    "read_table",
    "synthetic_speech",
    "timit",
]
