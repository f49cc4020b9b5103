"""report.html in a real browser: it renders, says nothing on the console, asks for nothing, and fits its screen.

Marked `browser` and deselected where no Chromium is installed (see conftest.py); CI installs one.
"""

import json
import re
import subprocess

import pytest

pytestmark = pytest.mark.browser
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
         "--no-first-run", "--allow-file-access-from-files", "--virtual-time-budget=5000")  # fmt: skip
OWN_SERVICES = re.compile(r"https?://([\w-]+\.)*(google\.com|gvt1\.com|googleapis\.com)[:/]")
HARNESS = """<!doctype html><meta charset="utf-8"><pre id="out">waiting</pre>
<iframe id="narrow" src="%(page)s" width="360" height="700"></iframe>
<iframe id="wide" src="%(page)s" width="1100" height="700"></iframe>
<script>addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle;
    const picture = page.querySelector("svg");
    const scale = picture.getBoundingClientRect().width / picture.viewBox.baseVal.width;
    found[frame.id] = {
      width: page.documentElement.clientWidth, needed: page.documentElement.scrollWidth,
      paper: style(page.body).backgroundColor, ink: style(page.body).color,
      picture: style(picture.querySelector("text")).fill,
      letters: scale * parseFloat(style(picture.querySelector("text")).fontSize),
      heading: page.querySelector("h1").getBoundingClientRect().top };
  }
  document.getElementById("out").textContent = JSON.stringify(found);
});</script>"""


class Browser:
    """Chromium on one page: its DOM, what it logged, what it asked for."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, page, *flags):
        command = [self.program, *FLAGS, f"--user-data-dir={self.folder / 'profile'}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    def visit(self, page):
        """The DOM, the lines on the console, and every address that was asked for."""
        log = self.folder / "net.json"
        done = self.run(page, "--enable-logging=stderr", f"--log-net-log={log}", "--dump-dom")
        console = re.findall(r"CONSOLE:?\S*\] (.*)", done.stderr)
        asked = set(re.findall(r'"url":"(\w+://[^"]+)"', log.read_text()))
        return done.stdout, console, {url for url in asked if not OWN_SERVICES.match(url)}

    def measure(self, page, *flags):
        """Widths and colours of the page in a narrow and in a wide frame."""
        harness = page.with_name("harness.html")
        harness.write_text(HARNESS % {"page": page.name})
        found = re.search(r'<pre id="out">(.*?)</pre>', self.run(harness, "--dump-dom", *flags).stdout)
        return json.loads(found[1])


@pytest.fixture
def browser(chromium, tmp_path):
    return Browser(chromium, tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory, write_run):
    attack = '</blockquote><script>fetch("http://127.0.0.1:9/a")</script><img src="http://127.0.0.1:9/b">'
    directory = tmp_path_factory.mktemp("browser") / "run"
    write_run(directory, 0.005, texts={"docs": {"d1": attack + "word " * 100}})
    return (directory / "evidence" / "report.html").read_text()


@pytest.fixture
def report(written, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(written)
    return page


def test_the_page_renders_in_silence_and_asks_for_nothing(browser, report):
    dom, console, asked = browser.visit(report)
    assert "<h1>PASS</h1>" in dom and dom.count("<svg") == 4
    assert (console, asked) == ([], set())
    assert "<script" not in dom and "<img" not in dom


def test_a_page_that_does_otherwise_is_noticed(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>missing()</script>')
    _, console, asked = browser.visit(page)
    assert any("missing is not defined" in line for line in console)
    assert asked == {"http://127.0.0.1:9/x.png"}


def test_the_content_policy_stops_what_would_slip_through(browser, report):
    report.write_text(
        report.read_text().replace("</body>", '<img src="http://127.0.0.1:9/x"><script>x()</script></body>')
    )
    _, console, asked = browser.visit(report)
    assert asked == set() and len([line for line in console if "Content Security Policy" in line]) == 2


@pytest.mark.parametrize(
    ("flag", "paper", "ink"),
    [("1", "rgb(255, 255, 255)", "rgb(27, 31, 36)"), ("0", "rgb(20, 23, 26)", "rgb(232, 234, 237)")],
    ids=["light", "dark"],
)
def test_it_fits_a_phone_and_a_desk_in_both_themes(browser, report, flag, paper, ink):
    found = browser.measure(report, f"--blink-settings=preferredColorScheme={flag}")
    for frame in found.values():
        assert frame["needed"] == frame["width"]
        assert (frame["paper"], frame["ink"], frame["picture"]) == (paper, ink, ink)
        assert frame["letters"] >= 10 and frame["heading"] < 100
    assert found["narrow"]["width"] < 361 < 1000 < found["wide"]["width"]


def test_it_prints(browser, report, tmp_path):
    browser.run(report, f"--print-to-pdf={tmp_path / 'report.pdf'}")
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", content)) >= 2
