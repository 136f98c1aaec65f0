"""Reports that explain what ops move between devices: `explain`, and the command line's."""

from shardops.explaining.report import Entry, Report
from shardops.explaining.trace import explain

__all__ = ["Entry", "Report", "explain"]
