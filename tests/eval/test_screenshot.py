"""The page in a browser: drawn at the width of a phone and of a desk, light and dark, and used.

Chromium draws no narrower than about 500 pixels by itself, so the phone is a frame of 390 in a page of its
own. What the page looks like from inside (its width, its scheme, what its controls do) is asked by a script
that is added to a copy of it, and handed to the page around it.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from retain.eval.report.render import write_report
from retain.eval.report.run import Run
from tests.eval import made_run
from tests.eval.made_run import TASKS, make_manifest, make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"phone": 390, "desk": 1280}
SCHEMES = {"dark": 0, "light": 1}
HEIGHT = 2400

# Says what is seen from inside, after sorting a table, hiding a line, choosing a policy and walking through a
# document.
PROBE = """<script>
addEventListener("load", () => {
  const by = (selector) => document.querySelector(selector);
  const said = { width: innerWidth, scroll: document.documentElement.scrollWidth };
  said.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  said.wide = [...document.querySelectorAll("body *")].filter((one) =>
    one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, .strips, pre, .skip")
  ).map((one) => one.outerHTML.slice(0, 80)).slice(0, 5);
  const head = document.querySelectorAll("#tab-comparisons th")[6];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const under = (selector) => all(selector).map((one) => one.getBoundingClientRect().bottom + scrollY);
  said.under = [under(".first > ul"), under("#fig-scores svg.plot"), under("#verdicts h2")];
  const column = () => all("#tab-comparisons tbody tr").map((row) => +row.cells[6].dataset.v);
  head.querySelector("button").click();
  said.first = [head.getAttribute("aria-sort"), column()];
  head.querySelector("button").click();
  said.second = [head.getAttribute("aria-sort"), column()];
  const line = by("#fig-scores .legend button");
  line.click();
  const lines = all(`#fig-scores svg g[data-style="${line.dataset.style}"]`);
  const gone = lines.every((one) => one.style.display === "none");
  said.hidden = [line.getAttribute("aria-pressed"), lines.length, gone];
  const groups = by("select[data-groups]");
  groups.value = groups.options[groups.options.length - 1].value;
  groups.dispatchEvent(new Event("change"));
  said.groups = all("#fig-needles [data-group]:not([hidden])").map((one) => one.dataset.group);
  by("#view-policy").value = "recency";
  by("#view-policy").dispatchEvent(new Event("change"));
  by("#view-layer").value = "1";
  by("#view-layer").dispatchEvent(new Event("change"));
  const box = by(".tokens");
  for (const key of ["ArrowRight", "ArrowRight", "End", "ArrowLeft"]) {
    box.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  }
  said.status = by("#view-status").textContent;
  said.at = [...box.children].findIndex((one) => one.classList.contains("at"));
  said.reachable = [...document.querySelectorAll(".scroll")].filter(
    (one) => one.offsetParent && one.scrollWidth > one.clientWidth && one.tabIndex !== 0
  ).length;
  parent.postMessage(JSON.stringify(said), "*");
});
</script>"""
AROUND = """<!doctype html><body style="margin:0">
<iframe src="inside.html" style="display:block;border:0;width:{width}px;height:{height}px"></iframe>
<pre id="said"></pre><script>
addEventListener("message", (event) => {{ document.getElementById("said").textContent = event.data; }});
</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium was not found on PATH")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("made"))
    return write_report(Run(folder, make_manifest(clean=False), TASKS)).with_name("report.html")


def browse(folder: Path, text: str, width: int, scheme: str, *how: str) -> tuple[str, list[str]]:
    """Open a page in a frame; what was printed, and what its console said."""
    (folder / "inside.html").write_text(text, encoding="utf-8")
    (folder / "around.html").write_text(AROUND.format(width=width, height=HEIGHT), encoding="utf-8")
    made = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            "--hide-scrollbars",
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-extensions", "--disable-dev-shm-usage", "--enable-logging=stderr"),
            *(f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 520)},{HEIGHT}"),
            *(f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--virtual-time-budget=3000"),
            *(*how, (folder / "around.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout, [line for line in made.stderr.splitlines() if "CONSOLE" in line]


def said_in(printed: str) -> dict[str, Any]:
    """The report of the script inside the page."""
    return json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', printed, re.S)[1]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("screen", WIDTHS)
def test_the_page_is_drawn(page, tmp_path, screen, scheme):
    picture, width = tmp_path / "page.png", WIDTHS[screen]
    text = page.read_text(encoding="utf-8")
    _, console = browse(tmp_path, text, width, scheme, f"--screenshot={picture}")
    assert console == []
    pixels = image.imread(picture)[:, :width, :3]
    assert pixels.shape[:2] == (HEIGHT, width)
    ground = pixels[5, 5]
    assert (ground.mean() > 0.9) == (scheme == "light") and (ground.mean() < 0.2) == (scheme == "dark")
    # Something is written in every fifth of its height, and its right edge is clear.
    for part in np.array_split(pixels, 5):
        assert (np.abs(part - ground).max(-1) > 0.3).mean() > 0.01
    assert (np.abs(pixels[:, -8:] - ground).max(-1) < 0.05).all()
    whole = (pixels[::3, ::3] * 255).astype(np.int64)
    assert len(np.unique(whole @ [65536, 256, 1])) > 100


@pytest.mark.parametrize(("screen", "scheme"), [("phone", "dark"), ("desk", "light")])
def test_the_page_is_used(page, tmp_path, screen, scheme):
    text = page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    printed, console = browse(tmp_path, text, WIDTHS[screen], scheme, "--dump-dom")
    assert console == []
    said = said_in(printed)
    assert (said["width"], said["dark"]) == (WIDTHS[screen], scheme == "dark")
    # The page never scrolls sideways, and what is wider than it scrolls in a box that can be reached.
    assert said["scroll"] <= said["width"] and said["wide"] == [] and said["reachable"] == 0
    # The sentences and all of the picture are on a desk's first screen (1280 x 800), above what else there
    # is; on a phone (390 x 844) the sentences and a regime's panels, within one and a half.
    (sentences,), panels, (verdicts,) = said["under"]
    assert len(panels) == 4 and max(sentences, *panels) < verdicts
    assert max(sentences, *panels) <= 800 if screen == "desk" else max(sentences, panels[0]) <= 1.5 * 844
    (first, down), (second, up) = said["first"], said["second"]
    assert (first, second) == ("descending", "ascending") and len(set(down)) > 10
    assert down == sorted(down, reverse=True) and up == sorted(up)
    assert said["hidden"] == ["false", 8, True]  # a line and its band, in four panels
    assert set(said["groups"]) == {"niah/grid, query_aware, keep_ratio 0.4"}
    assert len(said["groups"]) == 1 + len(made_run.SKILL)  # the full cache too
    assert said["status"].startswith("recency, keep_ratio 0.2: ")
    assert re.search(r"Token 190 .* kept by [0-2] of 2 heads of this layer\.", said["status"])
    assert said["at"] == 190


def test_the_guard_sees_errors_and_overflow(page, tmp_path):
    text = page.read_text(encoding="utf-8").replace(
        "</main>",
        "<div style='width:2000px'>wide</div></main><script>console.error('seen'); nothing();</script>",
    )
    printed, console = browse(
        tmp_path, text.replace("</body>", f"{PROBE}</body>"), 390, "light", "--dump-dom"
    )
    assert all(any(word in line for line in console) for word in ("seen", "nothing is not defined"))
    said = said_in(printed)
    assert said["scroll"] > said["width"] and "wide" in said["wide"][0]
