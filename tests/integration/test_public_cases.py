"""Published cases, one test each: RPEG's verdict is what happened (benchmarks/public_cases.py)."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
AIM = 0.9
"""Share of the cases that RPEG has to be right about."""


@functools.cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_cases", REPOSITORY / "benchmarks" / "public_cases.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["public_cases"] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def results() -> dict:
    module = script()
    cases, models = module.load_cases()
    return {
        result.case.id: result
        for result in module.asked(cases, module.Asker(module.Registry(), models, module.QUESTIONS))
    }


def asked() -> list:
    cases, _ = script().load_cases()
    return [
        pytest.param(case.id, marks=pytest.mark.xfail(strict=True, reason=case.explanation) if case.miss else ())
        for case in cases
        if case.questions
    ]


@pytest.mark.parametrize("case", asked())
def test_the_verdict_is_what_happened(case: str) -> None:
    for verdict, number, reality in results()[case].answers:
        assert verdict == reality, number


def test_nine_of_ten_cases_are_right() -> None:
    assert script().share_right(list(results().values())) >= AIM


def test_every_case_is_asked_or_says_why_not() -> None:
    cases, _ = script().load_cases()
    assert len(cases) == 38
    assert all(bool(case.questions) != bool(case.not_asked) for case in cases)
    assert all(case.explanation for case in cases if case.questions)


def test_a_fact_that_is_not_known_may_not_change_the_verdict() -> None:
    """With half as many tokens as with CP2 the training of case-17 fits: asked for both, there is no verdict."""
    module = script()
    cases, models = module.load_cases()
    question = next(case for case in cases if case.id == "case-17").questions[0]
    asker = module.Asker(module.Registry(), models, module.QUESTIONS)
    assert asker.ask({**question, "range": {"tokens": [16384, 32768]}}).verdict == "it depends"


def test_the_page_is_what_the_script_writes() -> None:
    module = script()
    written = (REPOSITORY / "docs" / "public-cases.md").read_text(encoding="utf-8")
    assert written == module.markdown(list(results().values()))
