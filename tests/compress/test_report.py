"""The verdict for people: words, the table of the terminal, report.md and junit.xml."""

import io
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from compress.amounts import format_bounds, format_bytes, format_loss, format_score
from compress.junit import junit_xml
from compress.report import claim, headline, report_markdown, result_table


def metric(name="text", verdict="PASS", **fields):
    return {
        "id": name,
        "kind": "log_perplexity",
        "required": True,
        "n": 64,
        "baseline": 2.0,
        "variant": 2.01,
        "loss": 0.01,
        "lower": 0.005,
        "upper": 0.015,
        "margin": 0.0295588,
        "verdict": verdict,
        "reason": f"the reason of {name}",
    } | fields


def gate_of(*metrics, verdict="PASS", **fields):
    return {
        "verdict": verdict,
        "exit_code": 0,
        "reason": "why",
        "warnings": [],
        "alpha": 0.05,
        "metrics": metrics,
    } | fields


REFUSED = {key: None for key in ("baseline", "variant", "loss", "lower", "upper")}
FOUR = gate_of(
    metric("text"),
    metric("math", "FAIL", kind="gold_nll", baseline=0.965, variant=1.2, loss=0.235, lower=0.2, upper=0.27,
           margin=0.05),
    metric("task", "INCONCLUSIVE", kind="accuracy", baseline=0.8, variant=0.78, loss=0.02, lower=-0.0069, upper=0.0586,
           margin=0.05),
    metric("kl", "REFUSED", kind="kl", margin=0.2, required=False, **REFUSED),
    verdict="FAIL",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "score", "loss", "bounds"),
    [
        ("log_perplexity", "7.481 ppl", "+648.05%", "+0.00 to +1.01"),
        ("gold_nll", "2.0123", "+2.0123 nats", "+0.0000 to +0.0100"),
        ("bits_per_byte", "2.0123", "+2.0123 bits/B", "+0.0000 to +0.0100"),
        ("kl", "2.0123", "2.0123 nats", "0.0000 to 0.0100"),
        ("accuracy", "201.2%", "+201.23 pp", "+0.00 to +1.00"),
    ],
)
def test_amounts_by_kind(kind, score, loss, bounds):
    assert format_score(kind, 2.0123) == score
    assert format_loss(kind, 2.0123) == loss
    assert format_bounds(kind, 0.0, 0.01) == bounds


def test_what_was_not_computed_is_a_dash():
    assert (format_score("kl", None), format_loss("kl", None), format_bounds("kl", None, 1.0)) == ("–", "–", "–")


@pytest.mark.parametrize(
    ("nats", "text"), [(6.9, "992.275 ppl"), (9.0, "8103 ppl"), (20.0, "4.852e+08 ppl"), (800.0, "over 1e304 ppl")]
)
def test_perplexities_of_any_size(nats, text):
    assert format_score("log_perplexity", nats) == text


def test_growth_beyond_float64():
    assert format_loss("log_perplexity", 800.0) == "over 1e306%"


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (1000, "1.0 kB"), (53_084_160, "53.1 MB"), (269e9, "269.00 GB")]
)
def test_sizes(count, text):
    assert format_bytes(count) == text


def printed(table, width):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_the_table_shows_each_metric_on_one_line_of_84_columns():
    lines = printed(result_table(FOUR), 84).splitlines()
    words = [line.split() for line in lines if line.strip() and "─" not in line]
    assert words[:5] == [
        ["metric", "n", "baseline", "variant", "loss", "bounds", "margin", "verdict"],
        ["text", "64", "7.389", "7.463", "+1.01%", "+0.50..+1.51", "+3.00%", "PASS"],
        ["math", "64", "0.9650", "1.2000", "+0.2350", "+0.2000..+0.2700", "+0.0500", "FAIL"],
        ["task", "64", "80.0%", "78.0%", "+2.00", "-0.69..+5.86", "+5.00", "INCONCLUSIVE"],
        ["kl*", "64", "–", "–", "–", "–", "0.2000", "REFUSED"],
    ]
    below = " ".join(word for line in words[5:] for word in line)
    assert below == (
        "text: perplexity · math: nats per token · task: accuracy in points · kl: nats per token from the source "
        "* not required: can warn, cannot block"
    )


def test_a_narrow_table_loses_no_text():
    text = printed(result_table(FOUR), 60)
    assert "…" not in text and "INCONCLUSIVE" in text


def test_verdicts_have_a_colour_each():
    table = result_table(FOUR)
    styles = [cell.style for cell in table.columns[-1].cells]
    assert len(set(styles)) == 4 and "green" in styles[0] and "red" in styles[1]


def test_names_are_text_and_no_markup():
    assert "[red]x" in printed(result_table(gate_of(metric("[red]x"))), 100)


def test_headline_gives_the_reason_where_it_blocks():
    assert headline(FOUR) == "FAIL: a loss above the margin is shown, so the variant is blocked (why)"
    assert headline(gate_of(metric())) == "PASS: every required metric shows a loss below its margin"


def test_the_claim_states_confidence_and_its_limits():
    assert claim(gate_of(alpha=0.01)).startswith("With 99% confidence for each metric, on samples like those measured,")
    assert "nothing about safety" in claim(gate_of())


