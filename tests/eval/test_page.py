"""The page of a made-up run: its parts, its numbers, and that nothing in it is trusted or fetched."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from retain.eval.report.blocks import LEVELS, colours, heat, luminance, number, p_value
from retain.eval.report.document_view import STEPS, from_diagnostics, step_of, view
from retain.eval.report.plots import COLOURS, VARIABLES, Dot, Lines, Look, Rows, Series, as_svg, looks_of
from retain.eval.report.render import inert, main, marked, write_report
from retain.eval.report.run import Run
from retain.eval.report.tables import ceiling_tables, heat_maps
from retain.eval.stats.comparisons import ALPHA, Place, budget_name, is_judged, judge, word_of
from retain.eval.stats.summary import gather
from retain.eval.tasks.suites import tasks_of
from tests.eval.made_run import (
    BUDGETS,
    HOSTILE,
    SKILL,
    TASKS,
    make_diagnostics,
    make_kept,
    make_manifest,
    make_rows,
    make_run,
)

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes and parents, and text by element."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        own = {"tag": tag, "text": [], "parents": [*self.open], **{k: v or "" for k, v in attributes}}
        self.elements.append(own)
        if tag not in VOID:
            self.open.append(own)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {self.open[-1]['tag']}"
        self.open.pop()

    def handle_data(self, data):
        for own in self.open:
            own["text"].append(data)

    def all(self, tag, **having):
        return [one for one in self.elements if one["tag"] == tag and having.items() <= {**one}.items()]

    def by_id(self, ident):
        (one,) = [own for own in self.elements if own.get("id") == ident]
        return one

    def inside(self, one, tag):
        return [own for own in self.elements if own["tag"] == tag and any(p is one for p in own["parents"])]


def said(one):
    return "".join(one["text"])


def page_of(folder, manifest):
    return write_report(Run(folder, manifest, TASKS)).with_name("report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return page_of(make_run(tmp_path_factory.mktemp("made")), make_manifest())


@pytest.fixture(scope="module")
def page(written):
    made = Page(written)
    assert not made.open
    return made


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("bare"), measured=False, clean=False)
    manifest = make_manifest(clean=False)
    del manifest["finished"]
    return Page(page_of(folder, manifest))


@pytest.fixture(scope="module")
def scores():
    return gather([row.__dict__ for row in make_rows()], list(TASKS))


@pytest.fixture(scope="module")
def judged(scores):
    return judge(scores, margin=2.0, resamples=300)


def test_every_part_is_there_and_every_link_of_the_page_leads_somewhere(page):
    parts = [one["id"] for one in page.all("section")]
    assert parts == [one["href"][1:] for one in page.inside(page.all("nav")[0], "a")]
    wanted = "verdicts glance differences needles documents budgets coverage jaccard memory"
    assert {*wanted.split(), "tasks", "unclear", "answers", "nulls", "made", "reading"} <= {*parts}
    idents = [one["id"] for one in page.elements if "id" in one]
    assert len(idents) == len(set(idents)) > 60
    for link in page.all("a"):
        assert link["href"][0] == "#" and link["href"][1:] in idents
    for one in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert name not in one or one[name] in idents


def test_nothing_is_fetched(written, page):
    for one in page.elements:
        for name in ("src", "href", "srcset", "action", "poster", "data", "xlink:href", "ping"):
            assert one.get(name, "#").startswith(("#", "data:"))
        assert not [name for name in one if name.startswith("on")]
    assert "://" not in written and "url(" not in written and "@import" not in written
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none'")
    tags = {one["tag"] for one in page.elements}
    assert not {"img", "iframe", "object", "embed", "video", "base", "form"} & tags


def test_answers_names_and_documents_are_text(written, page):
    # The page's own two scripts, and no third: what a model or a config says does not run.
    assert written.count("<script") == 2 == len(page.all("script"))
    assert HOSTILE not in written and written.count("&lt;script&gt;") > 10
    answers = said(page.by_id("tab-answers"))
    assert HOSTILE in answers
    assert f"odd{HOSTILE}" in said(page.by_id("tab-comparisons"))
    assert HOSTILE in said(page.all("div", **{"class": "tokens"})[0])
    assert json.loads(said(page.by_id("view-data")))[0]["of"] == 8


def test_every_table_sorts_or_is_a_heat_map(page):
    tables = page.all("table")
    assert len(tables) > 20
    for table in tables:
        assert page.inside(table, "caption") and table["class"] in ("sortable", "map")
        if table["class"] == "map":
            continue
        for head in page.inside(table, "th"):
            if head.get("scope") == "col":
                assert head["aria-sort"] == "none" and len(page.inside(head, "button")) == 1
        rows = page.inside(table, "tr")
        widths = {len(page.inside(row, "td")) + len(page.inside(row, "th")) for row in rows[:3]}
        assert len(widths) == 1
    # A cell sorts by the number that it prints.
    rows = page.inside(page.by_id("tab-comparisons"), "tr")[1:]
    assert len(rows) == 2 * 3 * 2 * len(SKILL)
    for row in rows:
        difference = page.inside(row, "td")[5]
        assert said(difference) == f"{float(difference['data-v']):+.1f}"


def test_every_figure_says_what_makes_it(page):
    figures = page.all("figure")
    names = "scores forest needles document budgets coverage jaccard speed"
    assert {one["id"] for one in figures} == {f"fig-{name}" for name in names.split()}
    for one in figures:
        commands = [own for own in page.inside(one, "p") if own.get("class") == "command"]
        assert commands and said(page.inside(one, "code")[0]).startswith("python ")
        assert page.inside(one, "figcaption")
    assert "retain.eval.diagnose" in said(page.by_id("fig-coverage"))
    assert "retain.eval.speed" in said(page.by_id("fig-speed"))
    assert "configs/compare/made.yaml" in said(page.by_id("fig-scores"))
    for drawing in page.all("svg", role="img"):
        assert said(page.by_id(drawing["aria-labelledby"]))


def test_verdicts_are_those_of_the_tests(page, judged):
    rows = page.inside(page.by_id("tab-comparisons"), "tr")[1:]
    assert [said(page.inside(row, "td")[4]) for row in rows] == [word_of(one.result) for one in judged]


def test_one_regime_is_one_holm_family(judged):
    for regime in ("context_only", "query_aware"):
        every = [one for one in judged if one.place.regime == regime]
        own = [one for one in every if is_judged(one.policy)]
        # The full cache, the learned ones and the oracle, at three budgets of two families.
        assert {one.result.family_size for one in own} == {len(own)} == {3 * 2 * 4}
        assert {one.result.family_size for one in every if one not in own} == {None}
        assert len(every) == 3 * 2 * len(SKILL)
        for one in own:
            if one.result.verdict in ("better", "worse"):
                assert one.result.holm_p < ALPHA


def test_what_is_not_known_says_what_could_have_been_shown(judged):
    own = next(one for one in judged if one.result.verdict == "inconclusive")
    assert own.detectable > 2.0
    assert own.place == Place("context_only", 0.1, "seen")
    # Without a heuristic nothing is compared.
    scores = gather([row.__dict__ for row in make_rows(("gate", "oracle"))], list(TASKS))
    assert judge(scores, margin=2.0, resamples=300) == []


def test_heat_maps_are_means_of_their_squares(page):
    rows = [row.__dict__ for row in make_rows()]
    made = heat_maps(rows, BUDGETS, "command")
    assert len(made.tables) == 2 * 3 * (1 + len(SKILL)) and len(made.groups) == 6
    assert made.chosen == "niah/grid, context_only, keep_ratio 0.2"
    table = next(
        table
        for table, group in zip(made.tables, made.group_of, strict=True)
        if table.caption == "snapkv" and group == made.chosen
    )
    assert table.columns == ("depth", "250", "500", "750", "1000")
    place = ("niah/grid", "context_only", "snapkv", 0.2)
    here = [row for row in rows if (row["task"], row["regime"], row["policy"], row["budget"]) == place]
    for line in table.rows:
        for length, cell in zip((250.0, 500.0, 750.0, 1000.0), line[1:], strict=True):
            about = {"depth": float(line[0].text), "length": length}
            own = [row["score"] for row in here if row["about"] == about]
            assert (cell.text == "") == (own == [])
            if own:
                assert cell.value == pytest.approx(sum(own) / len(own))
                assert cell.level == round(LEVELS * cell.value)
    assert heat_maps([{**row, "about": {}} for row in rows], BUDGETS, "command") is None
    shown = [one for one in page.elements if one.get("data-group") and "hidden" not in one]
    assert {one["data-group"] for one in shown} == {made.chosen}


def test_what_is_missing_is_a_sentence_with_its_command(bare):
    missing = [said(one) for one in bare.all("p", **{"class": "missing"})]
    assert len(missing) == 5 and all("This was not measured for this run" in text for text in missing)
    for ident, command in (
        ("documents", "python -m retain.eval.report.kept --config configs/compare/made.yaml"),
        ("coverage", "python -m retain.eval.diagnose --model reference:0 --policies random recency snapkv"),
        ("memory", "python -m retain.eval.speed --model reference:0 --policies random,recency,snapkv,h2o"),
    ):
        assert command in said(bare.by_id(ident))
    assert {one["id"] for one in bare.all("figure")} == {"fig-scores", "fig-forest", "fig-needles"}
    assert not [one for one in bare.elements if one.get("id") in ("view-data", "tab-speed")]


def test_the_gates_that_are_named_are_those_that_the_policy_took(tmp_path):
    """A study gives the presets beside it its winner's gates, which may be others than `gates`."""
    manifest = make_manifest()
    sets = {"mine": {"folder": "runs/mine-seed{seed}"}}
    manifest["config"] |= {"gate_sets": sets, "uses": {"gate": "mine"}}

    def diagnosed():
        return Run(tmp_path, manifest, TASKS).commands["diagnostics"]

    assert " oracle --keep-ratio 0.2 --gates runs/mine-seed0 --out" in diagnosed()
    # A control has the gates' own folder, and nobody is asked for any whose policies take none.
    manifest["config"]["gate_sets"] = {"mine": {"folder": "", "control": "random"}}
    assert " --gates runs/gates-seed0 --out" in diagnosed()
    manifest["config"]["policies"] = ["recency", "snapkv"]
    assert "--gates" not in diagnosed()


