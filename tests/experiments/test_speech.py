"""Speech data: sound files, features, TIMIT, synthetic speech."""

import os
import re
import wave
from pathlib import Path

import numpy as np
import pytest

from experiments.phones.speech.alignment import alignment
from experiments.phones.speech.audio import read_sound
from experiments.phones.speech.corpus import Segments, label_frames, speaker_parts
from experiments.phones.speech.features import (
    frame_centres,
    frame_count,
    mel_filters,
    static_features,
    with_changes,
)
from experiments.phones.speech.sentences import LEXICON, sentence
from experiments.phones.speech.synthetic import synthetic_speech
from experiments.phones.speech.timit import CORE_TEST, PHONES, timit
from foretune.apps._tables import DataError

SAMPLE = Path(os.environ.get("FORETUNE_DATA", "/nowhere")) / "timit-sample"
with_sample = pytest.mark.skipif(not SAMPLE.is_dir(), reason="no timit-sample in FORETUNE_DATA")


def write_wav(path, samples, rate=16_000, width=2, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(np.asarray(samples, "<i2" if width == 2 else "u1").tobytes())


def sphere(samples, order="01", coding="pcm", count=None):
    fields = {
        "channel_count -i": 1,
        "sample_count -i": len(samples) if count is None else count,
        "sample_rate -i": 16000,
        "sample_n_bytes -i": 2,
        "sample_byte_format -s2": order,
        f"sample_coding -s{len(coding)}": coding,
    }
    header = "NIST_1A\n   1024\n" + "".join(f"{k} {v}\n" for k, v in fields.items()) + "end_head\n"
    raw = np.asarray(samples, "<i2" if order == "01" else ">i2").tobytes()
    return header.encode().ljust(1024) + raw


@pytest.fixture
def noise():
    return np.random.default_rng(0).integers(-3000, 3000, 8000)


class TestSound:
    @pytest.mark.parametrize("order", ["01", "10"])
    def test_sphere_and_riff_are_the_same_samples(self, tmp_path, noise, order):
        write_wav(tmp_path / "a.wav", noise)
        (tmp_path / "b.wav").write_bytes(sphere(noise, order))
        a, b = read_sound(tmp_path / "a.wav"), read_sound(tmp_path / "b.wav")
        np.testing.assert_array_equal(a.samples, b.samples)
        np.testing.assert_array_equal(a.samples, noise / np.float32(32768))
        assert a.rate == b.rate == 16_000

    def test_channels_are_averaged(self, tmp_path):
        write_wav(tmp_path / "a.wav", [100, 300, -50, 50], channels=2)
        np.testing.assert_allclose(read_sound(tmp_path / "a.wav").samples, [200 / 32768, 0])

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (lambda x: b"ID3 not sound", "neither a RIFF"),
            (lambda x: sphere(x)[:-1000], "cut off, 7,500 of the 8,000"),
            (lambda x: sphere(x, coding="pcm,embedded-shorten-v2.00"), "coded as"),
            (lambda x: b"NIST_1A\n   1024\nnothing here", "damaged SPHERE header"),
            (lambda x: b"RIFF\x00\x00", "not a readable wav"),
        ],
    )
    def test_what_cannot_be_read_says_so(self, tmp_path, noise, raw, message):
        (tmp_path / "a.wav").write_bytes(raw(noise))
        with pytest.raises(DataError, match=message) as error:
            read_sound(tmp_path / "a.wav")
        assert "a.wav" in str(error.value)

    def test_truncated_wav_and_other_widths(self, tmp_path, noise):
        write_wav(tmp_path / "a.wav", noise)
        raw = (tmp_path / "a.wav").read_bytes()
        (tmp_path / "a.wav").write_bytes(raw[:-400])
        with pytest.raises(DataError, match="cut off, 7,800 of the 8,000"):
            read_sound(tmp_path / "a.wav")
        write_wav(tmp_path / "b.wav", noise % 200, width=1)
        with pytest.raises(DataError, match="8-bit"):
            read_sound(tmp_path / "b.wav")