def test_report_begins_with_the_verdict_and_claims_only_what_passed(make_run):
    directory, gate = make_run()
    text = (directory / "evidence" / "report.md").read_text()
    assert text.splitlines()[:5] == [
        "# PASS",
        "",
        "PASS: every required metric shows a loss below its margin.",
        "",
        claim(gate),
    ]


def test_a_blocked_report_claims_nothing(make_run):
    directory, gate = make_run(0.2)
    text = (directory / "evidence" / "report.md").read_text()
    assert text.startswith("# FAIL\n") and claim(gate) not in text
    assert "| text | 40 | " in text and "| FAIL |" in text


def test_report_says_what_was_done_and_how_to_do_it_again(make_run):
    directory, _ = make_run()
    text = (directory / "evidence" / "report.md").read_text()
    for line in (
        "| weights of the source | 269.0 MB |",
        "| weights of the variant | 134.5 MB, 2.00 times smaller |",
        "| peak memory | 900.0 MB |",
        "## quantize to int8 (rtn)",
        "| model.layers.\\*.mlp.down\\_proj ×30 | 576×1536 | int8 | 53.1 MB → 26.6 MB |",
        "| lm\\_head | 49152×576 | in ignore |",
        "```sh\ncompress run recipe=int8.yaml\ncompress verify out/int8\n```",
    ):
        assert line in text


RUN = {"command": "compress gate a b", "output": "o", "stages": [], "bytes_before": 4, "bytes_after": 2, "seconds": 1.0,
       "peak_bytes": None}  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "stages", "place"),
    [("PASS", 1, "o"), ("WAIVED", 1, "o"), ("FAIL", 1, "o.blocked"), ("REFUSED", 1, "o.blocked"), ("FAIL", 0, "o")],
    ids=["pass", "waived", "fail", "refused", "judged where it lies"],
)
def test_the_check_names_where_the_variant_lies(verdict, stages, place):
    stage = {"name": "quantize", "summary": "quantize", "seconds": 1.0, "layers": []}
    text = report_markdown(gate_of(metric(), verdict=verdict), RUN | {"stages": [stage] * stages})
    assert f"\ncompress verify {place}\n```" in text


def test_a_report_without_stages_and_peak():
    text = report_markdown(gate_of(metric()), RUN)
    assert "peak memory" not in text and "became" not in text and "\n\n\n" not in text


def test_warnings_are_listed():
    text = report_markdown(gate_of(metric(), warnings=["kl: FAIL, too far"]), RUN)
    assert "## Warnings\n\n- kl: FAIL, too far\n" in text


def test_names_from_outside_cannot_become_markup():
    stage = {"name": "s", "summary": "s", "layers": [{"pattern": "a|b<img>\n# x", "count": 1, "shape": [1, 2],
             "becomes": "`f`", "reason": "", "bytes_before": 1, "bytes_after": 1}]}  # fmt: skip
    text = report_markdown(gate_of(metric("x|[y](z)")), RUN | {"stages": [stage]})
    assert "| x\\|\\[y\\](z) | 64 |" in text
    assert "| a\\|b\\<img\\> \\# x | 1×2 | \\`f\\` |" in text


def test_a_command_with_a_fence_stays_inside_its_own():
    text = report_markdown(gate_of(metric()), RUN | {"command": "compress run a=```"})
    assert "``````sh\ncompress run a=```\ncompress verify o\n``````" in text


def cases(gate):
    root = ElementTree.fromstring(junit_xml(gate))
    found = {case.get("name"): [(child.tag, child.get("type")) for child in case] for case in root.iter("testcase")}
    return root, found


def test_junit_has_a_testcase_per_metric_in_the_state_of_its_verdict():
    root, found = cases(gate_of(*FOUR["metrics"], metric("more", "REFUSED", **REFUSED), verdict="REFUSED"))
    assert found == {
        "text": [("system-out", None)],
        "math": [("failure", "FAIL")],
        "task": [("failure", "INCONCLUSIVE")],
        "kl": [("system-out", None)],
        "more": [("error", "REFUSED")],
    }
    assert dict(root.attrib) == {"tests": "5", "failures": "2", "errors": "1"}


def test_junit_turns_red_even_if_no_metric_shows_why():
    _, found = cases(gate_of(metric(), verdict="REFUSED", reason="the tokenizers differ"))
    assert found == {"text": [("system-out", None)], "verdict": [("error", "REFUSED")]}
    _, found = cases(gate_of(verdict="REFUSED"))
    assert found == {"verdict": [("error", "REFUSED")]}


def test_junit_escapes_and_replaces_what_xml_cannot_hold():
    text = junit_xml(gate_of(metric('<a>&"', "FAIL", reason="bad \x00 <b> ]]> \ud800"), verdict="FAIL"))
    case = ElementTree.fromstring(text).find(".//testcase")
    assert case.get("name") == '<a>&"'
    assert case.find("failure").text == "bad \N{REPLACEMENT CHARACTER} <b> ]]> \N{REPLACEMENT CHARACTER}"
    assert text.startswith('<?xml version="1.0" encoding="utf-8"?>\n')


def test_junit_of_a_run_is_well_formed(make_run):
    directory, _ = make_run()
    root = ElementTree.parse(directory / "evidence" / "junit.xml").getroot()
    assert root.get("tests") == "4" and root.get("failures") == "0"