def test_an_unclean_tree_is_said_first(bare, page):
    warnings = [said(one) for one in bare.all("p", **{"class": "warning"})]
    assert [text.split(":")[0] for text in warnings] == ["Scratch", "Unfinished"]
    assert page.all("p", **{"class": "warning"}) == []


def test_provenance_nulls_and_ceilings(page):
    tasks = said(page.by_id("tab-tasks"))
    for text in ("ruler-like", "synthetic", "Apache-2.0", "example.org/ruler & others"):
        assert text in tasks
    nulls = page.inside(page.by_id("tab-nulls"), "tr")[1:]
    expected = sum(row.null for row in make_rows())
    assert sum(float(page.inside(row, "td")[-2]["data-v"]) for row in nulls) == expected > 0
    assert f"{expected} of {len(make_rows())} answers were empty" in said(page.by_id("verdicts"))
    ceilings = page.inside(page.by_id("tab-ceilings"), "tr")[1:]
    assert len(ceilings) == 2 * 3 * len(TASKS)
    assert {said(page.inside(row, "td")[2]) for row in ceilings} == {"yes"}
    facts = said(page.by_id("made"))
    for text in ("a" * 12, "0123456789abcdef", "float32", "sdpa", "ab" * 8, "torch 2", "margin_points"):
        assert text in facts


