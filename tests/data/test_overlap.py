"""Nothing that results are measured on was trained on, by content."""

import numpy as np
import pytest

from experiments.reference_model.corpus import training_files
from shadowattn.data.overlap import distinct_runs, line_runs, load_runs, shared_fraction, unseen_text
from shadowattn.data.stdlib import stdlib_documents, stdlib_text
from shadowattn.data.text import TRAINING_RUNS, stdlib_corpus
from shadowattn.errors import InputError


def _text(*lines: object) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_no_four_lines_of_the_held_out_text_were_trained_on():
    heldout, files = stdlib_corpus().heldout, stdlib_text("heldout")
    assert shared_fraction(files, load_runs(TRAINING_RUNS)) > 0.1  # the paths alone do not keep them apart
    assert shared_fraction(heldout, load_runs(TRAINING_RUNS)) == 0.0
    # The library that runs here, of whatever version: what it shares with its own training split is new to the model.
    assert shared_fraction(heldout, distinct_runs(training_files())) < 0.01
    assert len(heldout) > 0.75 * len(files)


def test_the_recorded_runs_are_those_of_the_training_text():
    recorded, here = load_runs(TRAINING_RUNS), distinct_runs(training_files())
    # Python 3.11.7 trained the bundled model; another version shares most of its text, and not all.
    assert np.isin(here, recorded).mean() > 0.85
    assert len(recorded) == 218783


def test_runs_are_of_four_lines_without_indentation_and_empty_lines():
    plain, spaced = _text("a", "b", "c", "d", "e"), "  a\n\n\tb\nc  \n\n\n d\ne"
    assert len(line_runs(plain)) == 2
    assert line_runs(plain).tolist() == line_runs(spaced).tolist()
    assert len(line_runs(_text("a", "b", "c"))) == 0
    assert shared_fraction(_text("a", "b", "c"), line_runs(plain)) == 0.0
    assert len(distinct_runs([plain, plain])) == 2
    assert len(distinct_runs([])) == 0


def test_shared_lines_are_cut_and_the_others_stay():
    seen = distinct_runs([_text("s1", "s2", "s3", "s4", "s5")])
    fresh = [f"new {number}" for number in range(60)]
    text = _text(*fresh[:30], "  s1", "s2", "", "s3", "s4", "s5", *fresh[30:])
    assert shared_fraction(text, seen) == 2 / 62
    assert unseen_text([text], seen).split() == _text(*fresh).split()


def test_lines_that_a_cut_joins_are_cut_as_well():
    seen = distinct_runs([_text("b1", "b2", "b3", "b4"), _text("a1", "a2", "c1", "c2")])
    fresh = [f"new {number}" for number in range(60)]
    text = _text(*fresh, "a1", "a2", "b1", "b2", "b3", "b4", "c1", "c2")
    assert unseen_text([text], seen).split() == _text(*fresh).split()


def test_a_document_that_is_mostly_shared_is_left_out():
    table, fresh = [f"entry {number}" for number in range(40)], [f"new {number}" for number in range(40)]
    seen = distinct_runs([_text(*table)])
    assert unseen_text([_text(*table[:30], "own line"), _text(*fresh)], seen) == _text(*fresh)


def test_a_text_that_nothing_shares_is_unchanged():
    documents = stdlib_documents("calibration")[:5]
    assert unseen_text(documents, distinct_runs([])) == "\n\n".join(documents)


def test_recorded_runs_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "runs.npy"
    with pytest.raises(InputError, match="install it again"):
        load_runs(path)
    whole = TRAINING_RUNS.read_bytes()
    path.write_bytes(whole[:1000])
    with pytest.raises(InputError, match="install it again"):
        load_runs(path)
    np.save(path, np.array([3, 1], np.uint32))
    with pytest.raises(InputError, match="sorted uint32"):
        load_runs(path)
