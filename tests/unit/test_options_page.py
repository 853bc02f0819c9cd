"""docs/options.md has the options there are, as they are."""

from tools import options_page


def test_the_page_is_up_to_date() -> None:
    written = options_page.PAGE.read_text(encoding="utf-8")
    assert written == options_page.page(), "run: python tools/options_page.py"
