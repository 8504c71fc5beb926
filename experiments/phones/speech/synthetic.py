"""Synthetic speech at any scale: sentences of a grammar, spoken by espeak-ng in rooms with noise.

A speaker is a voice of espeak-ng with a pitch, a range of pitch and a rate of its own; voices, and so
speakers, of validation and test are not heard in training. Each utterance has a sentence of its own, is
reverberated or not, and has noise of some colour added. The phones and their times are those that
espeak-ng reports. The same seed gives the same corpus, over however many processes.
"""

from typing import Any

import numpy as np

from foretune._problem.checks import check_count

from .corpus import (
    Corpus,
    Segments,
    Utterance,
    assemble,
    default_cache,
    in_parallel,
    label_frames,
    speaker_parts,
    stored,
)
from .espeak import speak
from .features import RATE, frame_count, static_features
from .sentences import sentence

_VOICES = """
    Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Mario Michael
    Mike Nguyen RicishayMax RicishayMax2 anika announcer antonio aunty belinda boris ed edward
    f1 f2 f3 f4 f5 grandma grandpa gustave ian iven iven2 iven3 iven4 john kaukovalta klatt
    klatt2 klatt3 klatt4 klatt5 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel norbert
    pablo paul pedro quincy rob robert sandro shelby steph steph2 steph3 travis victor zac
"""
VOICES = _VOICES.split()
"""Variants of espeak-ng's voices that sound like a person, without those of a generator (klatt 6) whose
noise is not the same each time."""
SHARES = (0.7, 0.2, 0.1)
"""Of the voices, for training, validation and test."""
FRAMES_EACH = 350
"""Frames of an utterance, about."""
EACH = 10
"""Utterances of a speaker at least, in a small corpus."""
VERSION = 1


def synthetic_speech(
    frames: Any = 1_500_000,
    *,
    snr: Any = (-5.0, 15.0),
    reverberation: float | int = 0.7,
    normalise: str = "speaker",
    cepstral: bool = False,
    seed: Any = 0,
    cache: Any = "default",
    workers: int | None = None,
) -> Corpus:
    """Make a corpus of about `frames` frames (100 a second), or read it from the cache.

    Args:
        frames: how many, about, and 30 utterances at least; 1.5 million are TIMIT's size, and four
            hours of speech.
        snr: the range of the signal-to-noise ratio in dB; None: no noise.
        reverberation: the share of utterances in a room with echoes.
        normalise: as in `timit`.
        cepstral: as in `timit`.
        seed: of sentences, speakers and rooms.
        cache: the folder in which features are kept; None keeps none.
        workers: processes that speak; by default all cores for many utterances.
    """
    check_count(frames, f"synthetic_speech(frames={frames!r})")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"synthetic_speech(seed={seed!r}): an integer, 0 or more.")
    if snr is not None and (np.shape(snr) != (2,) or snr[0] > snr[1]):
        raise ValueError(
            f"synthetic_speech(snr={snr!r}): the range (lowest, highest) of the ratio in dB, or None."
        )
    if not 0 <= reverberation <= 1:
        raise ValueError(f"synthetic_speech(reverberation={reverberation}): a share, from 0 to 1.")
    count = max(3 * EACH, round(frames / FRAMES_EACH))
    speakers = min(2 * len(VOICES), max(6, count // EACH))
    room = (*snr, reverberation) if snr is not None else (None, None, reverberation)
    jobs = [(seed, i, i % speakers, room, cepstral) for i in range(count)]

    def make():
        return list(in_parallel(_utterance, jobs, "speaking", workers)), {}

    settings = {"version": VERSION, "count": count, "speakers": speakers, "room": list(room)}
    settings |= {"seed": seed, "cepstral": cepstral}
    cache = default_cache() if cache == "default" else cache
    utterances, _ = stored("synthetic", settings, make, cache)
    voices = [u.speaker.split(":")[0] for u in utterances]
    parts = speaker_parts(voices, SHARES, seed)
    return assemble("synthetic speech", utterances, parts, normalise=normalise)


def _utterance(job: tuple[int, int, int, tuple[Any, Any, float], bool]) -> Utterance:
    seed, index, who, (low, high, reverberation), cepstral = job
    own = np.random.default_rng([seed, 1, who])
    order = np.random.default_rng([seed, 2]).permutation(len(VOICES))
    voice = VOICES[order[who % len(VOICES)]]
    pitch, spread, rate = own.integers([25, 30, 130], [75, 80, 200])
    rng = np.random.default_rng([seed, 0, index])
    spoken = speak(sentence(rng), f"en-us+{voice}", int(rate), int(pitch), int(spread))
    samples, segments = at_rate(spoken)
    samples = _in_a_room(samples / (samples.std() + 1e-6), rng, reverberation)
    if low is not None:
        samples = samples + _noise(len(samples), rng) * samples.std() * 10 ** (
            -rng.uniform(low, high) / 20
        )
    samples *= 0.1 * rng.uniform(0.5, 1.5)
    phones, token, third = label_frames(segments, frame_count(len(samples)))
    static = static_features(samples, cepstral=cepstral)
    return Utterance(f"{index:06d}", f"{voice}:{who}", None, static, phones, token, third)


def at_rate(spoken: Any) -> tuple[np.ndarray, Segments]:
    """Return the sound at 16 kHz, and its phones without stress marks, pauses as `_`."""
    from math import gcd

    from scipy.signal import resample_poly

    common = gcd(RATE, spoken.rate)
    samples = resample_poly(
        spoken.samples.astype(np.float64), RATE // common, spoken.rate // common
    )
    begin = np.round(spoken.start / spoken.rate * RATE).astype(np.int64)
    start = np.concatenate([[0], np.clip(begin, 0, len(samples))])
    end = np.concatenate([start[1:], [len(samples)]])
    phone = ["_", *(plain_phone(name) for name in spoken.phone)]
    kept = np.flatnonzero(end > start)
    return samples, Segments(start[kept], end[kept], [phone[k] for k in kept])


def plain_phone(name: str) -> str:
    """Return a phone without its stress; all pauses are `_`.

    >>> plain_phone("'oU"), plain_phone("_:")
    ('oU', '_')
    """
    return "_" if name.startswith("_") or not name else name.lstrip("',%=") or name


def _in_a_room(samples: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Add echoes: noise that falls by 60 dB in 0.15 to 0.5 s, 0 to 10 dB below the direct sound."""
    from scipy.signal import fftconvolve

    echoes, fall, below = rng.random() < share, rng.uniform(0.15, 0.5), rng.uniform(0, 10)
    tail = rng.standard_normal(int(RATE * 0.5))
    if not echoes:
        return samples
    tail *= 10 ** (-3 * np.arange(len(tail)) / (RATE * fall))
    tail *= 10 ** (-below / 20) / np.linalg.norm(tail)
    return samples + fftconvolve(samples, np.append(0.0, tail))[: len(samples)]


def _noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """Noise of variance 1 whose power falls with the frequency as f^-c, c from 0 (white) to 1.5."""
    colour = rng.uniform(0, 1.5)
    frequency = np.fft.rfftfreq(count, 1 / RATE)
    shape = np.maximum(frequency, 50.0) ** (-colour / 2)
    noise = np.fft.irfft(np.fft.rfft(rng.standard_normal(count)) * shape, count)
    return noise / noise.std()
