"""TIMIT: hand-labelled American English (Garofolo et al., 1993), from the reader's own copy.

A copy in LDC's layout (TRAIN/DR1/FCJF0/SI1027.WAV and .PHN) keeps its parts: TRAIN trains, the 24
speakers of the core test set test, the rest of TEST validates (where none of the 24 is there, TEST is
dealt in halves). In any other layout a folder is a speaker, and speakers are dealt to the parts. The
two `sa` sentences, which every speaker reads, are left out as is usual.
"""

from pathlib import Path
from typing import Any

import numpy as np

from foretune.apps._tables import DataError

from .audio import read_sound
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
from .features import LENGTH, RATE, frame_count, static_features

_PHONES = """
    aa ae ah ao aw ax ax-h axr ay b bcl ch d dcl dh dx eh el em en eng epi er ey f g gcl h# hh
    hv ih ix iy jh k kcl l m n ng nx ow oy p pau pcl q r s sh t tcl th uh uw ux v w y z zh
"""
PHONES = _PHONES.split()
"""The 61 phones."""
_CORE_TEST = """
    mdab0 mwbt0 felc0 mtas1 mwew0 fpas0 mjmp0 mlnt0 fpkt0 mlll0 mtls0 fjlm0 mbpm0 mklt0 fnlp0
    mcmj0 mjdh0 fmgd0 mgrt0 mnjm0 fdhc0 mjln0 mpam0 fmld0
"""
CORE_TEST = _CORE_TEST.split()
SHARES = (0.6, 0.2, 0.2)
"""Of the speakers, where the layout does not say."""
SLACK = LENGTH
"""Samples by which labels may run past the sound: some of TIMIT's do, by a few milliseconds."""
VERSION = 1


def timit(
    folder: str | Path,
    *,
    normalise: str = "speaker",
    cepstral: bool = False,
    sa: bool = False,
    seed: int = 0,
    cache: Any = "default",
    workers: int | None = None,
) -> Corpus:
    """Read a TIMIT folder: audio (RIFF or NIST SPHERE) with a `.phn` file beside each.

    Args:
        folder: LDC's layout, or one folder for each speaker.
        normalise: each coefficient to mean 0 and variance 1, by "speaker", "global" (over the training
            part) or "none".
        cepstral: the cosine transform of the 40 log filter outputs instead of these.
        sa: also the two sentences that all speakers read.
        seed: deals the speakers to the parts, where the layout does not.
        cache: the folder in which features are kept; None keeps none.
        workers: processes that read; by default all cores for many files.

    Each of the 61 phones is cut in thirds, which makes 183 states. Where a file with the ending `.ali`
    lies beside a `.phn`, with lines `start end phone third` (samples; third 0, 1 or 2), its alignment
    is taken instead. Files that cannot be used are left out and named in `skipped`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"no folder {folder}: give the folder of your copy of TIMIT.")
    sounds = _sounds(folder)
    if not sounds:
        raise DataError(
            f"{folder} holds no .wav file, nor do the folders in it: give the folder of your copy of "
            "TIMIT, with its TRAIN and TEST folders or one folder for each speaker."
        )
    wanted = [path for path in sounds if sa or not path.stem.lower().startswith("sa")]
    if not wanted:
        raise DataError(f"{folder} holds only `sa` sentences: read them with sa=True.")
    own = Path(folder.resolve().name)  # the speaker, where the folder is one speaker's
    jobs = [(str(path), str(own / path.relative_to(folder)), cepstral) for path in wanted]

    def make():
        found, skipped = [], {}
        for (_, name, _), result in zip(
            jobs, in_parallel(_utterance, jobs, "reading TIMIT", workers), strict=True
        ):
            if isinstance(result, Utterance):
                found.append(result)
            else:
                skipped[name] = result
        return found, skipped

    settings = {
        "version": VERSION,
        "cepstral": cepstral,
        "files": [_stamp(other) for path in wanted for other in _related(path)],
    }
    cache = default_cache() if cache == "default" else cache
    utterances, skipped = stored("timit", settings, make, cache)
    if not utterances:
        shown = "; ".join(list(skipped.values())[:3])
        raise DataError(f"none of the {len(skipped)} audio files in {folder} can be used: {shown}")
    parts, how = _parts(utterances, seed)
    return assemble(
        f"TIMIT ({how})", utterances, parts, normalise=normalise, phones=PHONES, skipped=skipped
    )


def _parts(utterances: list[Utterance], seed: int) -> tuple[list[int], str]:
    """Return the part of each utterance, and in words by what rule."""
    speakers, given = [u.speaker for u in utterances], {u.part for u in utterances}
    if given == {"train", "validation", "test"}:
        number = {"train": 0, "validation": 1, "test": 2}
        return [number[str(u.part)] for u in utterances], "TRAIN, TEST and the core test set"
    held = sorted({u.speaker for u in utterances if u.part in ("validation", "test")})
    if given <= {"train", "validation", "test"} and "train" in given and len(held) > 1:
        order = np.random.default_rng(seed).permutation(len(held))
        tests = {held[k] for k in order[: len(held) // 2]}
        parts = [0 if u.part == "train" else 2 if u.speaker in tests else 1 for u in utterances]
        return parts, "TRAIN, and TEST dealt in halves"
    return speaker_parts(speakers, SHARES, seed), "speakers dealt to the parts"


def _sounds(folder: Path) -> list[Path]:
    """Return the audio files; of two versions of one utterance the first."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() == ".wav" and path.is_file():
            name = path.name.lower().removesuffix(".wav").removesuffix(".wav")  # SA1.WAV.wav
            found.setdefault(str(path.parent / name).lower(), path)
    return list(found.values())


