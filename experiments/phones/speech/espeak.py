"""espeak-ng through ctypes: text to sound and a track of phones.

The library and its data come from the package `espeakng-loader` (espeak-ng is under GPL-3 or later,
hence an optional extra). It carries much from one sentence to the next, which its own functions do not
reset. So each sentence gets a library of its own, loaded from a copy of the file: what is heard depends
on what is asked for alone, whatever was spoken before and in whatever process.
"""

import _ctypes
import contextlib
import ctypes
import os
import shutil
import tempfile
from typing import Any, NamedTuple

import numpy as np

from foretune.apps._tables import DataError

_SYNCHRONOUS, _PHONEME_EVENTS = 2, 1  # of espeak_Initialize
_RATE, _PITCH, _RANGE = 1, 3, 4  # of espeak_SetParameter
_PHONEME, _UTF8 = 7, 1


class Spoken(NamedTuple):
    """Sound in [-1, 1) and the phones in it: phone k begins at sample start[k]."""

    samples: np.ndarray
    rate: int
    start: np.ndarray
    phone: list[str]


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class _Espeak:
    """A library of its own; to be closed."""

    def __init__(self):
        try:
            import espeakng_loader
        except ImportError as error:
            raise DataError(
                "synthetic speech needs espeak-ng: pip install --group speech. (Recorded speech: "
                "--data FOLDER, a copy of TIMIT.)"
            ) from error
        self._library: Any = _private_copy(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _PHONEME_EVENTS)
        if self.rate <= 0:
            raise DataError(f"espeak-ng could not start with its data in {data.decode()}.")
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._sound: list[np.ndarray] = []
        self._track: list[tuple[int, str]] = []
        self._callback = _Callback(self._hear)  # kept, for the library has only its address
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, sound: Any, count: int, event: Any) -> int:
        if count > 0:
            self._sound.append(np.ctypeslib.as_array(sound, (count,)).copy())
        k = 0
        while event[k].type != 0:
            if event[k].type == _PHONEME:
                self._track.append((event[k].sample, event[k].id.decode("utf-8", "replace")))
            k += 1
        return 0

    def speak(self, text: str, voice: str, rate: int, pitch: int, range: int) -> Spoken:
        self._sound, self._track = [], []
        library, encoded = self._library, text.encode() + b"\0"
        if library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise DataError(f"espeak-ng has no voice {voice!r}.")
        for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_RANGE, range)):
            library.espeak_SetParameter(parameter, int(value), 0)
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        if library.espeak_Synth(encoded, len(encoded), 0, 1, 0, _UTF8, None, None) != 0:
            raise DataError(f"espeak-ng could not speak {text!r}.")
        samples = np.concatenate(self._sound).astype(np.float32) / 32768
        start = np.array([sample for sample, _ in self._track], np.int64)
        return Spoken(samples, self.rate, start, [phone for _, phone in self._track])

    def close(self) -> None:
        self._library.espeak_Terminate()
        if hasattr(_ctypes, "dlclose"):  # not on Windows
            _ctypes.dlclose(self._library._handle)


def _private_copy(path: str) -> ctypes.CDLL:
    """Load a copy of a library, whose variables are then not those of another copy."""
    number, copy = tempfile.mkstemp(suffix=os.path.splitext(path)[1])
    os.close(number)
    shutil.copyfile(path, copy)
    try:
        return ctypes.CDLL(copy)
    finally:
        with contextlib.suppress(OSError):  # where a library in use cannot be removed
            os.unlink(copy)


def speak(
    text: str, voice: str = "en-us", rate: int = 165, pitch: int = 50, range: int = 50
) -> Spoken:
    """Return the text spoken by a voice.

    Args:
        text: what to say.
        voice: a voice of espeak-ng, with a variant after a plus sign: "en-us+f2".
        rate: words per minute.
        pitch: 0 to 100.
        range: of the pitch, 0 to 100.
    """
    with contextlib.closing(_Espeak()) as espeak:
        return espeak.speak(text, voice, rate, pitch, range)
