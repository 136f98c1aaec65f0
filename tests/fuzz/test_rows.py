"""The norms and softmax: values and gradients of drawn cases, on every route."""

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz import running
from tests.fuzz.amount import ROW_BATCHES, TOGETHER
from tests.fuzz.rows import norms
from tests.fuzz.settings import ROUTES, settings
from tests.fuzz.softmaxes import softmaxes


@pytest.mark.parametrize("route", ROUTES)
@hypothesis_settings(
    max_examples=ROW_BATCHES,
    phases=[Phase.generate],  # `running` simplifies the one case that is wrong
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_row(route, data):
    setting = data.draw(settings([route]))
    cases = data.draw(
        st.lists(norms(setting) | softmaxes(setting), min_size=TOGETHER, max_size=TOGETHER)
    )
    running.check(setting, cases)
