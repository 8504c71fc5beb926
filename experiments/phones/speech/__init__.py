"""Speech with phones: TIMIT, synthetic speech, and the features of both."""

from .alignment import alignment as alignment
from .audio import Sound as Sound
from .audio import read_sound as read_sound
from .corpus import Corpus as Corpus
from .synthetic import synthetic_speech as synthetic_speech
from .timit import timit as timit