def _beside(path: Path, ending: str) -> Path | None:
    stem = path.name.split(".")[0].lower()
    others = (p for p in path.parent.iterdir() if p.name.lower() == f"{stem}{ending}")
    return next(others, None)


def _related(path: Path) -> list[Path]:
    return [p for p in (path, _beside(path, ".phn"), _beside(path, ".ali")) if p is not None]


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _utterance(job: tuple[str, str, bool]) -> Utterance | str:
    """Return the utterance, or why it cannot be used."""
    path, name, cepstral = Path(job[0]), job[1], job[2]
    try:
        sound = read_sound(path)
        if sound.rate != RATE:
            raise DataError(f"{path}: {sound.rate:,} samples a second; TIMIT has {RATE:,}.")
        count = frame_count(len(sound.samples))
        if count == 0:
            raise DataError(
                f"{path}: {len(sound.samples)} samples, less than one frame ({LENGTH})."
            )
        segments = _segments(path, len(sound.samples))
    except (DataError, OSError) as error:
        return str(error)
    phones, token, third = label_frames(segments, count)
    if (token < 0).all():
        return f"{path}: no frame is labelled."
    static = static_features(sound.samples, cepstral=cepstral)
    speaker, part = _who(Path(name))
    return Utterance(name, speaker, part, static, phones, token, third)


def _who(name: Path) -> tuple[str, str | None]:
    """Return the speaker, and the part where LDC's layout tells it."""
    folders = [folder.lower() for folder in name.parts[:-1]]
    speaker = folders[-1].split("-")[-1] if folders else name.stem.lower()
    if "train" in folders:
        return speaker, "train"
    if "test" in folders:
        return speaker, "test" if speaker in CORE_TEST else "validation"
    return speaker, None


def _segments(path: Path, samples: int) -> Segments:
    labels, aligned = _beside(path, ".phn"), _beside(path, ".ali")
    if aligned is None and labels is None:
        raise DataError(f"{path}: there is no .phn file beside it.")
    source, fields = (labels, 3) if aligned is None else (aligned, 4)
    assert source is not None
    text = source.read_text(encoding="utf-8", errors="replace")
    rows = [line.split() for line in text.splitlines() if line.strip()]
    try:
        start, end = (np.array([int(row[k]) for row in rows], np.int64) for k in (0, 1))
        third = np.array([int(row[3]) for row in rows]) if fields == 4 else None
    except (ValueError, IndexError) as error:
        expected = "start end phone third" if fields == 4 else "start end phone"
        raise DataError(f"{source}: a line that is not `{expected}`.") from error
    if not rows or any(len(row) != fields for row in rows):
        raise DataError(f"{source}: empty, or a line without its {fields} fields.")
    phone = [row[2] for row in rows]
    if strange := sorted(set(phone) - set(PHONES)):
        raise DataError(f"{source}: {strange[0]!r} is none of TIMIT's 61 phones.")
    if third is not None and not set(third.tolist()) <= {0, 1, 2}:
        raise DataError(f"{source}: a third that is not 0, 1 or 2.")
    if (end <= start).any() or (start[1:] < end[:-1]).any() or start[0] < 0:
        raise DataError(f"{source}: its phones overlap, run backwards or have no length.")
    if end[-1] > samples + SLACK:
        raise DataError(
            f"{source}: runs to sample {end[-1]:,}, the sound has {samples:,}. Are they of one "
            "utterance?"
        )
    return Segments(start, end, phone, third)
