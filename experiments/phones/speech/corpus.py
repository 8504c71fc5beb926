"""A speech corpus as arrays: feature frames, the phone state of each, and who spoke it.

Utterances lie one after another in one matrix of frames. The input of a classifier is a window of
frames around its target; it is gathered from the matrix where it is needed (`context`), never stored:
eleven frames of 1.5 million would be 8 GB.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foretune._files.files import write_whole
from foretune.apps._tables import DataError
from foretune.report import say

from ...datasets import cache_folder
from .features import frame_centres, with_changes

PARTS = ("train", "validation", "test")
THIRDS = 3


class Segments(NamedTuple):
    """The phones of an utterance in order: phone k is spoken from sample start[k] until end[k]."""

    start: np.ndarray
    end: np.ndarray
    phone: list[str]
    third: np.ndarray | None = None
    """Where segments are aligned states: which third of its phone (0, 1, 2) each one is."""


class Utterance(NamedTuple):
    """One utterance as its reader made it."""

    name: str
    speaker: str
    part: str | None
    """Its part of the corpus, where that is given; or None."""
    static: np.ndarray
    """Features (frames, 41)."""
    phones: list[str]
    """Its phones, in order."""
    token: np.ndarray
    """For each frame, which of them is spoken; -1 for none."""
    third: np.ndarray
    """And which third of it, 0, 1 or 2."""


class Corpus(NamedTuple):
    """Frames of speech with phone states, in three parts with different speakers each."""

    name: str
    frames: np.ndarray
    """Normalised features, (n, 123) float32."""
    states: np.ndarray
    """Phone states, 3 x phone + third, (n,) int32; -1 where nothing is labelled."""
    token: np.ndarray
    """For each frame, the position of its phone in `tokens`."""
    tokens: np.ndarray
    """The phones of all utterances, one after another, as positions in `phones`."""
    first_frame: np.ndarray
    """Where each utterance begins in `frames`, and the end: (utterances + 1,)."""
    first_token: np.ndarray
    """Where each utterance begins in `tokens`, and the end."""
    speakers: list[str]
    """The speaker of each utterance."""
    part: np.ndarray
    """The part of each utterance: 0 train, 1 validation, 2 test."""
    phones: list[str]
    """The names of the phones."""
    skipped: dict[str, str]
    """Files that were left out, and why."""

    @property
    def classes(self) -> int:
        """The number of states."""
        return THIRDS * len(self.phones)

    def rows(self, part: str) -> np.ndarray:
        """Return the labelled frames of a part ("train", "validation" or "test")."""
        inside = np.repeat(self.part == PARTS.index(part), np.diff(self.first_frame))
        return np.flatnonzero(inside & (self.states >= 0)).astype(np.int32)

    def bounds(self) -> np.ndarray:
        """Return the first and the last frame of each frame's utterance, (n, 2) int32."""
        ends = np.column_stack([self.first_frame[:-1], self.first_frame[1:] - 1])
        return np.repeat(ends, np.diff(self.first_frame), axis=0).astype(np.int32)

    def summary(self) -> str:
        """Return a line about the corpus, with the labelled frames of each part."""
        counts = ", ".join(f"{len(self.rows(part)):,} {part}" for part in PARTS)
        return (
            f"{self.name}: {len(self.part):,} utterances of {len(set(self.speakers))} speakers, "
            f"{len(self.phones)} phones; frames: {counts}"
        )


