"""`calibrate` in the library: each part on first use, kept in a folder, gone on with after an interruption."""

import gc
import json
import tempfile
from pathlib import Path

import pytest
import torch

import shadowattn
from shadowattn import calibrate as calibrate_function
from shadowattn.artifacts import Units
from shadowattn.calibration import Windows
from shadowattn.data.stdlib import stdlib_text
from shadowattn.errors import InputError
from shadowattn.models import fingerprint, load_bundled
from shadowattn.offline import observe_key_offset, observe_scales, scale_grid
from shadowattn.offline.allocators.uniform import Uniform
from shadowattn.online.estimators.hierarchical import Hierarchical

SMALL = {"importance_windows": Windows(24, 2), "windows": Windows(64, 1), "chunk_tokens": 32}


@pytest.fixture(scope="module")
def loaded():
    return load_bundled()


@pytest.fixture(scope="module")
def text():
    return stdlib_text("calibration")[:20_000]


def calibrate(loaded, text, **options):
    options = SMALL | {"tokenizer": loaded.tokenizer} | options
    return calibrate_function(loaded.model, text=text, **options)


def test_it_gives_a_profile_and_a_bank_that_attach_takes(loaded, text):
    made = calibrate(loaded, text, retention=0.3)
    profile = made.profile
    assert profile.fingerprint == fingerprint(loaded.model)
    assert profile.mean_retention == pytest.approx(0.3)
    assert len({value for layer in profile.retention for value in layer}) > 2  # heads differ
    observations = observe_scales(loaded.model, made.tokens, chunk_tokens=32)
    assert made.scales == scale_grid(observations)
    bank = made.bank(96)
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :90]
    with torch.no_grad(), shadowattn.attach(loaded.model, profile, bank) as run:
        logits = loaded.model(ids).logits
    assert logits.isfinite().all()
    assert 0.28 < run.counters.density < 0.34
    assert run.estimator.launched > 0


