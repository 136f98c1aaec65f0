"""Reported cases of norms (2, 3, 4, 6, 7, 9, 20) and of softmax (10 to 13) on the jnp reference."""

from tests.reported_norms import ReportedNorms
from tests.reported_softmax import ReportedSoftmax


class TestNorms(ReportedNorms):
    pass


class TestSoftmax(ReportedSoftmax):
    pass
