"""JUnit XML: the form in which every CI system shows which metric blocked.

FAIL and INCONCLUSIVE are failures, REFUSED is an error: the format has no third state, and `skipped` would be green.
A metric that is not required never turns red; what it has to say is in its output.
"""

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

__all__ = ["junit_xml"]

ELEMENTS = {"FAIL": "failure", "INCONCLUSIVE": "failure", "REFUSED": "error"}
# Characters that XML 1.0 cannot hold even escaped.
ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(gate: Mapping[str, Any]) -> str:
    """One testcase per metric of gate.json, and one for the verdict if nothing else shows why it blocks."""
    cases = [_case(metric["id"], metric, required=metric["required"]) for metric in gate["metrics"]]
    if gate["verdict"] != "PASS" and not any(case.find("*[@type]") is not None for case in cases):
        cases.append(_case("verdict", gate, required=True))
    counts = {name: sum(case.find(name) is not None for case in cases) for name in ("failure", "error")}
    totals = {"tests": str(len(cases)), "failures": str(counts["failure"]), "errors": str(counts["error"])}
    suite = ElementTree.Element("testsuite", {"name": "compress gate", **totals})
    suite.extend(cases)
    root = ElementTree.Element("testsuites", totals)
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _case(name: str, found: Mapping[str, Any], *, required: bool) -> ElementTree.Element:
    verdict, reason = found["verdict"], _legal(found["reason"])
    case = ElementTree.Element("testcase", classname="compress.gate", name=_legal(name))
    if required and verdict in ELEMENTS:
        ElementTree.SubElement(case, ELEMENTS[verdict], type=verdict, message=reason).text = reason
    else:
        ElementTree.SubElement(case, "system-out").text = f"{verdict}: {reason}"
    return case


def _legal(text: str) -> str:
    return ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
