"""What runs and comparisons look like: a page, plots with their numbers, and a trace.

``write_report`` writes one page that needs no network, ``write_plots`` each plot as SVG and CSV
(and PNG and PDF, with the extra ``plots``), ``write_trace`` a file for Perfetto. ``read_report``
returns the data in a page.
"""

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