def label_frames(segments: Segments, count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the phones, and for each frame its phone's position and third, by the frame's centre."""
    centre = frame_centres(count)
    k = np.searchsorted(segments.start, centre, side="right") - 1
    inside = (k >= 0) & (centre < segments.end[np.maximum(k, 0)])
    at = np.maximum(k, 0)
    if segments.third is None:
        length = np.maximum(segments.end[at] - segments.start[at], 1)
        third = np.minimum(THIRDS * (centre - segments.start[at]) // length, THIRDS - 1)
        phones, position = segments.phone, np.arange(len(segments.phone))
    else:  # a new phone begins where the name changes or the thirds begin again
        third = segments.third[at]
        new = np.ones(len(segments.phone), bool)
        for i in range(1, len(new)):
            same = segments.phone[i] == segments.phone[i - 1]
            new[i] = not same or segments.third[i] < segments.third[i - 1]
        position = np.cumsum(new) - 1
        phones = [phone for phone, first in zip(segments.phone, new, strict=True) if first]
    token = np.where(inside, position[at], -1)
    return phones, token.astype(np.int32), np.where(inside, third, 0).astype(np.int8)


def assemble(
    name: str,
    utterances: Sequence[Utterance],
    parts: Sequence[int],
    *,
    normalise: str,
    phones: Sequence[str] | None = None,
    skipped: dict[str, str] | None = None,
) -> Corpus:
    """Return the corpus of utterances that are assigned to parts."""
    if normalise not in ("speaker", "global", "none"):
        raise ValueError(f"normalise={normalise!r}: give 'speaker', 'global' or 'none'.")
    names = sorted({p for u in utterances for p in u.phones}) if phones is None else list(phones)
    number = {phone: k for k, phone in enumerate(names)}
    first_frame = np.cumsum([0, *(len(u.static) for u in utterances)])
    first_token = np.cumsum([0, *(len(u.phones) for u in utterances)])
    tokens = np.array([number[p] for u in utterances for p in u.phones], np.int32)
    token = np.concatenate(
        [
            np.where(u.token < 0, -1, u.token + f)
            for u, f in zip(utterances, first_token[:-1], strict=True)
        ]
    ).astype(np.int32)
    third = np.concatenate([u.third for u in utterances])
    states = np.where(token < 0, -1, THIRDS * tokens[np.maximum(token, 0)] + third)
    frames = np.concatenate([with_changes(u.static) for u in utterances])
    speakers, part = [u.speaker for u in utterances], np.asarray(parts, np.int8)
    _normalise(frames, first_frame, speakers, part, normalise)
    return Corpus(
        name,
        frames,
        states.astype(np.int32),
        token,
        tokens,
        first_frame,
        first_token,
        speakers,
        part,
        names,
        dict(skipped or {}),
    )


def _normalise(frames, first, speakers, part, how: str) -> None:
    """Give each coefficient mean 0 and variance 1, for each speaker or over the training part."""
    groups: dict[str, list[int]] = {}
    for i, speaker in enumerate(speakers):
        groups.setdefault(speaker if how == "speaker" else "all", []).append(i)
    for members in groups.values() if how != "none" else ():
        known = members if how == "speaker" else [i for i in members if part[i] == 0]
        sums = np.zeros((2, frames.shape[1]))
        for i in known:
            x = frames[first[i] : first[i + 1]].astype(np.float64)
            sums += [x.sum(axis=0), (x**2).sum(axis=0)]
        mean, square = sums / sum(first[i + 1] - first[i] for i in known)
        scale = 1 / np.sqrt(np.maximum(square - mean**2, 1e-6))
        for i in members:
            piece = frames[first[i] : first[i + 1]]
            piece -= mean.astype(np.float32)
            piece *= scale.astype(np.float32)


def speaker_parts(
    speakers: Sequence[str], shares: tuple[float, float, float], seed: int
) -> list[int]:
    """Return a part for each utterance, by speaker: shares of them in each part, one at least."""
    names = sorted(set(speakers))
    if len(names) < len(PARTS):
        raise DataError(
            f"there are {len(names)} speakers ({', '.join(names)}): training, validation and test need "
            "one each at least, since no speaker may be in two of them."
        )
    held = [max(1, round(share * len(names))) for share in shares[1:]]
    while len(names) - sum(held) < 1:
        held[int(np.argmax(held))] -= 1
    order = np.random.default_rng(seed).permutation(len(names))
    part_of = dict.fromkeys(names, 0)
    for rank, k in enumerate(order[: sum(held)]):
        part_of[names[k]] = 1 if rank < held[0] else 2
    return [part_of[speaker] for speaker in speakers]


def stored(
    kind: str,
    settings: dict[str, Any],
    make: Callable[[], tuple[list[Utterance], dict[str, str]]],
    cache: str | Path | None,
) -> tuple[list[Utterance], dict[str, str]]:
    """Return what `make` makes, from the cache where the same settings have been made before."""
    if cache is None:
        return make()
    text = json.dumps(settings, sort_keys=True)
    path = Path(cache) / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    if path.is_file():
        try:
            return _read(path)
        except Exception as error:  # cut off, or of another version: made again
            say(f"{path} cannot be read ({type(error).__name__}): it is made again")
            path.unlink()
    utterances, skipped = make()
    if not utterances:
        return utterances, skipped
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, utterances, skipped, text)
    return utterances, skipped


def default_cache() -> Path:
    """Return the folder where features are kept."""
    return cache_folder() / "speech"


def _write(path: Path, utterances: list[Utterance], skipped: dict[str, str], settings: str) -> None:
    names = sorted({p for u in utterances for p in u.phones})
    number = {phone: k for k, phone in enumerate(names)}
    about = {
        "settings": json.loads(settings),
        "phones": names,
        "skipped": skipped,
        "utterances": [
            [u.name, u.speaker, u.part, len(u.static), len(u.phones)] for u in utterances
        ],
    }
    arrays = {
        "about": np.array(json.dumps(about)),
        "static": np.concatenate([u.static for u in utterances]),
        "token": np.concatenate([u.token for u in utterances]),
        "third": np.concatenate([u.third for u in utterances]),
        "phone": np.array([number[p] for u in utterances for p in u.phones], np.int32),
    }
    write_whole(path, lambda file: np.savez(file, **arrays))


def _read(path: Path) -> tuple[list[Utterance], dict[str, str]]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        static, token, third = arrays["static"], arrays["token"], arrays["third"]
        phones = [about["phones"][k] for k in arrays["phone"]]
    found, f, p = [], 0, 0
    for name, speaker, part, frames, count in about["utterances"]:
        rows, f = slice(f, f + frames), f + frames
        spoken, p = phones[p : p + count], p + count
        found.append(Utterance(name, speaker, part, static[rows], spoken, token[rows], third[rows]))
    return found, about["skipped"]


def in_parallel(
    function: Callable[[Any], Any], jobs: Sequence[Any], title: str, workers: int | None
):
    """Yield `function(job)` for each job in order, over several processes, with a progress bar."""
    from joblib import Parallel, delayed
    from rich.console import Console
    from rich.progress import track

    many = len(jobs) >= 200  # starting processes takes seconds
    n_jobs = (-1 if many else 1) if workers is None else workers
    results: Any = Parallel(n_jobs=n_jobs, return_as="generator")(
        delayed(function)(job) for job in jobs
    )
    console = Console(stderr=True)
    yield from track(
        results, title, len(jobs), console=console, transient=True, disable=not console.is_terminal
    )
