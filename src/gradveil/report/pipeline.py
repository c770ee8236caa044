"""A finding for machines that watch machines: JUnit XML, and the annotations that GitHub reads from a job's output.

In both, a failure is a `--fail-if` condition that holds, so that they agree with the exit code. What the audit cannot tell is
an error. A leak on which no condition was set is told (a property, a warning), not failed: what is tolerable is for the
user to say.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from gradveil.auditing.condition import CheckedCondition, untold
from gradveil.core.errors import UserError
from gradveil.core.text import listing, plain
from gradveil.report import words
from gradveil.storage.files import check_replaceable, write_text
from gradveil.summary import CANNOT_TELL, LEAKS, AttackRow, DefenseRow, Summary


def write_junit(summary: Summary, checked: Sequence[CheckedCondition], file: str | Path) -> Path:
    """One test suite per defense: one test case for the verdict, one for every condition and one for every attack."""
    file = check_file(file)
    suites = [_suite(defense, checked) for defense in summary.defenses]
    cases = [case for suite in suites for case in suite.iter("testcase")]
    root = ET.Element("testsuites", {"name": "gradveil", **_counts(cases)})
    root.extend(suites)
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    write_text(file, f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n')
    return file


def check_file(file: str | Path) -> Path:
    """Said before an audit begins, not after it."""
    if Path(file).is_dir():
        raise UserError(f"{file} is a folder; --junit names a file, such as junit.xml.")
    check_replaceable(Path(file), '<testsuites name="gradveil"')
    return Path(file)


def _suite(defense: DefenseRow, checked: Sequence[CheckedCondition]) -> ET.Element:
    cases = [_verdict(defense), *(_condition(condition, defense) for condition in checked)]
    cases += [_attack(defense, row) for row in defense.attacks if row.against == "original"]
    suite = ET.Element("testsuite", {"name": plain(defense.spec), **_counts(cases)})
    identified = words.rate_text(defense.worst.identified if defense.worst else None)
    facts = {"verdict": defense.verdict, "scope": defense.scope, "identified": identified}
    if defense.loss is not None:
        facts["accuracy loss, percent"] = words.digits(defense.loss, 1)
    properties = ET.SubElement(suite, "properties")
    for key, value in facts.items():
        ET.SubElement(properties, "property", name=key, value=plain(value))
    suite.extend(cases)
    notes = [words.verdict_sentence(defense), *(w.text for w in defense.warnings)]
    ET.SubElement(suite, "system-out").text = "\n".join(plain(note) for note in notes)
    return suite


def _verdict(defense: DefenseRow) -> ET.Element:
    """Passed where the audit can tell, be it that updates leak: whether that is tolerable is for the conditions to say."""
    case = _case(defense, "verdict")
    if defense.verdict == CANNOT_TELL:
        ET.SubElement(case, "error", type=CANNOT_TELL, message=plain(words.verdict_sentence(defense)))
    return case


def _condition(condition: CheckedCondition, defense: DefenseRow) -> ET.Element:
    case = _case(defense, f"not: {condition.text}")
    if defense.spec in condition.holds:
        message = plain(f"{condition.text} holds for {defense.spec}")
        ET.SubElement(case, "failure", type="fail-if", message=message).text = plain(words.verdict_sentence(defense))
    elif fields := condition.missing.get(defense.spec):
        ET.SubElement(case, "error", type="not measured", message=plain(f"{listing(fields)} was not measured"))
    return case


def _attack(defense: DefenseRow, row: AttackRow) -> ET.Element:
    """An attack that ran is a passed case, whatever it got; one that broke is an error, for it has shown nothing."""
    case = _case(defense, f"attack: {row.spec}")
    case.set("time", f"{row.seconds or 0.0:.3f}")
    if row.status in ("not applicable", "not run"):
        ET.SubElement(case, "skipped", message=plain(row.error or "does not apply here"))
    elif not row.ok:
        ET.SubElement(case, "error", type=plain(row.status), message=plain(row.error or row.status))
    return case


def _case(defense: DefenseRow, name: str) -> ET.Element:
    return ET.Element("testcase", classname=plain(f"gradveil.{defense.spec}"), name=plain(name))


def _counts(cases: Sequence[ET.Element]) -> dict[str, str]:
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {name: str(sum(case.find(tag) is not None for case in cases)) for name, tag in tags.items()}
    seconds = sum(float(case.get("time", "0")) for case in cases)
    return {"time": f"{seconds:.3f}", "tests": str(len(cases)), **counts}


def github_annotations(summary: Summary, checked: Sequence[CheckedCondition]) -> Iterator[str]:
    """Workflow commands: an error for each condition that holds, a warning for what cannot be told, for each other leak and
    each caveat."""
    for defense in summary.defenses:
        for condition in checked:
            if defense.spec in condition.holds:
                yield _annotation("error", f"{defense.spec}: {condition.text}", words.verdict_sentence(defense))
    for line in untold(summary, checked):
        yield _annotation("warning", "Gradveil", line)
    failed = {spec for condition in checked for spec in condition.holds}
    for defense in summary.defenses:
        # That undefended updates leak is what an audit expects.
        if defense.verdict == LEAKS and not defense.control and defense.spec not in failed:
            yield _annotation("warning", f"{defense.spec} leaks", words.verdict_sentence(defense))
    for caveat in words.caveats(summary):
        yield _annotation("warning", "Gradveil", caveat.text)
    for defense in summary.defenses:
        for warning in defense.warnings:
            yield _annotation("warning", defense.spec, warning.text)


def _annotation(level: str, title: str, message: str) -> str:
    """Both parts are data to the runner: what would end them is escaped, in the order that the runner undoes it."""
    head, text = (part.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A") for part in (title, message))
    return f"::{level} title={plain(head.replace(':', '%3A').replace(',', '%2C'))}::{plain(text)}"
