"""Every decoder family of transformers either works in `attach` and `calibrate` or is refused with the sentence in the table."""

import pytest
import torch

from tests.models.families import NAMES, PAGE, measure, page, read_table


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they give at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")  # transformers' own, about configs and modules of some families
@pytest.mark.parametrize("name", NAMES)
def test_family(name):
    expected = read_table()
    assert name in expected, "a family that the table lacks: run python -m tests.models.families and read what changed"
    assert measure(name) == expected[name]


def test_the_table_holds_no_family_that_is_gone():
    assert list(read_table()) == NAMES


def test_the_page_says_what_the_table_says():
    assert PAGE.read_text() == page(read_table())