def test_what_nobody_asks_for_is_not_measured(loaded, text, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("measured")

    for name in ("measure_ablations", "measure_sensitivity"):
        monkeypatch.setattr(f"shadowattn.calibration.{name}", never)
    assert calibrate(loaded, text, allocator="uniform").profile.retention == ((0.2,) * 4,) * 8
    with pytest.raises(AssertionError, match="measured"):
        _ = calibrate(loaded, text).profile
    with pytest.raises(AssertionError, match="measured"):
        _ = calibrate(loaded, text, allocator="waterfill").profile


def test_an_interrupted_calibration_goes_on_from_its_folder(loaded, text, tmp_path, monkeypatch):
    expected = calibrate(loaded, text, allocator="waterfill").profile
    put, done = Units.put, []

    def interrupted(self, key, value):
        if len(done) == 7:
            raise KeyboardInterrupt
        done.append(key)
        put(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(Units, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = calibrate(loaded, text, allocator="waterfill", folder=tmp_path / "kept").profile
    again = []
    monkeypatch.setattr(Units, "put", lambda self, key, value: (again.append(key), put(self, key, value))[1])
    assert calibrate(loaded, text, allocator="waterfill", folder=tmp_path / "kept").profile == expected
    assert sorted(done[:5]) == ["L0", "L0_H0", "L0_H1", "L0_H2", "L0_H3"]  # one piece of work, and part of the next
    assert not set(done[:5]) & set(again)
    again.clear()
    assert calibrate(loaded, text, allocator="waterfill", folder=tmp_path / "kept").profile == expected
    assert again == []
    results = {path.parent.name.split("-")[0] for path in (tmp_path / "kept").glob("*/result.json")}
    assert results == {"importance", "scales"}


def test_a_key_offset_goes_with_scales_profile_and_bank(loaded, text, tmp_path, monkeypatch):
    how = {"allocator": "uniform", "folder": tmp_path}
    plain = calibrate(loaded, text, **how)
    made = {kind: calibrate(loaded, text, key_offset=kind, **how) for kind in ("mean", "midrange")}
    assert plain.key_offset is plain.scales.key_offset is plain.ranges.key_offset is None
    for kind, one in made.items():
        assert one.key_offset.how == kind
        assert one.key_offset == observe_key_offset(loaded.model, one.tokens, chunk_tokens=32, how=kind)
        assert one.profile.scales.key_offset == one.bank(64).key_offset == one.ranges.key_offset == one.key_offset
        assert one.scales.q_scales == plain.scales.q_scales
        assert one.scales.k_scales != plain.scales.k_scales
    stages = sorted(path.parent.name.split("-")[0] for path in tmp_path.glob("*/result.json"))
    assert stages == ["attention_ranges"] * 3 + ["key_offset"] * 2 + ["scales"] * 3
    profile = made["mean"].profile
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :60]
    with torch.no_grad(), shadowattn.attach(loaded.model, profile, made["mean"].bank(64)) as run:
        assert loaded.model(ids).logits.isfinite().all()
    assert run.estimator.launched > 0
    for name in ("observe_key_offset", "observe_scales"):
        monkeypatch.setattr(f"shadowattn.calibration.{name}", lambda *_, **__: pytest.fail("measured again"))
    assert calibrate(loaded, text, key_offset="mean", **how).profile == profile


def test_first_looks_are_kept_by_their_settings(loaded, text, tmp_path, monkeypatch):
    made = calibrate(loaded, text, folder=tmp_path)
    first = made.first_look(1.0, 8)
    estimator = Hierarchical(candidates=1.0, block_rows=8, flat_share=0.5, first_look=first)
    with torch.no_grad(), shadowattn.attach(loaded.model, 0.2, estimator=estimator):
        assert loaded.model(made.tokens[:1]).logits.isfinite().all()
    other = calibrate(loaded, text, folder=tmp_path, key_offset="mean").first_look(1.0, 8)
    assert other != first
    monkeypatch.setattr("shadowattn.calibration.observe_first_look", lambda *arguments, **options: pytest.fail("measured again"))
    assert calibrate(loaded, text, folder=tmp_path).first_look(1.0, 8) == first


def test_other_code_measures_again(loaded, text, tmp_path, monkeypatch):
    how = {"allocator": "uniform", "folder": tmp_path}
    _ = calibrate(loaded, text, **how).scales
    (manifest,) = tmp_path.glob("scales-*/manifest.json")
    before = json.loads(manifest.read_text())["code"]
    monkeypatch.setattr("shadowattn.calibration.library_code", lambda: "other")
    _ = calibrate(loaded, text, **how).scales
    assert before != json.loads(manifest.read_text())["code"] == "other"


def test_compiled_graphs_are_kept_in_the_folder(loaded, text, tmp_path):
    made = calibrate(loaded, text, allocator=Uniform(), folder=tmp_path)
    assert len(made.bank(64)) == len(made.bank(64))
    assert list((tmp_path / "compiled").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 2}, "retention"),
        ({"allocator": "fair"}, "allocator: expected one of artifact, error_greedy"),
        ({"allocator": Uniform}, "allocator: expected a Allocator"),
        ({"importance": "half"}, "importance: expected one of zero, uniform"),
        ({"folder": 3}, "folder: expected a path"),
        ({"folder": "/proc/nowhere"}, "folder: expected one to write to"),
        ({"tokenizer": str.split}, "tokenizer: expected the model's"),
        ({"progress": 3}, "progress: expected one that can be called"),
        ({"allocator": "file"}, "allocator=file: expected a head-retention.txt"),
        ({"text": __file__}, "text: expected the text itself, got the name of a file"),
        ({"windows": (64, 1)}, "windows: expected a Windows"),
        ({"windows": Windows(10**6, 1)}, "windows: the model's context is 4096 tokens"),
        ({"importance_windows": Windows(4000, 1), "text": "short"}, "importance_windows"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"key_offset": "median"}, "key_offset: expected one of none, mean, midrange"),
        ({"key_offset": None}, "key_offset: expected one of none, mean, midrange"),
        ({"text": 3}, "text: expected a str"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(loaded, text, options, message, monkeypatch):
    monkeypatch.setattr("shadowattn.calibration.observe_scales", None)
    with pytest.raises(InputError, match=message):
        calibrate(loaded, options.pop("text", text), **options)


def test_a_file_of_text_and_one_that_is_none(loaded, text, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    assert calibrate(loaded, tmp_path / "text.txt").tokens.equal(calibrate(loaded, text).tokens)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "bytes", tmp_path / "nothing"):
        with pytest.raises(InputError, match="text: expected a file of UTF-8 text"):
            calibrate(loaded, path)


def test_a_folder_that_cannot_be_written_to(loaded, text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="folder: expected one to write to"):
        calibrate(loaded, text, folder=tmp_path / "file" / "under")


@pytest.mark.parametrize("tokens", [0, -1, 4097, 2.0, None])
def test_a_bank_for_no_length_is_refused(loaded, text, tokens):
    with pytest.raises(InputError, match="max_tokens: expected an integer"):
        calibrate(loaded, text, allocator="uniform").bank(tokens)


def test_without_a_folder_nothing_is_left(loaded, text, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = calibrate(loaded, text)
    _ = made.scales
    assert [path.name.split("-")[0] for path in Path(tmp_path).iterdir()] == ["shadowattn"]
    del made
    gc.collect()
    assert not list(Path(tmp_path).iterdir())


def test_a_tokenizer_of_another_model_is_refused(loaded, text):
    class Other:
        bos_token_id = None

        def __call__(self, text, **options):
            return type("Encoded", (), {"input_ids": [5, 99_999] * 500})

    with pytest.raises(InputError, match="tokenizer: it gives tokens up to 99999, the model knows 2560"):
        calibrate_function(loaded.model, Other(), text, **SMALL)
    with pytest.raises(InputError, match="tokenizer: expected one that can be called"):
        calibrate_function(loaded.model, None, text, **SMALL)
