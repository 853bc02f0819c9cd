"""Reports of runs and comparisons: an HTML page, plots with their numbers, and a trace.

``write_report`` writes the page, ``read_report`` returns the data in it. ``write_plots`` writes
each plot as SVG and CSV (and PNG and PDF, with the extra ``plots``), ``write_trace`` a trace file
for Perfetto."""

from policylab.sim.report.data import read_report
from policylab.sim.report.subjects import Point, points_from
from policylab.sim.report.trace import write_trace
from policylab.sim.report.write import charts_of, write_plots, write_report

__all__ = [
    "Point",
    "charts_of",
    "points_from",
    "read_report",
    "write_plots",
    "write_report",
    "write_trace",
]
