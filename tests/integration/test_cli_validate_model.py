"""``rpeg validate-model`` on the shipped tables: the error targets, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.cli.main import main

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured"
TABLES = ["--training", "training.csv", "--generation", "generation.csv", "--rl", "rl_step.csv"]


def run(capsys, *arguments):
    code = main(["validate-model", *(str(MEASURED / a) if a.endswith(".csv") else a for a in arguments)])
    return code, capsys.readouterr()


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    import contextlib
    import io

    picture = tmp_path_factory.mktemp("picture") / "errors.svg"
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(
            ["validate-model", *(str(MEASURED / a) if a.endswith(".csv") else a for a in TABLES), "--json",
             "--picture", str(picture)]
        )  # fmt: skip
    assert code == ExitCode.DONE
    return json.loads(text.getvalue()), picture


TARGETS = [
    ("training-16bit", "A", 0.06),
    ("training-8bit", "A", 0.12),
    ("training-moe", "all", 0.15),
    ("generation-tpot", "all", 0.12),
    ("generation-static", "all", 0.12),
    ("rl-step", "A", 0.15),
    ("memory", "all", 0.10),
]


@pytest.mark.parametrize(("kind", "grade", "target"), TARGETS)
def test_mean_absolute_errors_meet_their_targets(document, kind, grade, target):
    found = document[0]["kinds"][kind]
    errors = found["all"] if grade == "all" else found["grades"][grade]
    assert errors["rows"] >= 6
    assert errors["mape"] <= target


def test_dense_training_is_ranked_right(document):
    assert document[0]["kinds"]["training-16bit"]["grades"]["A"]["spearman"] >= 0.99


def test_every_row_is_priced_or_skipped_with_a_reason(document):
    found = document[0]
    for name, kinds in (("training.csv", "training-"), ("generation.csv", "generation-"), ("rl_step.csv", "rl-")):
        rows = len((MEASURED / name).read_text(encoding="utf-8").strip().splitlines()) - 1
        priced = sum(row["kind"].startswith(kinds) for row in found["rows"])
        skipped = [s for s in found["skipped"] if s["file"].endswith(name) and not s["reason"].startswith("memory:")]
        assert priced + len(skipped) == rows
    assert all(row["reason"] for row in found["skipped"])


def test_terms_add_up_to_the_prediction(document):
    for row in document[0]["rows"]:
        assert sum(row["terms"].values()) == pytest.approx(row["predicted"])
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def test_the_picture_is_drawn(document):
    text = document[1].read_text(encoding="utf-8")
    assert text.lstrip().startswith("<?xml")
    assert "training-16bit" in text


@pytest.mark.parametrize(
    "kind", ["training-16bit", "training-8bit", "training-moe", "generation-tpot", "generation-static", "rl-step"]
)
def test_intervals_hold_nine_rows_of_ten(document, kind):
    """These rows are those that the errors come from; held-out rows are in test_error_derivation.py."""
    rows = [row for row in document[0]["rows"] if row["kind"] == kind]
    inside = [row["interval"][0] <= row["measured"] <= row["interval"][1] for row in rows]
    assert all(row["interval"][0] <= row["predicted"] <= row["interval"][1] for row in rows)
    assert document[0]["kinds"][kind]["all"]["inside"] == pytest.approx(sum(inside) / len(inside))
    assert sum(inside) / len(inside) >= 0.9


def test_text_has_groups_worst_rows_and_skipped_rows(capsys):
    code, out = run(capsys, "--rl", "rl_step.csv", "--worst", "2")
    assert code == ExitCode.DONE
    lines = [line.split("\t") for line in out.out.splitlines()]
    assert ["what", "grade", "rows", "MAPE", "bias", "Spearman", "in 90% interval"] in lines
    assert ["what", "GPU", "rows", "MAPE", "bias", "Spearman", "in 90% interval"] in lines
    assert sum(line[0] == "rl-step" and line[1].startswith("R0") for line in lines) == 2
    assert any(line[0] == "rl_step.csv" and "is not known" in line[3] for line in lines)


def test_nothing_to_validate_is_a_usage_error(capsys):
    code, out = run(capsys)
    assert code == ExitCode.USAGE
    assert "there is nothing to validate" in out.err


def test_rows_that_all_fail_end_with_no(capsys, tmp_path):
    header = (MEASURED / "rl_step.csv").read_text(encoding="utf-8").splitlines()[0]
    empty = tmp_path / "empty.csv"
    empty.write_text(header + "\n", encoding="utf-8")
    code, out = run(capsys, "--rl", str(empty))
    assert code == ExitCode.NO
    assert "no row could be replayed" in out.err
