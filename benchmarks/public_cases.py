"""RPEG's verdicts on published cases against what happened: out of memory, rejected degrees, the better of two splits.

python benchmarks/public_cases.py [--json] [--write docs/public-cases.md] [CASE ...]

measured/public_cases.json has the cases as they were collected, measured/case_questions.yaml what each is asked, with
the source of every further fact, or why it cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rpeg_core.cli.ui import print_json, print_table, print_text
from rpeg_core.plugins.registry import Registry

sys.path.insert(0, str(Path(__file__).parent))
from case_questions import QUESTIONS, Asker

__all__ = ["Case", "Result", "asked", "counted", "load_cases", "markdown", "share_right"]

MEASURED = Path(__file__).parent / "measured"
REASONS = {"facts": "facts are missing", "software": "not a question of a plan"}


@attrs.frozen(kw_only=True)
class Case:
    """A published case.

    Attributes:
        id, framework, grade: of the collection.
        happened: what was observed.
        source: where it is described.
        questions: what is asked; empty when it cannot be asked.
        asides: asked and shown, but not counted.
        not_asked: a key of :data:`REASONS`, empty when it is asked.
        text: what is asked of whom, in words; or what is missing.
        explanation: how the verdict comes about, and of a miss why.
        miss: whether RPEG is known to be wrong.
    """

    id: str
    framework: str
    grade: str
    happened: str
    source: str
    text: str
    questions: tuple[dict[str, Any], ...] = ()
    asides: tuple[dict[str, Any], ...] = ()
    not_asked: str = ""
    explanation: str = ""
    miss: bool = False


@attrs.frozen(kw_only=True)
class Result:
    """A case with RPEG's verdicts: (verdict, number, reality) for each question, and what it says besides."""

    case: Case
    answers: tuple[tuple[str, str, str], ...]
    besides: str = ""

    @property
    def right(self) -> bool:
        return all(verdict == reality for verdict, _, reality in self.answers)


def load_cases() -> tuple[tuple[Case, ...], dict[str, Any]]:
    """All cases in the order of the collection, and the models that the questions describe.

    Raises:
        ValueError: the two files do not name the same cases, or a question does not exist.
    """
    rows = json.loads((MEASURED / "public_cases.json").read_text(encoding="utf-8"))
    document = yaml.safe_load((MEASURED / "case_questions.yaml").read_text(encoding="utf-8"))
    described = document["cases"]
    if {row["id"] for row in rows} != set(described):
        raise ValueError(f"cases differ: {sorted({row['id'] for row in rows} ^ set(described))}")
    cases = []
    for row in rows:
        entry = described[row["id"]]
        questions = tuple(entry.get("questions", ()))
        asides = tuple(entry.get("asides", ()))
        unknown = {question["ask"] for question in (*questions, *asides)} - set(QUESTIONS)
        if unknown or bool(questions) == ("not_asked" in entry):
            raise ValueError(
                f"{row['id']}: unknown questions {sorted(unknown)}, or neither or both of questions, not_asked"
            )
        cases.append(
            Case(
                id=row["id"],
                framework=row["framework"],
                grade=row["grade"],
                happened=row["observed"],
                source=entry["source"],
                text=" ".join(entry["text"].split()),
                questions=questions,
                asides=asides,
                not_asked=entry.get("not_asked", ""),
                explanation=" ".join(entry.get("explanation", "").split()),
                miss=entry.get("miss", False),
            )
        )
    return tuple(cases), document["models"]


def asked(cases: Sequence[Case], asker: Asker) -> tuple[Result, ...]:
    """RPEG's verdicts on all cases; a case that cannot be asked has none."""
    results = []
    for case in cases:
        found = [(asker.ask(question), question["reality"]) for question in case.questions]
        besides = [asker.ask(question) for question in case.asides]
        results.append(
            Result(
                case=case,
                answers=tuple((answer.verdict, answer.number, str(reality)) for answer, reality in found),
                besides="; ".join(f"{answer.verdict} ({answer.number})" for answer in besides),
            )
        )
    return tuple(results)


