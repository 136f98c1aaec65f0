"""Products of quantised operands: values and gradients of drawn cases, on every route."""

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz import running
from tests.fuzz.amount import QUANTISED_BATCHES, QUANTISED_TOGETHER
from tests.fuzz.quantised import quantised_products
from tests.fuzz.settings import ROUTES, settings


@pytest.mark.parametrize("route", ROUTES)
@hypothesis_settings(
    max_examples=QUANTISED_BATCHES,
    phases=[Phase.generate],  # `running` simplifies the one case that is wrong
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_quantised_product(route, data):
    setting, n = data.draw(settings([route])), QUANTISED_TOGETHER
    cases = data.draw(st.lists(quantised_products(setting), min_size=n, max_size=n))
    running.check(setting, cases)