def test_a_task_that_tells_nothing_is_said(page):
    right = {"score": 1.0, "exact": 1.0}
    rows = [row.__dict__ | (right if row.task == "pair" else {}) for row in make_rows()]
    unclear, tables = ceiling_tables(gather(rows, list(TASKS)))
    flags = {row[2].text: row[3].text for row in tables[-1].rows}
    assert flags == {"copy": "yes", "pair": "no", "ruler/vt": "yes", "niah/grid": "yes"} and unclear == 6
    sentence = "0 of 24 places (regime, budget, task) do not tell policies apart"
    assert sentence in said(page.by_id("verdicts"))


def test_the_same_run_gives_the_same_page_and_the_command_writes_it_again(tmp_path, capsys, written):
    folder = make_run(tmp_path)
    assert page_of(folder, make_manifest()) == written
    (folder / "report.html").unlink()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    # A suite that only a program knows: what the manifest says of its tasks.
    assert tasks_of(make_manifest())["ruler/vt"].provenance == "ruler-like"
    assert len((folder / "report.html").read_text()) == pytest.approx(len(written), rel=0.01)
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is no run of eval/compare.py" in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path):
    make_run(tmp_path)
    run = Run.read(tmp_path)
    for name in ("diagnostics", "speed", "kept"):
        (tmp_path / f"{name}.json").write_text('{"documents": []')
        with pytest.raises(ValueError, match=f"{name}.json cannot be read .* Make it again, or delete it"):
            run.measured(name)


