"""Reports of runs: the data, and every form in which it is shown."""

from chabok.measure.report.account import Account, Found, recompute
from chabok.measure.report.data import SCHEMA, Level, Report, level_of, read_report, write_report
from chabok.measure.report.definitions import METRICS, Metric
from chabok.measure.report.sample import Sample

__all__ = [
    "METRICS",
    "SCHEMA",
    "Account",
    "Found",
    "Level",
    "Metric",
    "Report",
    "Sample",
    "level_of",
    "read_report",
    "recompute",
    "write_report",
]
