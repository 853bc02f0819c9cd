"""Images of a run's plots are those of its SVG files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pypdfium2
import pytest
from PIL import Image
from support import source_tree as tree

from engine.cli.main import main
from policylab.sim.promises import slo
from policylab.sim.report import charts_of, read_report, write_plots
from policylab.sim.report.charts import Bars, Gantt, Grid, Lines
from policylab.sim.run import Engine, Run, run

SVG = "{http://www.w3.org/2000/svg}"
SIZE = ("--requests", "60", "--rate", "12", "--num-kv-blocks", "250")


@pytest.fixture(scope="module")
def simulated() -> Run:
    engine = Engine(num_blocks=250, max_num_seqs=16)
    workload = "log-uniform(num_requests=60,num_users=3)"
    return run("fcfs", workload, engine, rate=12.0, steps=True)


def test_each_plot_is_an_image_and_a_page_of_the_same_picture(
    simulated: Run, tmp_path: Path
) -> None:
    charts = charts_of([simulated], slo=slo("ttft<0.2,e2e<2"))
    assert {Lines, Bars, Grid, Gantt} == {type(chart) for chart in charts}
    assert write_plots(tmp_path, charts) == []
    for chart in charts:
        with pypdfium2.PdfDocument(tmp_path / f"{chart.key}.pdf") as document:
            page = document[0]
            texts = page.get_textpage().get_text_range()
            assert document.get_metadata_value("Title") == chart.title
            drawing = ElementTree.parse(tmp_path / f"{chart.key}.svg").getroot()
            labels = {each.text or "" for each in drawing.iter(f"{SVG}text")}
            assert labels and all(label.split()[0] in texts for label in labels if label.strip())
            hues = {each.get("fill", "") for each in drawing.iter(f"{SVG}rect")} - {"#ffffff"}
            with Image.open(tmp_path / f"{chart.key}.png") as image:
                assert image.width == 1200
                assert abs(image.height - 2.5 * page.get_height()) <= 1
                drawn = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in colours(image)}
            assert len(hues & drawn) >= min(2, len(hues))


def colours(image: Image.Image) -> list[tuple[int, tuple[int, int, int]]]:
    """The colours of an image, and how many dots have each."""
    return image.convert("RGB").getcolors(image.width * image.height) or []


def test_equal_charts_give_equal_files(simulated: Run, tmp_path: Path) -> None:
    charts = charts_of([simulated])[:2]
    for name in ("a", "b"):
        write_plots(tmp_path / name, charts)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_any_text_is_drawn(simulated: Run, tmp_path: Path) -> None:
    """Letters that the font lacks are drawn as boxes."""
    [chart, *_] = charts_of([simulated])
    odd = replace(chart, key="odd", title='Я <&"\x00\udc80 猫', y_label="€ ≤ − 猫")
    assert write_plots(tmp_path, [odd]) == []
    assert (tmp_path / "odd.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    "command",
    [
        ("simulate",),
        pytest.param(("policies",), marks=pytest.mark.slow),
        pytest.param(("compare", "fcfs", "lpm", "--seeds", "2"), marks=pytest.mark.slow),
    ],
    ids=lambda command: command[0],
)
def test_commands_write_a_report_and_its_plots(
    command: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    asked = ["--report", str(out), "--plots", str(tmp_path / "plots")]
    if command[0] == "simulate":
        asked += ["--trace", str(tmp_path / "trace.json")]
    assert main([*command, *SIZE, *asked]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    shown = read_report(out)["runs"]
    assert len(shown) == (1 if command[0] == "simulate" else 2) and shown[0]["steps"]
    assert (tmp_path / "plots" / "cdf-ttft.csv").is_file()
    assert (tmp_path / "plots" / "cdf-ttft.png").is_file()
    assert (tmp_path / "trace.json").is_file() is (command[0] == "simulate")


@pytest.mark.parametrize("is_file", [False, True], ids=["missing", "a file"])
def test_a_home_that_is_none_costs_images_at_most(is_file: bool, tmp_path: Path) -> None:
    """Nothing is kept there, no font of the system is looked for, and no program is started."""
    home = tmp_path / "home"
    if is_file:
        home.touch()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom engine.cli.main import main\nsys.exit(main(sys.argv[1:]))",
            *("simulate", *SIZE, "--plots", str(tmp_path / "plots")),
        ],
        env={**os.environ, "HOME": str(home), "PATH": str(home)},
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path / "plots" / "cdf-ttft.svg").is_file()
    assert (tmp_path / "plots" / "cdf-ttft.png").is_file() is not is_file
    assert ("not all PNG and PDF files were written: " in done.stdout) is is_file
    if not is_file:
        assert b"/FontFile2" in (tmp_path / "plots" / "cdf-ttft.pdf").read_bytes()


def test_a_place_without_room_for_images_is_reported(simulated: Run, tmp_path: Path) -> None:
    charts = charts_of([simulated])[:1]
    (tmp_path / f"{charts[0].key}.png").mkdir()
    [note] = write_plots(tmp_path, charts)
    assert note == "not all PNG and PDF files were written: Is a directory"
    assert (tmp_path / f"{charts[0].key}.svg").is_file()
