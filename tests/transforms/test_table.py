"""The page in the docs is what the table prints."""

from pathlib import Path

import pytest

from tests.transforms import table
from tests.transforms.limits import LIMITS
from tests.transforms.routes import ROUTES
from tests.transforms.subjects import SUBJECTS
from tests.transforms.transformations import TRANSFORMATIONS

PAGE = Path(__file__).parents[2] / "docs" / "transformations.md"


def test_page_is_the_table():
    assert PAGE.read_text() == table.text(), table.__doc__


@pytest.mark.parametrize("one", LIMITS, ids=lambda one: one.transformation)
def test_limits_name_cells_that_exist(one):
    """A misspelt name would let a cell say yes."""
    assert one.transformation in {t.name for t in TRANSFORMATIONS}
    assert set(one.routes) <= {route.name for route in ROUTES}
    assert set(one.but) <= {subject.name for subject in SUBJECTS}
