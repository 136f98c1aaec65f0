"""gemm and dot_general: values and gradients of drawn cases, on every route."""

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz import running
from tests.fuzz.amount import PRODUCT_BATCHES, TOGETHER
from tests.fuzz.products import products
from tests.fuzz.settings import ROUTES, settings


@pytest.mark.parametrize("route", ROUTES)
@hypothesis_settings(
    max_examples=PRODUCT_BATCHES,
    phases=[Phase.generate],  # `running` simplifies the one case that is wrong
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_product(route, data):
    setting = data.draw(settings([route]))
    cases = data.draw(st.lists(products(setting), min_size=TOGETHER, max_size=TOGETHER))
    running.check(setting, cases)
