"""``rpeg sweep``: tables, files, documents, points that do not fit, prices, Ctrl-C, and what is refused."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import textwrap
from pathlib import Path

import pytest

from rpeg_core.cli import ui

STOPPED = """
import os, signal

from rpeg_core import SearchStrategy, hookimpl
from rpeg_core.planning.search import Incumbent, Solution
from rpeg_core.planning.starts import concurrent

def run(problem, budget, settings, progress):
    incumbent = Incumbent(problem.objective)
    structure = problem.structures[0]
    choice = concurrent(structure)
    incumbent.offer(Solution(0, choice), structure.evaluator.evaluate(choice), 1)
    if problem.machine.gpus == {gpus}:
        {action}
    return incumbent.result(1, "finished")

@hookimpl
def rpeg_search_strategies():
    yield SearchStrategy(name="stopped", summary="Stops.", guarantee="heuristic", run=run)
"""


def stopping(installed, gpus: int, action: str) -> None:
    source = textwrap.dedent(STOPPED).format(gpus=gpus, action=action)
    installed.add("rpeg-plugin-stopped", "rpeg.search", "stopped", source)


def sweep(rpeg, path, *options):
    ran = rpeg("sweep", path, "--json", *options)
    return ran, json.loads(ran.out)


def test_the_report_in_a_pipe_is_complete(rpeg, experiment) -> None:
    ran = rpeg("sweep", experiment(), "--gpus", "64,16,6,32", "--price", "2.5")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("ppo: gh200, 256 prompts, 1,000 response tokens\n")
    table = ran.table("sweep")
    assert table[0][:6] == ["GPUs", "tok/s", "per GPU", "step", "$/Mtok", "$/step"]
    assert [row[0] for row in table[1:]] == ["6", "16", "32", "64"]
    assert table[1][-1] == "skipped"
    assert "Pareto" in table[2][-1]
    assert ran.table("points without a plan")[1:] == [["6 GPUs", "skipped", "6 GPUs are not whole nodes of 4"]]
    assert "tok/s against GPUs\n" in ran.out
    assert "tok/s against $ per million tokens\n" in ran.out
    assert "\x1b" not in ran.out


def test_a_point_is_what_rpeg_plan_finds_there(rpeg, experiment) -> None:
    ran, document = sweep(rpeg, experiment(), "--gpus", "16,32", "--price", "gh200=3.6")
    assert (ran.code, document["feasible"], document["interrupted"]) == (0, True, False)
    for point in document["points"]:
        path = experiment(cluster={"racks": point["racks"], "nodes_per_rack": point["nodes_per_rack"]})
        plan = json.loads(rpeg("plan", path, "--json").out)["plan"]
        prediction = plan["prediction"]
        assert point["plan"] == plan["plan"]
        assert point["tokens_per_s"] == prediction["tokens_per_s"]
        assert point["tokens_per_s_per_gpu"] == prediction["tokens_per_s"] / point["gpus"]
        assert point["step_s"] == prediction["step_s"]
        assert point["gap"] == plan["search"]["gap"]
        assert point["peak_memory_bytes"] == max(peak for _, peak, _ in prediction["memory"])
        assert point["usd_per_step"] == pytest.approx(point["gpus"] * prediction["step_s"] / 1000)
        tokens = 256 * (512 + 1000)
        assert point["usd_per_million_tokens"] == pytest.approx(point["usd_per_step"] / tokens * 1e6)


def test_every_axis_is_swept(rpeg, experiment) -> None:
    path = experiment(workload={"response_tokens": 1024, "response_lengths": [[0.5, 256], [1.0, 1024]]})
    axes = ("--hardware", "gh200,h100", "--prompts", "128,256", "--response-tokens", "512,1024")
    _, document = sweep(rpeg, path, *axes)
    points = [(p["hardware"], p["prompts"], p["response_tokens"], p["gpus"]) for p in document["points"]]
    assert points == [(h, b, n, 32) for h in ("gh200", "h100") for b in (128, 256) for n in (512, 1024)]
    assert {p["gpus_per_node"] for p in document["points"] if p["hardware"] == "h100"} == {8}
    assert all(p["price_per_gpu_hour"] is None for p in document["points"])
    assert all(p["usd_per_step"] is None for p in document["points"])
    assert len({p["tokens_per_s"] for p in document["points"]}) == 8


def test_without_an_axis_the_neighbourhood_is_swept(rpeg, experiment) -> None:
    _, document = sweep(rpeg, experiment())
    assert [point["gpus"] for point in document["points"]] == [8, 16, 32, 64]


def test_without_a_price_there_are_no_costs_and_the_report_says_so(rpeg, experiment) -> None:
    ran = rpeg("sweep", experiment(), "--gpus", "16,32")
    assert "$" not in ran.out.replace("US dollars", "")
    assert "no costs: the price of gh200 is not known; --price gives it in US dollars per GPU and hour\n" in ran.out
    assert "$/step" in rpeg("sweep", experiment(cluster={"price_per_gpu_hour": 2}), "--gpus", "16,32").out


def test_a_terminal_shows_a_coloured_picture_that_fits(rpeg, experiment, monkeypatch) -> None:
    monkeypatch.setattr(ui, "is_terminal", lambda stream=None: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = rpeg("sweep", experiment(), "--gpus", "8,16,32,64", "--price", "2.5").out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert plain != out
    assert "●" in plain
    assert max(map(len, plain.splitlines())) <= 90


def test_files_are_written(rpeg, experiment) -> None:
    ran = rpeg("sweep", experiment(), "--gpus", "16,32", "--csv", "points.csv", "--svg", "points.svg")
    assert ran.code == 0
    with Path("points.csv").open(newline="") as file:
        assert [row["gpus"] for row in csv.DictReader(file)] == ["16", "32"]
    assert Path("points.svg").read_text().startswith("<?xml")


def test_where_the_search_finds_less_the_smaller_plan_is_taken_and_marked(
    rpeg, experiment, installed, monkeypatch
) -> None:
    monkeypatch.setenv("RPEG_DISABLE_PLUGINS", "search:heuristics")  # no baseline that saves the larger point
    stopping(installed, 32, "incumbent = Incumbent(problem.objective)")
    ran = rpeg("sweep", experiment(), "--gpus", "16,32", "--strategy", "stopped")
    small, large = ran.table("sweep")[1:]
    assert large[1] == small[1]
    assert large[-1] == "as 16 GPUs"


def test_what_does_not_fit_is_a_row_that_says_why(rpeg, experiment) -> None:
    path = experiment(cluster={"racks": 1, "memory_gb": 60})
    ran, document = sweep(rpeg, path, "--gpus", "4,32")
    assert (ran.code, document["feasible"]) == (0, True)
    small, large = document["points"]
    assert (small["state"], large["state"]) == ("does not fit", "fits")
    assert "GB of 54.0 GB" in small["why"]
    assert "tokens_per_s" not in small


def test_the_exit_code_is_1_when_nothing_fits_anywhere(rpeg, experiment) -> None:
    ran = rpeg("sweep", experiment(cluster={"racks": 1, "memory_gb": 20}), "--gpus", "4,8")
    assert ran.code == 1
    assert [row[-1] for row in ran.table("sweep")[1:]] == ["does not fit", "does not fit"]
    assert "tok/s against" not in ran.out


def test_a_pin_outside_a_cluster_skips_the_point(rpeg, experiment) -> None:
    path = experiment(pin={"actor_training": {"gpus": "16-31"}})
    ran, document = sweep(rpeg, path, "--gpus", "16,32")
    assert [point["state"] for point in document["points"]] == ["skipped", "fits"]
    assert "P7: GPUs 16-31 are outside the cluster's 0-15" in document["points"][0]["why"]
    assert ran.code == 0


def test_hardware_without_a_precision_is_skipped(rpeg, experiment) -> None:
    path = experiment(space={"generation": {"precision": ["fp8"]}}, cluster={"racks": 1})
    ran, document = sweep(rpeg, path, "--gpus", "16", "--hardware", "a100-80gb,h100")
    assert [point["state"] for point in document["points"]] == ["skipped", "fits"]
    assert document["points"][0]["why"] == (
        "space.generation.precision has no value that operator 'actor_generation' can have; "
        "precision: a100-80gb has no peak of fp8 matrix products"
    )
    assert ran.code == 0


def test_an_experiment_that_fits_no_point_is_an_error(rpeg, experiment) -> None:
    path = experiment(space={"generation": {"precision": ["fp8"]}}, cluster={"racks": 1})
    ran = rpeg("sweep", path, "--gpus", "8,16", "--hardware", "a100-80gb")
    assert (ran.code, ran.out) == (4, "")
    assert ran.err.startswith("error[experiment]: space.generation.precision has no value")


def test_ctrl_c_keeps_what_is_finished_and_the_best_of_the_current_search(rpeg, experiment, installed) -> None:
    stopping(installed, 32, "os.kill(os.getpid(), signal.SIGINT)")
    ran, document = sweep(rpeg, experiment(), "--gpus", "16,32,64", "--strategy", "stopped")
    assert (ran.code, document["interrupted"]) == (130, True)
    assert [point["gpus"] for point in document["points"]] == [16, 32]
    assert ran.err.endswith("interrupted: 2 of 3 points are finished\n")


def test_a_second_ctrl_c_keeps_what_is_finished(rpeg, experiment, installed) -> None:
    stopping(installed, 32, "[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]")
    ran = rpeg("sweep", experiment(), "--gpus", "16,32,64", "--strategy", "stopped", "--csv", "points.csv")
    assert ran.code == 130
    assert [row[0] for row in ran.table("sweep")[1:]] == ["16"]
    assert len(Path("points.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--price", "h100=2"),
            "error[usage]: --price h100=2: 'h100' is not swept\n  allowed: gh200\nhint: did you mean 'gh200'?",
        ),
        (
            ("--price", "cheap"),
            "error[usage]: --price cheap: 'cheap' is not a price\n"
            "  allowed: US dollars per GPU and hour, a number > 0, e.g. 2.5 or h100=2.5,h200=3.5",
        ),
        (("--csv", "no/x.csv"), "error[usage]: --csv: cannot write no/x.csv\n  there is no folder no"),
        (
            ("--gpus", "8,0"),
            "error[usage]: invalid value for '--gpus': '8,0' is not a list of whole numbers >= 1, e.g. 8,16,32\n"
            "hint: rpeg sweep --help",
        ),
    ],
)
def test_what_is_refused(rpeg, experiment, options, text) -> None:
    ran = rpeg("sweep", experiment(), *options)
    assert (ran.code, ran.out, ran.err) == (2, "", text + "\n")


def test_without_matplotlib_the_picture_is_refused_before_the_search(rpeg, experiment, monkeypatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    ran = rpeg("sweep", experiment(), "--svg", "x.svg")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error[usage]: --svg needs matplotlib, which is not installed\nhint: pip install 'rpeg-core[plot]'\n"
    )


def test_hardware_that_is_not_installed_is_an_error(rpeg, experiment) -> None:
    ran = rpeg("sweep", experiment(), "--hardware", "gh200,gh20")
    assert ran.code == 3
    assert ran.err.startswith("error[missing-plugin]: ")