def test_documents_that_do_not_fit_their_numbers_are_refused():
    made = make_kept()
    made["documents"][1]["kept"][0]["rows"].pop()
    with pytest.raises(ValueError, match="random has 191 numbers for the 192 tokens"):
        view(made)
    with pytest.raises(ValueError, match="holds no document"):
        view({**made, "documents": []})


def test_tokens_are_shaded_by_who_kept_them(page):
    made = view(make_kept())
    assert (made.policy, made.budget, made.layers) == ("gate", "0.2", (0, 1, 2, 3))
    own = next(
        one for one in make_kept()["documents"][0]["kept"] if (one["policy"], one["budget"]) == ("gate", 0.2)
    )
    first = made.documents[0]
    assert [step for _, step, _ in first.tokens] == [step_of(kept, 8) for kept in own["rows"]]
    assert [place for place, token in enumerate(first.tokens) if token[2]] == [*range(1, 9)]
    shown = page.inside(page.all("div", **{"class": "tokens"})[0], "span")
    assert [one["class"].split()[0] for one in shown] == [f"k{step}" for _, step, _ in first.tokens]
    assert "".join(map(said, shown)) == "".join(text for text, _, _ in first.tokens)
    row = next(line for line in first.shares.rows if (line[0].text, line[1].value) == ("gate", 0.2))
    assert row[2].value == pytest.approx(sum(own["rows"]) / (8 * 192))
    assert row[3].value == pytest.approx(sum(own["rows"][1:9]) / 64)
    assert [step_of(kept, 8) for kept in range(9)] == [0, 1, 1, 2, 2, 3, 3, 4, STEPS]
    assert step_of(1, 1) == STEPS
    # The document of the diagnostics will do.
    made = view(from_diagnostics(make_diagnostics()))
    assert made.policies == ("snapkv", "gate") and made.layers == () and made.documents[0].name == "first"
    assert [step for _, step, _ in made.documents[0].tokens] == [1, 0, 3]  # the gate's: 1, 0, 3 of 4


def test_prose_is_text_but_for_its_marks_and_json_cannot_end_its_element():
    prose = "<strong>a</strong> <code>b&lt;c</code>, <em>d</em> e * f * g"
    assert marked("**a** `b<c`, *d* e * f * g") == prose
    text = inert(["</script><!-- & \u2028"])
    assert not set("<>&\u2028") & set(text) and json.loads(text) == ["</script><!-- & \u2028"]


def test_colours_are_monotone_and_readable():
    made = colours()
    lights = [luminance([int(ground[i : i + 2], 16) for i in (1, 3, 5)]) for ground, _ in made]
    assert len(made) == LEVELS + 1 and lights == sorted(lights)
    for light, (_, ink) in zip(lights, made, strict=True):
        contrast = 1.05 / (light + 0.05) if ink == "#fff" else (light + 0.05) / 0.05
        assert contrast >= 4.5
    assert (heat(0.0).level, heat(1.0).level, heat(7.0).level, heat(None).level) == (0, LEVELS, LEVELS, None)
    assert (heat(0.1, 0.2).level, heat(float("nan")).text) == (LEVELS // 2, "")


def test_drawings_have_the_style_sheets_colours():
    css = (Path(__file__).parents[2] / "eval/report/template/report.css").read_text()
    light = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6})", css.split("prefers-color-scheme: dark")[0]))
    assert {name: light[name] for name in VARIABLES.values()} == {v: k for k, v in VARIABLES.items()}


