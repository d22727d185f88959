import pytest

from shadowattn.data.stdlib import stdlib_files
from shadowattn.data.text import hub_corpus, line_windows, stdlib_corpus, text_corpus, token_windows
from shadowattn.errors import InputError
from shadowattn.models import load_bundled


@pytest.fixture(scope="module")
def tokenizer():
    return load_bundled().tokenizer


def test_the_splits_of_the_standard_library_never_meet():
    splits = [set(stdlib_files(name)) for name in ("train", "calibration", "heldout")]
    assert all(splits)
    assert sum(map(len, splits)) == len(set.union(*splits))
    assert not any("site-packages" in str(path) or "/test/" in str(path) for path in set.union(*splits))


def test_stdlib_refuses_an_unknown_split():
    with pytest.raises(ValueError, match="calibration"):
        stdlib_files("validation")


def test_the_hash_is_of_both_texts():
    corpus = stdlib_corpus()
    assert corpus.sha256 == stdlib_corpus().sha256
    assert corpus.sha256 != type(corpus)(corpus.name, corpus.heldout, corpus.calibration).sha256


def test_a_file_is_halved_at_a_line_end(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("roses are red\nviolets are blue\nsugar\n")
    corpus = text_corpus(str(path))
    assert corpus.name == "poem.txt"
    assert (corpus.calibration, corpus.heldout) == ("roses are red\nviolets are blue\n", "sugar\n")


def test_a_folder_is_read_in_name_order_by_pattern(tmp_path):
    for name, text in (("b.md", "second\n"), ("a.md", "first\n"), ("c.txt", "never\n")):
        (tmp_path / name).write_text(text)
    corpus = text_corpus(str(tmp_path), pattern="*.md")
    assert corpus.calibration + corpus.heldout == "first\n\n\nsecond\n"


def test_a_datasets_builder(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\nthree\nfour\n")
    corpus = hub_corpus("text", split="train", files=str(path))
    assert corpus.calibration + corpus.heldout == "one\ntwo\nthree\nfour"
    assert corpus.name == "text"
    assert hub_corpus("text", name="counted", split="train", files=str(path)).name == "text counted"


@pytest.mark.parametrize("content", [b"", b"  \n \n", b"\xff\xfe\x00\x01", b"text\0more"])
def test_refuses_empty_and_binary_text(tmp_path, content):
    path = tmp_path / "input"
    path.write_bytes(content)
    with pytest.raises(InputError, match="data"):
        text_corpus(str(path))


@pytest.mark.parametrize("path", [None, "no/such/file.txt"])
def test_refuses_a_path_that_is_not_there(path):
    with pytest.raises(InputError, match="data"):
        text_corpus(path)


def test_refuses_a_folder_without_matching_files(tmp_path):
    with pytest.raises(InputError, match=r"data\.pattern"):
        text_corpus(str(tmp_path))


@pytest.mark.parametrize("id", [None, "nobody/nothing"])
def test_refuses_an_unknown_dataset(id):
    with pytest.raises(InputError, match=r"data\.id|data=hub"):
        hub_corpus(id)


def test_refuses_an_unknown_column(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("one\n")
    with pytest.raises(InputError, match=r"data\.column"):
        hub_corpus("text", split="train", files=str(path), column="body")


def test_windows_are_spread_over_the_text_and_never_overlap(tokenizer):
    text = stdlib_corpus().heldout[:60_000]
    ids = tokenizer(text, verbose=False).input_ids
    windows = token_windows(text, tokenizer, tokens=100, windows=5, source="test")
    assert windows.shape == (5, 100)
    starts = [next(i for i in range(len(ids)) if ids[i : i + 100] == window.tolist()) for window in windows]
    assert starts[0] == 0
    assert all(b - a >= 100 for a, b in zip(starts, starts[1:], strict=False))
    assert starts[-1] > 0.7 * len(ids)


def test_fewer_windows_where_the_text_holds_fewer(tokenizer):
    assert len(token_windows("import os\n" * 100, tokenizer, tokens=50, windows=1000, source="test")) < 20


def test_refuses_a_text_shorter_than_one_window(tokenizer):
    with pytest.raises(InputError, match="at least one window of 100 tokens"):
        token_windows("import os", tokenizer, tokens=100, windows=1, source="test")


def test_a_beginning_token_leads_every_window_where_the_tokenizer_adds_one():
    class Characters:
        bos_token_id = 1

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return type("Out", (), {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]})

    windows = token_windows("abcdefgh", Characters(), tokens=4, windows=9, source="test")
    assert windows.tolist() == [[1, *map(ord, "abc")], [1, *map(ord, "def")]]


def test_all_windows_that_there_are(tokenizer):
    text = "alpha beta gamma\n" * 100
    some = token_windows(text, tokenizer, tokens=16, windows=3, source="s")
    everything = token_windows(text, tokenizer, tokens=16, windows=0, source="s")
    assert len(some) == 3 < len(everything)


def test_lines_as_the_artifact_takes_them(tokenizer):
    text = "   short    \n  exactly 10 \nelevenchars\n\n   a line that is long enough   \n" * 20
    stream = [i for _ in range(20) for line in ("elevenchars", "a line that is long enough") for i in tokenizer(line).input_ids]
    windows = line_windows(text, tokenizer, tokens=16, windows=0, source="s")
    assert windows.flatten().tolist() == stream[: len(stream) // 16 * 16]
    assert line_windows(text, tokenizer, tokens=16, windows=2, source="s").tolist() == windows[:2].tolist()


def test_lines_that_are_all_short_are_refused(tokenizer):
    with pytest.raises(InputError, match="at least one window of 16 tokens, got 0"):
        line_windows("short\n" * 100, tokenizer, tokens=16, windows=0, source="s")


def test_with_another_text_held_out_all_of_the_first_calibrates(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    corpus = text_corpus(str(tmp_path / "a.txt"), heldout=str(tmp_path / "b.txt"))
    assert (corpus.calibration, corpus.heldout) == ("one\ntwo\n", "three\n")
    with pytest.raises(InputError, match=r"data\.heldout: expected"):
        text_corpus(str(tmp_path / "a.txt"), heldout=str(tmp_path / "none.txt"))
