import pytest

from shadowattn.data.stdlib import stdlib_text
from shadowattn.models import load_bundled


@pytest.fixture(scope="module")
def bundled():
    return load_bundled()


@pytest.fixture(scope="module")
def heldout():
    return stdlib_text("heldout")[:50_000]
