"""``rpeg explain``: parts add up to the totals that the plan promises."""

from __future__ import annotations

import json

import pytest

from rpeg_core.planning.plan import load_plan


@pytest.fixture
def plan(rpeg, experiment) -> None:
    """PPO with three length phases, placed so that inference runs beside generation."""
    workload = {"response_tokens": 1024, "response_lengths": [[0.5, 256], [0.85, 512], [1.0, 1024]]}
    pin = {
        "actor_generation": {"gpus": "0-15", "dp": 4, "pp": 1, "tp": 4, "microbatches": 1},
        "reference_inference": {"gpus": "16-31", "dp": 16, "pp": 1, "tp": 1, "microbatches": 1},
    }
    assert rpeg("predict", experiment(workload=workload, pin=pin), "-o", "plan.json").code == 0


def test_terms_add_up_to_the_operators_of_the_plan(rpeg, plan) -> None:
    document = json.loads(rpeg("explain", "plan.json", "--json").out)
    made = load_plan("plan.json")
    assert document["digest"] == made.digest
    assert list(document["operators"]) == list(made.assignments)
    assert len(made.prediction.operator_s["actor_generation"]) == 3
    for name, operator in document["operators"].items():
        assert sum(operator["seconds"].values()) == pytest.approx(sum(made.prediction.operator_s[name]))


def test_memory_terms_add_up_to_the_peaks_of_the_plan(rpeg, plan) -> None:
    document = json.loads(rpeg("explain", "plan.json", "--json").out)
    peaks = {gpus: peak for gpus, peak, _ in load_plan("plan.json").prediction.memory}
    for segment in document["memory"]:
        assert sum(term["bytes"] for term in segment["terms"]) == pytest.approx(peaks[segment["gpus"]])


def test_transfers_are_those_of_one_step(rpeg, plan) -> None:
    document = json.loads(rpeg("explain", "plan.json", "--json").out)
    total = sum(transfer["seconds"] for transfer in document["transfers"])
    assert total == pytest.approx(load_plan("plan.json").prediction.transfers_s)
    phases = [t for t in document["transfers"] if t["operator"] == "reference_inference" and t["phase"] is not None]
    assert [t["phase"] for t in phases] == [0, 1, 2]
    assert [t["payload_bytes"] / sum(p["payload_bytes"] for p in phases) for t in phases] == pytest.approx(
        [0.5, 0.35, 0.15]
    )


def test_the_critical_path_is_the_makespan(rpeg, plan) -> None:
    ran = rpeg("explain", "plan.json")
    title = next(line for line in ran.out.splitlines() if line.startswith("critical path"))
    assert title.startswith("critical path of 8 steps, ")
    shares = [float(row[2].rstrip("%")) for row in ran.table(title)[1:]]
    assert sum(shares) == pytest.approx(100, abs=2)


def test_every_section_of_the_text(rpeg, plan) -> None:
    ran = rpeg("explain", "plan.json", "--sources")
    assert (ran.code, ran.err) == (0, "")
    terms = ran.table("time of one step, by term")
    assert terms[0] == ["operator", "term", "time", "share", "cost term"]
    assert terms[1][:2] == ["actor_generation", "total"]
    assert ran.table("memory per GPU, by term; 91.8 GB usable")[0][:4] == ["GPUs", "of", "term", "held"]
    assert ran.table("transfers of one step")[0][:3] == ["for", "kind", "carries"]
    assert ran.table("cost terms")[1][0].startswith("rpeg-plugin-analytical ")
    assert "device.memory_bytes" in [row[0] for row in ran.table("where the numbers of gh200 come from")]


def test_one_operator(rpeg, plan) -> None:
    ran = rpeg("explain", "plan.json", "--operator", "critic_training")
    assert [row[0] for row in ran.table("plan")[1:]] == ["critic_training"]
    assert {row[0] for row in ran.table("time of one step, by term")[1:]} == {"critic_training"}
    assert "cost terms" not in ran.out


def test_every_time_has_an_interval_that_holds_it(rpeg, plan) -> None:
    document = json.loads(rpeg("explain", "plan.json", "--json").out)
    made = load_plan("plan.json")
    assert document["intervals"] == made.intervals.document()
    step = made.intervals.step_s
    assert step.low <= made.prediction.step_s < step.high
    tokens = made.workload.tokens_per_step
    assert document["intervals"]["tokens_per_s"] == [tokens / step.high, tokens / step.low]
    for name, operator in document["operators"].items():
        low, high = document["intervals"]["operator_s"][name]
        assert low < sum(made.prediction.operator_s[name]) < high
        for term, (term_low, term_high) in operator["seconds_interval"].items():
            assert term_low <= operator["seconds"][term] <= term_high


def test_the_text_names_what_was_not_measured(rpeg, plan) -> None:
    """GH200 is in no table of measured runs, and 1,536 tokens are shorter than any measured training sequence."""
    out = rpeg("explain", "plan.json").out
    assert "(a-b): 90% interval, from the errors of measured runs (docs/validation.md)" in out
    assert "extrapolates: generation on gh200, measured on a100-80gb" in out
    assert "at 1,536 tokens per sequence, measured 2,048 to 65,536" in out


def test_terms_that_declare_no_error_leave_no_interval(rpeg, experiment) -> None:
    made = rpeg("plan", experiment(costs=["paper"]), "--evaluations", 200, "--json")
    intervals = json.loads(made.out)["plan"]["intervals"]
    assert intervals["step_s"] is None
    assert set(intervals["operator_s"].values()) == {None}
    assert "paper.gemm" in intervals["never_validated"]["actor_training"]
    said = [line for line in rpeg("explain", "plan.json").out.splitlines() if line.startswith("no interval of ")]
    assert "the step" in said[0]
    assert "term paper.gemm" in said[0]