def counted(results: Sequence[Result]) -> list[Result]:
    """Those that were asked."""
    return [result for result in results if result.answers]


def share_right(results: Sequence[Result]) -> float:
    """Share of the cases that were asked in which every verdict is what happened."""
    asked_of = counted(results)
    return sum(result.right for result in asked_of) / len(asked_of)


def _rows(results: Sequence[Result]) -> list[list[str]]:
    return [
        [
            result.case.id,
            result.case.text,
            "; ".join(f"{verdict} ({number})" for verdict, number, _ in result.answers),
            "; ".join(reality for _, _, reality in result.answers),
            "right" if result.right else "wrong",
            result.case.explanation + (f" Besides: {result.besides}." if result.besides else ""),
        ]
        for result in counted(results)
    ]


def _left(results: Sequence[Result], kind: str) -> list[list[str]]:
    """Cases that are not asked: id, what happened, why, what RPEG says all the same."""
    return [
        [result.case.id, result.case.happened, result.case.text, result.besides]
        for result in results
        if result.case.not_asked == kind
    ]


def _document(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "asked": len(counted(results)),
        "right": sum(result.right for result in counted(results)),
        "cases": [
            {
                "id": result.case.id,
                "framework": result.case.framework,
                "grade": result.case.grade,
                "source": result.case.source,
                "happened": result.case.happened,
                "question": result.case.text,
                "answers": [dict(zip(("verdict", "number", "reality"), a, strict=True)) for a in result.answers],
                "besides": result.besides,
                "right": result.right if result.answers else None,
                "not_asked": result.case.not_asked or None,
                "explanation": result.case.explanation,
            }
            for result in results
        ],
    }


def markdown(results: Sequence[Result]) -> str:
    """docs/public-cases.md."""
    sources = {result.case.id: result.case.source for result in results}

    def linked(row: Sequence[str]) -> list[str]:
        source = sources[row[0]]
        return [f"[{row[0]}]({source})" if source.startswith("http") else row[0], *row[1:]]

    right = sum(result.right for result in counted(results))
    lines = [
        "# Published cases",
        "",
        "<!-- python benchmarks/public_cases.py --write docs/public-cases.md -->",
        "",
        *textwrap.wrap(
            f"{len(results)} cases that users of other frameworks published: what did not fit, what was refused, which "
            f"of two splits was better. {len(counted(results))} say enough to ask RPEG the same question; it is right "
            f"in {right} of them ({share_right(results):.0%}). Facts beyond a case have their source in "
            "`benchmarks/measured/case_questions.yaml`; where one is not known, the question is asked for all that it "
            "may be, and counts only if the verdict is always the same. Nothing is fitted to these cases.",
            width=120,
        ),
        "",
        *_table(["case", "question", "RPEG's verdict", "what happened", "RPEG is", "why"], map(linked, _rows(results))),
    ]
    for kind, words in REASONS.items():
        lines += ["", f"## Not asked: {words}", ""]
        lines += _table(
            ["case", "what happened", "why it is not asked", "what RPEG says"], map(linked, _left(results, kind))
        )
    return "\n".join([*lines, ""])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="ask these only; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--write", type=Path, help="write the table of all cases to this file")
    arguments = parser.parse_args()
    cases, models = load_cases()
    chosen = [case for case in cases if not arguments.case or case.id in arguments.case]
    results = asked(chosen, Asker(Registry(), models, QUESTIONS))
    if arguments.write is not None:
        arguments.write.write_text(markdown(results), encoding="utf-8")
    if arguments.json:
        print_json(_document(results))
        return 0
    if counted(results):
        print_table(["case", "question", "RPEG", "happened", "", "why"], _rows(results))
    for kind, words in REASONS.items():
        if rows := _left(results, kind):
            print_table([f"not asked: {words}", "happened", "why", "RPEG says"], rows)
    if counted(results):
        right = sum(result.right for result in counted(results))
        print_text(f"{right} of {len(counted(results))} right ({share_right(results):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