def test_looks_tell_policies_apart():
    looks = looks_of(["full", *(f"p{place}" for place in range(20)), "oracle", "token_identity"])
    assert "full" not in looks and len({(look.colour, look.dash) for look in looks.values()}) == 22
    assert looks["oracle"].colour == looks["token_identity"].colour == len(COLOURS) - 1
    # Another protection: the same colour and marker, hollow, and dashed in a way of its own.
    own = list(looks_of(["h2o", "keydiff", "keydiff+least", "keydiff+joint"]).values())[1:]
    assert {(look.colour, look.marker) for look in own} == {(1, 1)}
    assert [look.dash for look in own] == [0, 1, 2]
    assert [look.hollow for look in own] == [False, True, True]
    swatches = [look.swatch.strip("─╌┈┄") for look in own]
    assert swatches[0] in "●■▲◆▼⬟" and all(swatch in "○□△◇▽⬠" for swatch in swatches[1:])


def points_of(svg, start='<path d="M'):
    text = svg.split("data-style=", 1)[1].split(start, 1)[1].split('"')[0]
    return [tuple(map(float, point)) for point in re.findall(r"([\d.]+) ([\d.]+)", text)]


def test_a_line_is_drawn_where_its_numbers_are():
    series = Series("a & $b", Look(9, 1, 1), (1.0, 2.0, 4.0), (0.0, 50.0, 100.0))
    svg = as_svg(Lines("A <title>", "x", "y", (series,), (1, 2, 4), (0.0, 100.0), log_x=True), "one")
    points = points_of(svg)
    # Evenly spaced on a log axis; up is up; halfway is halfway.
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)
    assert points[0][1] > points[1][1] > points[2][1]
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2, abs=0.1)
    assert "A &lt;title&gt;" in svg and '<g data-style="9"><title>a &amp; $b</title>' in svg
    assert "var(--s1)" in svg and "stroke-dasharray" in svg and "#" not in svg.replace('href="#', "")
    assert 'viewBox="0 0 360 ' in svg and "://" not in svg and "url(" not in svg
    # Bands, and lines of many points without markers.
    band = replace(series, low=(0.0, 40.0, 90.0), high=(10.0, 60.0, 100.0))
    assert as_svg(Lines("", "x", "y", (band,)), "two").count('data-style="9"') == 2


def test_one_budget_is_drawn_side_by_side():
    series = tuple(Series(str(n), Look(n, n), (64.0,), (50.0,), (40.0,), (60.0,)) for n in range(2))
    svg = as_svg(Lines("A title", "x", "y", series, y_range=(0.0, 100.0)), "one")
    drawn = [part for part in re.findall(r"data-style=.*?</g>", svg) if "<use" not in part]
    bars = [points_of(part) for part in drawn]
    (one, two) = (bar for bar in bars if len(bar) == 2)
    assert one[0][0] == one[1][0] < two[0][0] == two[1][0] and one[0][1] > one[1][1]  # from low to high is up


def test_a_forest_keeps_its_marks_in_the_frame():
    dots = (Dot(0, 3.0, 1.0, 500.0, "one: +3.0", COLOURS[0]), Dot(1, -1.0, -2.0, 0.0, "two", COLOURS[1]))
    svg = as_svg(Rows("t", "points", ((0, "one"), (1, "two" * 20)), dots, (-10.0, 10.0), 0.0, 2.0), "forest")
    ends = [x for x, _ in points_of(svg)]
    assert max(ends) <= 360 and "<title>one: +3.0</title>" in svg and "two" * 20 not in svg and "…" in svg


def test_cells():
    assert number(None).text == "" and number(float("nan")).value is None
    assert number(-0.25, 1, sign=True).text == "-0.2" and p_value(0.0004).text == "< 0.001"
    names = ["full cache", "keep_ratio 0.2", "128 tokens per head"]
    assert [budget_name(one) for one in (1.0, 0.2, 128.0)] == names
