"""Charts as PDF and PNG, made from their SVG by optional libraries (svglib and pypdfium2)."""

from __future__ import annotations

import io
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from policylab.sim.report.charts import Chart
from policylab.sim.report.svg import svg

EXTRA = "metronome-engine[plots]"
LIBRARIES = ("svglib", "reportlab", "pypdfium2")
FONT = "fonts/Vera.ttf"  # in reportlab; embedded in each file, so that no system font is needed
PIXELS_PER_POINT = 2.5  # a chart is 480 points wide


def can_draw() -> bool:
    """True if the optional libraries for images are installed."""
    return all(find_spec(name) is not None for name in LIBRARIES)


def write_images(chart: Chart, where: Path) -> None:
    """Write the chart into the directory ``where`` as PDF and PNG, reproducible byte by byte."""
    import pypdfium2

    page = _pdf(chart)
    (where / f"{chart.key}.pdf").write_bytes(page)
    with pypdfium2.PdfDocument(page) as document:
        document[0].render(scale=PIXELS_PER_POINT).to_pil().save(where / f"{chart.key}.png")


def _pdf(chart: Chart) -> bytes:
    from reportlab.graphics import renderPDF
    from reportlab.pdfgen.canvas import Canvas
    from svglib.svglib import svg2rlg

    _register_font()
    drawing = svg2rlg(io.BytesIO(svg(chart, is_file=True).encode(errors="replace")))
    page = io.BytesIO()
    canvas = Canvas(page, pagesize=(drawing.width, drawing.height), invariant=1)
    canvas.setTitle(chart.title.encode(errors="replace").decode())
    renderPDF.draw(drawing, canvas, 0, 0)
    canvas.save()
    return page.getvalue()


@cache
def _register_font() -> None:
    """Register the font that comes with reportlab, so that images do not depend on system fonts."""
    import reportlab
    from svglib.fonts import register_font

    register_font("sans-serif", str(Path(reportlab.__file__).parent / FONT))