class TestFeatures:
    @pytest.mark.parametrize(
        ("samples", "frames"), [(0, 0), (399, 0), (400, 1), (559, 1), (560, 2)]
    )
    def test_frame_counts(self, samples, frames):
        assert frame_count(samples) == frames == len(static_features(np.zeros(samples)))

    def test_a_tone_is_loudest_in_the_filter_around_it(self):
        t = np.arange(16_000) / 16_000
        peaks = np.linspace(0, 8000, 257)[np.argmax(mel_filters(), axis=1)]
        for frequency in (300, 1000, 3000):
            found = static_features(np.sin(2 * np.pi * frequency * t))
            loudest = peaks[np.argmax(found[:, :40], axis=1)]
            assert np.all(np.abs(loudest - frequency) < 0.12 * frequency)

    def test_energy_is_the_log_of_the_mean_square(self):
        found = static_features(np.full(4000, 0.5))
        np.testing.assert_allclose(found[:, 40], np.log(0.25), rtol=1e-5)
        assert np.isfinite(static_features(np.zeros(4000))).all()

    def test_changes_of_a_ramp(self):
        ramp = np.arange(20.0)[:, None] * np.array([[1.0, -2.0]])
        found = with_changes(ramp.astype(np.float32))
        assert found.shape == (20, 6)
        np.testing.assert_allclose(found[4:-4, 2:4], [[1, -2]] * 12, atol=1e-6)
        np.testing.assert_allclose(found[4:-4, 4:], 0, atol=1e-6)

    def test_cepstrum_is_a_rotation(self, noise):
        plain, cepstrum = (static_features(noise / 32768, cepstral=c) for c in (False, True))
        lengths = [np.linalg.norm(x[:, :40], axis=1) for x in (plain, cepstrum)]
        np.testing.assert_allclose(*lengths, rtol=1e-5)
        np.testing.assert_array_equal(plain[:, 40], cepstrum[:, 40])


