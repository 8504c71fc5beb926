"""Sound files: 16-bit PCM in RIFF (.wav) and NIST SPHERE files, as arrays in [-1, 1)."""

import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foretune.apps._tables import DataError


class Sound(NamedTuple):
    """One channel of sound."""

    samples: np.ndarray
    """float32 in [-1, 1)."""
    rate: int
    """Samples per second."""


def read_sound(path: str | Path) -> Sound:
    """Return the sound in a RIFF or NIST SPHERE file of 16-bit PCM; the mean of its channels.

    What a file is, its first bytes tell, not its name: TIMIT's `.WAV` files are SPHERE.
    """
    raw = Path(path).read_bytes()
    if raw.startswith(b"NIST_1A"):
        return _sphere(raw, path)
    if raw.startswith(b"RIFF"):
        return _riff(path)
    raise DataError(f"{path}: neither a RIFF (.wav) nor a NIST SPHERE file.")


def _riff(path: str | Path) -> Sound:
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            count, raw = file.getnframes(), file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise DataError(
            f"{path}: not a readable wav file ({str(error) or 'it is cut off'})."
        ) from error
    return _pcm(raw, path, width, channels, rate, count, "<i2")


def _sphere(raw: bytes, path: str | Path) -> Sound:
    """Read a SPHERE file: its header is lines of text, `name -type value`, of the length it states."""
    try:
        length = int(raw[8:16])
        lines = raw[16:length].decode("ascii").split("end_head")[0].splitlines()
        header = {f[0]: f[2] for f in (line.split(None, 2) for line in lines) if len(f) == 3}
        width, channels = int(header.get("sample_n_bytes", 2)), int(header.get("channel_count", 1))
        rate, count = int(header["sample_rate"]), int(header["sample_count"])
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: a damaged SPHERE header ({error}).") from error
    coding = header.get("sample_coding", "pcm")
    if coding != "pcm":
        raise DataError(f"{path}: SPHERE samples coded as {coding!r}; unpack them to pcm first.")
    order = "<i2" if header.get("sample_byte_format", "01") == "01" else ">i2"
    return _pcm(raw[length:], path, width, channels, rate, count, order)


def _pcm(
    raw: bytes, path: str | Path, width: int, channels: int, rate: int, count: int, order: str
) -> Sound:
    if width != 2:
        raise DataError(f"{path}: {8 * width}-bit samples; only 16-bit PCM is read.")
    if len(raw) < 2 * channels * count:
        have = len(raw) // (2 * channels)
        raise DataError(
            f"{path}: cut off, {have:,} of the {count:,} samples in its header are there."
        )
    samples = np.frombuffer(raw, order, channels * count).reshape(count, channels)
    return Sound((samples.mean(axis=1) / 32768).astype(np.float32), rate)