class TestLabels:
    def test_phones_are_cut_in_thirds(self):
        segments = Segments(np.array([0, 4800]), np.array([4800, 9600]), ["a", "b"])
        phones, token, third = label_frames(segments, frame_count(9600))
        centre = frame_centres(len(token))
        np.testing.assert_array_equal(token, centre // 4800)
        np.testing.assert_array_equal(third, centre % 4800 // 1600)
        assert phones == ["a", "b"]

    def test_frames_outside_are_not_labelled(self):
        segments = Segments(np.array([1600, 4000]), np.array([3200, 4800]), ["a", "b"])
        _, token, _ = label_frames(segments, 40)
        centre = frame_centres(40)
        inside = ((centre >= 1600) & (centre < 3200)) | ((centre >= 4000) & (centre < 4800))
        np.testing.assert_array_equal(token >= 0, inside)

    def test_alignment_of_states(self):
        third = np.array([0, 1, 2, 0, 2])
        start = np.arange(5) * 1600
        segments = Segments(start, start + 1600, ["a", "a", "a", "a", "b"], third)
        phones, token, found = label_frames(segments, frame_count(8000))
        assert phones == ["a", "a", "b"]  # the second begins where the thirds begin again
        k = frame_centres(len(token)) // 1600
        np.testing.assert_array_equal(token, np.array([0, 0, 0, 1, 2])[k])
        np.testing.assert_array_equal(found, third[k])

    def test_no_speaker_is_in_two_parts(self):
        speakers = [f"s{i % 7}" for i in range(50)]
        parts = speaker_parts(speakers, (0.6, 0.2, 0.2), 0)
        by_part = [{s for s, p in zip(speakers, parts, strict=True) if p == k} for k in range(3)]
        assert all(by_part)
        assert len(set.union(*by_part)) == sum(map(len, by_part))
        assert set(speaker_parts(["a", "b", "c"], (0.98, 0.01, 0.01), 0)) == {0, 1, 2}
        with pytest.raises(DataError, match="2 speakers"):
            speaker_parts(["a", "b"], (0.6, 0.2, 0.2), 0)


@pytest.fixture
def copy(tmp_path):
    """A made-up TIMIT in LDC's layout: two training, two validation and one test speaker."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "TIMIT"
    for part, speaker in [
        ("TRAIN", "FCJF0"),
        ("TRAIN", "MDAC0"),
        ("TEST", "FAKS0"),
        ("TEST", "MSTK0"),
        ("TEST", CORE_TEST[0].upper()),
    ]:
        for name in ("SA1", "SI1", "SX2"):
            base = folder / part / "DR1" / speaker / name
            samples = rng.integers(-2000, 2000, 16_000)
            base.parent.mkdir(parents=True, exist_ok=True)
            base.with_suffix(".WAV").write_bytes(sphere(samples))
            base.with_suffix(".PHN").write_text("0 4000 h#\n4000 9000 iy\n9000 16000 s\n")
    return folder


class TestTimit:
    def test_parts_of_ldc_layout(self, copy):
        corpus = timit(copy, cache=None)
        of_part = [
            {s for s, p in zip(corpus.speakers, corpus.part, strict=True) if p == k}
            for k in range(3)
        ]
        assert of_part == [{"fcjf0", "mdac0"}, {"faks0", "mstk0"}, {CORE_TEST[0]}]
        assert len(corpus.part) == 10  # without the sa sentences
        assert len(timit(copy, cache=None, sa=True).part) == 15
        assert corpus.classes == 183
        assert len(corpus.frames) == 10 * frame_count(16_000)
        assert not corpus.skipped

    def test_test_without_core_speakers_is_dealt_in_halves(self, copy):
        (copy / "TEST" / "DR1" / CORE_TEST[0].upper()).rename(copy / "TEST" / "DR1" / "MXXX0")
        corpus = timit(copy, cache=None)
        assert "TEST dealt in halves" in corpus.summary()
        train = {s for s, p in zip(corpus.speakers, corpus.part, strict=True) if p == 0}
        assert train == {"fcjf0", "mdac0"}
        assert set(corpus.part) == {0, 1, 2}

    def test_one_speakers_folder_is_one_speaker(self, copy):
        with pytest.raises(DataError, match=r"there are 1 speakers \(fcjf0\)"):
            timit(copy / "TRAIN" / "DR1" / "FCJF0", cache=None)

    def test_states_are_those_of_the_labels(self, copy):
        corpus = timit(copy, cache=None)
        one = corpus.states[: frame_count(16_000)]
        centre = frame_centres(len(one))
        expected = np.select(
            [centre < 4000, centre < 9000],
            [
                3 * PHONES.index("h#") + 3 * centre // 4000,
                3 * PHONES.index("iy") + 3 * (centre - 4000) // 5000,
            ],
            3 * PHONES.index("s") + 3 * (centre - 9000) // 7000,
        )
        np.testing.assert_array_equal(one, expected)
        np.testing.assert_array_equal(
            corpus.tokens[:3], [PHONES.index(p) for p in ("h#", "iy", "s")]
        )

    @pytest.mark.parametrize("normalise", ["speaker", "global", "none"])
    def test_normalisation(self, copy, normalise):
        corpus = timit(copy, cache=None, normalise=normalise)
        of_speaker = np.array([s == "fcjf0" for s in corpus.speakers])
        chosen = of_speaker if normalise == "speaker" else corpus.part == 0
        rows = np.repeat(chosen, np.diff(corpus.first_frame))
        middle, spread = corpus.frames[rows].mean(axis=0), corpus.frames[rows].std(axis=0)
        centred = np.allclose(middle, 0, atol=1e-4) and np.allclose(spread, 1, atol=1e-3)
        assert centred == (normalise != "none")
        with pytest.raises(ValueError, match="normalise='speakers'"):
            timit(copy, cache=None, normalise="speakers")

    def test_bad_files_are_left_out_and_named(self, copy):
        one = copy / "TRAIN" / "DR1" / "FCJF0"
        two = copy / "TRAIN" / "DR1" / "MDAC0"
        raw = (one / "SI1.WAV").read_bytes()
        (one / "SI1.WAV").write_bytes(raw[:-2000])
        (one / "SX2.PHN").unlink()
        (two / "SI1.PHN").write_text("0 4000 h#\n4000 30000 iy\n")
        corpus = timit(copy, cache=None)
        assert len(corpus.part) == 7
        reasons = {Path(name).name: why for name, why in corpus.skipped.items()}
        assert len(corpus.skipped) == 3
        assert any("cut off" in why for why in corpus.skipped.values())
        assert any("no .phn file" in why for why in corpus.skipped.values())
        assert "runs to sample 30,000, the sound has 16,000" in " ".join(reasons.values())

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ("0 4000 h#\n4000 9000 xx\n", "'xx' is none of TIMIT's 61 phones"),
            ("0 4000 h#\n3000 9000 iy\n", "overlap"),
            ("0 4000\n", "not `start end phone`|without its 3 fields"),
            ("zero 4000 h#\n", "not `start end phone`"),
            ("", "empty"),
        ],
    )
    def test_bad_labels(self, copy, labels, message):
        (copy / "TRAIN" / "DR1" / "FCJF0" / "SI1.PHN").write_text(labels)
        (why,) = timit(copy, cache=None).skipped.values()
        assert re.search(message, why), why

    def test_labels_a_little_past_the_sound_are_fine(self, copy):
        path = copy / "TRAIN" / "DR1" / "FCJF0" / "SI1.PHN"
        path.write_text("0 4000 h#\n4000 16200 iy\n")
        assert not timit(copy, cache=None).skipped

    def test_aligned_states_are_taken(self, copy):
        path = copy / "TRAIN" / "DR1" / "FCJF0" / "SI1.ALI"
        path.write_text("0 8000 iy 0\n8000 9000 iy 1\n9000 16000 iy 2\n")
        corpus = timit(copy, cache=None)
        u = corpus.speakers.index("fcjf0")
        one = corpus.states[corpus.first_frame[u] : corpus.first_frame[u + 1]]
        centre = frame_centres(len(one))
        third = (centre >= 8000).astype(int) + (centre >= 9000)
        np.testing.assert_array_equal(one, 3 * PHONES.index("iy") + third)

    def test_nothing_to_read(self, tmp_path, copy):
        with pytest.raises(DataError, match="no folder"):
            timit(tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match=r"holds no \.wav file"):
            timit(tmp_path / "empty")
        for path in copy.rglob("*.PHN"):
            path.unlink()
        for cache in (None, tmp_path / "cache"):
            with pytest.raises(DataError, match=r"none of the 10 audio files.*no \.phn"):
                timit(copy, cache=cache)

    def test_two_versions_of_a_sound_count_once(self, copy):
        for path in list(copy.rglob("*.WAV")):
            path.with_name(f"{path.name}.wav").write_bytes(path.read_bytes())
        assert len(timit(copy, cache=None).part) == 10

    def test_a_cache_that_cannot_be_written_whole_is_not_there(self, copy, tmp_path, monkeypatch):
        def killed(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("os.replace", killed)
            with pytest.raises(KeyboardInterrupt):
                timit(copy, cache=tmp_path / "cache")
        assert not list((tmp_path / "cache").iterdir())

    def test_the_cache_gives_the_same_and_sees_a_change(self, copy, tmp_path):
        cache = tmp_path / "cache"
        first, second = timit(copy, cache=cache), timit(copy, cache=cache)
        assert len(list(cache.iterdir())) == 1
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)
        (copy / "TRAIN" / "DR1" / "FCJF0" / "SI1.PHN").write_text("0 16000 iy\n")
        assert not np.array_equal(timit(copy, cache=cache).states, first.states)
        assert not np.array_equal(timit(copy, cache=cache, cepstral=True).frames, first.frames)
        for path in cache.iterdir():
            path.write_bytes(path.read_bytes()[:500])  # cut off
        np.testing.assert_array_equal(timit(copy, cache=cache).frames, first.frames)

    @with_sample
    def test_the_real_sample(self):
        corpus = timit(SAMPLE, cache=None)
        assert not corpus.skipped
        assert len(corpus.part) == 14 * 8
        assert len(set(corpus.speakers)) == 14
        sounds = [p for p in sorted(SAMPLE.rglob("*.wav")) if not p.stem.startswith("sa")]
        expected = [frame_count(len(read_sound(p).samples)) for p in sounds]
        np.testing.assert_array_equal(np.diff(corpus.first_frame), expected)
        assert (corpus.states < 0).mean() < 0.001
        of_part = [set(np.array(corpus.speakers)[corpus.part == k]) for k in range(3)]
        assert sum(map(len, of_part)) == 14
        assert (SAMPLE / "dr1-fvmh0" / "si836.wav").read_bytes().startswith(b"NIST_1A")
        assert "fvmh0" in corpus.speakers

    @with_sample
    def test_its_labels_sit_where_the_sound_is(self):
        accuracy = alignment(timit(SAMPLE, cache=None), range(-3, 4))
        assert max(accuracy, key=accuracy.__getitem__) == 0
        assert accuracy[0] > 0.25


class TestSentences:
    def test_the_same_seed_says_the_same(self):
        first, second = (
            [sentence(rng) for _ in range(50)] for rng in map(np.random.default_rng, [1, 1])
        )
        assert first == second
        assert len(set(first)) == 50

    def test_words_are_listed_once(self):
        for kind, words in LEXICON.items():
            assert kind == "determiner" or kind == "joiner" or len(set(words)) == len(words), kind


class TestSynthetic:
    @pytest.fixture(scope="class")
    @staticmethod
    def corpus(tmp_path_factory):
        pytest.importorskip("espeakng_loader", reason="the extra `speech` is not installed")
        return synthetic_speech(60_000, cache=tmp_path_factory.mktemp("cache"), snr=None)

    def test_a_voice_says_the_same_whatever_was_said_before(self):
        pytest.importorskip("espeakng_loader", reason="the extra `speech` is not installed")
        from experiments.phones.speech.espeak import speak

        first = speak("A bird sang.", "en-us+f2")
        speak("Something else, by somebody else.", "en-us+m3", rate=120, pitch=20)
        second = speak("A bird sang.", "en-us+f2")
        np.testing.assert_array_equal(first.samples, second.samples)
        np.testing.assert_array_equal(first.start, second.start)
        assert first.phone == second.phone
        with pytest.raises(DataError, match="no voice 'nobody'"):
            speak("A bird sang.", "nobody")

    def test_the_same_over_processes_and_another_with_another_seed(self, tmp_path):
        pytest.importorskip("espeakng_loader", reason="the extra `speech` is not installed")
        one, two = (synthetic_speech(9_000, cache=None, workers=n) for n in (1, 2))
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)
        other = synthetic_speech(9_000, cache=None, seed=1)
        assert not np.array_equal(one.states[:300], other.states[:300])

    def test_sizes_and_parts(self, corpus):
        assert 50_000 < len(corpus.frames) < 70_000
        assert corpus.frames.shape == (len(corpus.states), 123)
        assert np.isfinite(corpus.frames).all()
        voices = [
            {s.split(":")[0] for s, p in zip(corpus.speakers, corpus.part, strict=True) if p == k}
            for k in range(3)
        ]
        assert all(voices)
        assert len(set.union(*voices)) == sum(map(len, voices))  # no voice in two parts
        assert (corpus.states >= 0).mean() > 0.99
        assert corpus.states.max() < corpus.classes

    def test_labels_sit_where_the_sound_is(self, corpus):
        accuracy = alignment(corpus, range(-3, 4))
        assert max(accuracy, key=accuracy.__getitem__) == 0
        assert accuracy[0] > 0.3

    def test_noise_and_rooms_change_the_sound_not_the_labels(self, corpus):
        noisy = synthetic_speech(9_000, cache=None, snr=(-5.0, 5.0))
        clean = synthetic_speech(9_000, cache=None, snr=None, reverberation=0.0)
        np.testing.assert_array_equal(noisy.states, clean.states)
        assert not np.allclose(noisy.frames, clean.frames)

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="frames=0"):
            synthetic_speech(0)
        with pytest.raises(ValueError, match="reverberation=2"):
            synthetic_speech(1000, reverberation=2)
        for snr in (10, (20, 10), (1, 2, 3)):
            with pytest.raises(ValueError, match="the range"):
                synthetic_speech(1000, snr=snr)
        for seed in (-1, 1.5):
            with pytest.raises(ValueError, match="seed="):
                synthetic_speech(1000, seed=seed)
        with pytest.raises(ValueError, match="frames='a'"):
            synthetic_speech("a")
