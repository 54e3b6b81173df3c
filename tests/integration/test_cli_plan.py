"""``rpeg plan``: the plan file, the report, the comparison, Ctrl-C, and what happens when nothing fits."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rpeg_core.planning.plan import load_plan

PATIENT = """
import time

import attrs
from rpeg_core import SearchStrategy, hookimpl, setting
from rpeg_core.planning.search import Incumbent, Solution
from rpeg_core.planning.starts import concurrent

@attrs.frozen(kw_only=True)
class Settings:
    seed: int = setting(0, help="Unused.", minimum=0)

def run(problem, budget, settings, progress):
    incumbent = Incumbent(problem.objective)
    structure = problem.structures[0]
    choice = concurrent(structure)
    incumbent.offer(Solution(0, choice), structure.evaluator.evaluate(choice), 1)
    while not progress.cancelled:
        progress.update(0.5, 1, incumbent)
        time.sleep(0.01)
    return incumbent.result(1, "cancelled")

@hookimpl
def rpeg_search_strategies():
    yield SearchStrategy(
        name="patient", summary="Waits for Ctrl-C.", guarantee="heuristic", run=run, settings=Settings
    )
"""

LIAR = """
import attrs
from rpeg_core import SearchStrategy, hookimpl, NoSettings
from rpeg_core.planning.search import Incumbent, Solution
from rpeg_core.planning.starts import colocated

def run(problem, budget, settings, progress):
    {body}

@hookimpl
def rpeg_search_strategies():
    yield SearchStrategy(name="liar", summary="Lies.", guarantee="heuristic", run=run)
"""

OPTIMIST = """
incumbent = Incumbent(problem.objective)
structure = problem.structures[0]
choice = colocated(structure)
evaluation = structure.evaluator.evaluate(choice)
incumbent.offer(Solution(0, choice), attrs.evolve(evaluation, tokens_per_s=2 * evaluation.tokens_per_s), 1)
return incumbent.result(1, "finished")
"""

REMARKS = """
from rpeg_core import Diagnostic, Severity, hookimpl

@hookimpl
def rpeg_search_strategies():
    return []

@hookimpl
def rpeg_plan_ready(plan):
    open("ready.txt", "a").write(plan.digest)

@hookimpl
def rpeg_check_plan(plan):
    yield Diagnostic(severity=Severity.WARNING, message="too [bold]", hint="be careful")
"""

TINY = {"racks": 1, "nodes_per_rack": 1, "memory_gb": 40}


def liar(installed, body: str) -> None:
    source = LIAR.format(body=textwrap.indent(textwrap.dedent(body).strip(), "    ").strip())
    installed.add("rpeg-plugin-liar", "rpeg.search", "liar", source)


def test_the_report_in_a_pipe_is_complete(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment())
    assert (ran.code, ran.err) == (0, "")
    plan = load_plan("plan.json")
    table = ran.table("plan")
    assert table[0] == ["operator", "GPUs", "dp", "pp", "tp", "microbatches", "time"]
    assert [row[0] for row in table[1:]] == list(plan.assignments)
    for row in table[1:]:
        assignment = plan.assignments[row[0]]
        degrees = (assignment.layout.data, assignment.layout.pipeline, assignment.layout.tensor)
        assert row[1] == str(assignment.allocation)
        assert tuple(map(int, row[2:6])) == (*degrees, assignment.microbatches)
    assert [row[0] for row in ran.table("comparison")] == ["plan", "this plan (concurrent)", "greedy"]
    assert ran.table("peak memory per GPU")[0] == ["GPUs", "peak", "usable", "share", "while"]
    assert re.search(r"^(at most [\d.]+% below )?the best possible plan under this model", ran.out, re.MULTILINE)
    assert "schedule of the first 3 steps of 8" in ran.out
    assert ran.out.endswith("plan written to plan.json\nnext: rpeg explain plan.json\n")
    assert "\x1b" not in ran.out


def test_the_plan_is_at_least_as_good_as_every_baseline(rpeg, experiment) -> None:
    speeds = {}
    for strategy in ("greedy", "concurrent"):
        assert rpeg("plan", experiment(), "--strategy", strategy, "-o", f"{strategy}.json").code == 0
        plan = load_plan(f"{strategy}.json")
        speeds[strategy] = plan.prediction.tokens_per_s
        baselines = {entry["name"]: entry["tokens_per_s"] for entry in plan.search["baselines"]}
        assert max(baselines.values()) <= plan.prediction.tokens_per_s
        assert plan.search["found_by"] in ("greedy", "concurrent")
        assert plan.search["strategy"] == strategy
    assert speeds["greedy"] == speeds["concurrent"]


def test_the_plan_file_survives_a_round_trip(rpeg, experiment, tmp_path) -> None:
    rpeg("plan", experiment())
    before = Path("plan.json").read_text()
    load_plan("plan.json").save("again.json")
    assert Path("again.json").read_text() == before


def test_two_runs_find_the_same_digest(rpeg, experiment) -> None:
    for name in ("a.json", "b.json"):
        rpeg("plan", experiment(), "-o", name)
    assert load_plan("a.json").digest == load_plan("b.json").digest


def test_a_setting_of_the_command_line_is_part_of_the_plan(rpeg, experiment) -> None:
    rpeg("plan", experiment(), "--set", "ppo.explicit_rollout_edges=true", "-o", "a.json")
    rpeg("plan", experiment(settings={"ppo": {"explicit_rollout_edges": True}}), "-o", "b.json")
    a, b = load_plan("a.json"), load_plan("b.json")
    assert a.prediction == b.prediction
    assert a.experiment.settings == {"ppo": {"explicit_rollout_edges": "true"}}
    assert rpeg("predict", "a.json").err == ""


def test_the_json_document(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(), "--json")
    document = json.loads(ran.out)
    assert list(document)[:3] == ["schema", "feasible", "interrupted"]
    assert (document["schema"], document["feasible"], document["plan_file"]) == (1, True, "plan.json")
    assert document["plan"] == json.loads(Path("plan.json").read_text())
    peaks = [segment["peak_bytes"] for segment in document["memory"]]
    assert peaks == [peak for _, peak, _ in document["plan"]["prediction"]["memory"]]


def test_without_baselines_one_line_says_so(rpeg, experiment, monkeypatch, installed) -> None:
    liar(installed, OPTIMIST.replace("2 *", "1 *"))
    monkeypatch.setenv("RPEG_DISABLE_PLUGINS", "heuristics")
    ran = rpeg("plan", experiment(search={"strategy": "liar"}))
    assert (ran.code, ran.err) == (
        0,
        "no baselines to compare with; `pip install rpeg-plugin-heuristics` adds greedy and concurrent\n",
    )


@pytest.mark.parametrize(
    ("body", "first", "fact"),
    [
        (
            OPTIMIST,
            "error[plugin]: search strategy 'liar' returned a plan that the readable evaluator does not confirm",
            r"  claimed: Evaluation\(.*",
        ),
        (
            "raise ValueError('no [luck]')",
            "error[plugin]: search strategy 'liar' failed",
            r"  ValueError: no \[luck\]",
        ),
        ("return 3", "error[plugin]: search strategy 'liar' failed", "  it returned int, not SearchResult"),
        (
            OPTIMIST.replace("incumbent.offer(Solution(0, choice)", "incumbent.offer(Solution(99, choice)"),
            "error[plugin]: search strategy 'liar' failed",
            r"  Solution\(structure=99, .* is not in the search space",
        ),
    ],
)
def test_a_strategy_that_misbehaves_is_found_out(rpeg, experiment, installed, body, first, fact) -> None:
    liar(installed, body)
    ran = rpeg("plan", experiment(search={"strategy": "liar"}))
    lines = ran.err.splitlines()
    assert (ran.code, ran.out, lines[0]) == (3, "", first)
    assert re.fullmatch(fact, lines[1])
    assert not Path("plan.json").exists()


def test_plugins_see_the_plan_and_remark_on_it(rpeg, experiment, installed) -> None:
    installed.add("rpeg-plugin-remarks", "rpeg.search", "remarks", REMARKS)
    ran = rpeg("plan", experiment())
    assert Path("ready.txt").read_text() == load_plan("plan.json").digest
    assert ran.err == "warning: too [bold]  [search:remarks]\nhint: be careful\n"


def test_when_no_operator_fits_the_error_names_it_and_the_smallest_change(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(cluster=TINY))
    lines = ran.err.splitlines()
    assert (ran.code, ran.out) == (1, "")
    assert lines[0] == "error[no-feasible-plan]: no plan fits 4 GPUs of gh200 with 40.0 GB each (36.0 GB usable)"
    assert re.fullmatch(
        r"  operator actor_training fits no GPU even alone: its smallest layout dp1 pp2 tp2 needs [\d.]+ GB of "
        r"36.0 GB: optimizer state [\d.]+ GB, .*",
        lines[1],
    )
    assert re.fullmatch(r"  cheapest changes, against [\d,]+ tok/s if memory were no limit:", lines[2])
    nodes, memory, vain = lines[3:6]
    cost = r"step [\d.]+ s -> [\d.]+ s \([+-]\d+% time\)"
    assert re.fullmatch(rf"  cluster.nodes_per_rack 1 -> 4 \(×4 GPUs\): fits \(3[\d.]+ of 36.0 GB\), {cost}", nodes)
    assert re.fullmatch(
        r"  GPUs with 85.9 GB instead of 40 \(cluster.memory_gb; a100-80gb has as much\): "
        rf"fits \(7[\d.]+ of 77.3 GB\), {cost}",
        memory,
    )
    assert vain.startswith("  found nothing that fits by changing structure.actor_critic_sharing, ")
    assert lines[-1] == "hint: set cluster.nodes_per_rack: 4"
    assert not Path("plan.json").exists()


def test_the_proposed_change_makes_it_fit(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(cluster=TINY))
    memory_gb = float(re.search(r"GPUs with ([\d.]+) GB instead", ran.err)[1])
    assert rpeg("plan", experiment(cluster={**TINY, "memory_gb": memory_gb})).code == 0
    smaller = 40 * 2**30 / 1e9  # the next smaller GPU among the installed profiles, a100-40gb
    assert rpeg("plan", experiment(cluster={**TINY, "memory_gb": smaller})).code == 1


def test_when_operators_do_not_fit_together_the_error_names_the_gpus(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(cluster={**TINY, "memory_gb": 45}))
    assert ran.code == 1
    assert re.fullmatch(
        r"  closest plan found \(staleness 0\): GPUs? [\d-]+ needs? [\d.]+ GB of 40.5 GB while \w+ runs: .* GB",
        ran.err.splitlines()[1],
    )
    assert ran.err.splitlines()[2] == (
        "  tried: 1 evaluation by greedy, concurrent and the descent to the least memory"
    )


def test_the_change_that_costs_least_time_comes_first_and_gpus_last(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(cluster={**TINY, "memory_gb": 80}))
    changes = re.findall(r"  (\S+) .* \(([+-]\d+)% time\)", ran.err)
    kinds = [key for key, _ in changes]
    assert kinds[-2:] == ["cluster.nodes_per_rack", "GPUs"]
    changed = {"cache_bytes_per_element", "prompts", "response_tokens"}
    assert set(kinds[:-2]) == {"structure.actor_critic_sharing", *(f"workload.{key}" for key in changed)}
    assert kinds[0] == "structure.actor_critic_sharing"
    slower = [int(percent) for _, percent in changes[:-2]]
    assert slower == sorted(slower)
    assert ran.err.splitlines()[-1] == "hint: set structure.actor_critic_sharing: [true]"


def test_no_plan_as_json(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(cluster=TINY), "--json")
    document = json.loads(ran.out)
    assert (ran.code, document["feasible"]) == (1, False)
    assert [remedy["key"] for remedy in document["remedies"]] == ["cluster.nodes_per_rack", "cluster.memory_gb"]
    assert document["compared_with"]["is"] == "a plan without limit of memory"
    for remedy in document["remedies"]:
        assert remedy["slowdown"] == pytest.approx(
            document["compared_with"]["tokens_per_s"] / remedy["tokens_per_s"] - 1
        )
    assert document["tried_in_vain"] == [
        "structure.actor_critic_sharing",
        "workload.cache_bytes_per_element",
        "workload.prompts",
        "workload.response_tokens",
        *(f"space.training.{axis}" for axis in ("recompute", "sequence_parallel", "cp")),
        *(f"space.inference.{axis}" for axis in ("sequence_parallel", "cp")),
    ]


def test_where_strategies_find_nothing_the_descent_may(rpeg) -> None:
    example = Path(__file__).parents[2] / "examples" / "dpo-llama-3.1-8b-8-a100.yaml"
    ran = rpeg("plan", example, "--strategy", "greedy")
    assert ran.code == 0
    rows = {row[0]: row[1] for row in ran.table("comparison")}
    assert rows["greedy"] == rows["concurrent"] == "out of memory"
    assert "this plan (least-memory)" in rows
    plan = load_plan("plan.json")
    assert plan.prediction.feasible
    assert [use.kind for use in plan.plugins].count("search") == 0


def run_until_searching(installed, arguments: list[str], interrupts: int) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(installed.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "rpeg_core", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = process.stderr.readline()
    for _ in range(interrupts):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, first + err


def test_ctrl_c_writes_the_best_plan_so_far(rpeg, experiment, installed) -> None:
    installed.add("rpeg-plugin-patient", "rpeg.search", "patient", PATIENT)
    path = experiment(search={"strategy": "patient"})
    code, out, err = run_until_searching(installed, ["plan", str(path), "-v"], 1)
    assert code == 130
    assert "stopping; Ctrl-C again gives up without a plan\n" in err
    assert err.endswith("interrupted: plan.json is the best plan so far\n")
    assert load_plan("plan.json").prediction.feasible
    assert "plan written to plan.json" in out
    improvement = r"best [\d,]+ tok/s · [\d,]+ evaluations/s · \d+ s left"
    assert re.fullmatch(improvement, err.splitlines()[0])


def test_a_second_ctrl_c_gives_up(rpeg, experiment, installed) -> None:
    stubborn = PATIENT.replace("while not progress.cancelled:", "while True:")
    installed.add("rpeg-plugin-patient", "rpeg.search", "patient", stubborn)
    path = experiment(search={"strategy": "patient"})
    code, out, err = run_until_searching(installed, ["plan", str(path), "-v"], 2)
    assert (code, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert not Path("plan.json").exists()


@pytest.mark.parametrize("arguments", [[], ["-o", "mine.json"]])
def test_ctrl_c_in_predict_shows_the_best_so_far(rpeg, experiment, installed, arguments) -> None:
    installed.add(
        "rpeg-plugin-patient",
        "rpeg.search",
        "patient",
        "import sys\n"
        + PATIENT.replace("    while not", "    print('searching', file=sys.stderr, flush=True)\n    while not"),
    )
    path = experiment(search={"strategy": "patient"})
    code, out, err = run_until_searching(installed, ["predict", str(path), *arguments], 1)
    assert (code, out.splitlines()[1][:6]) == (130, "fits: ")
    assert err.endswith("interrupted: this is the best plan so far\n")
    assert Path("mine.json").exists() == bool(arguments)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_on_a_terminal_progress_then_drawn_tables(rpeg, experiment, installed) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rpeg_core", "plan", str(experiment())],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(slave)
    data = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode()).replace("\r\n", "\n")
    assert process.wait(timeout=300) == 0
    assert "searching" in text
    lines = text.splitlines()
    assert any(re.fullmatch(r"operator +GPUs +dp +pp +tp +microbatches +time", line) for line in lines)
    assert any("█" in line for line in lines)
    assert any(re.match(r"GPUs 16-23 A0 +", line) for line in lines)
    assert max(len(line) for line in lines if "searching" not in line) <= 100


def test_planning_imports_no_torch(experiment, tmp_path) -> None:
    code = (
        "import sys\nfrom rpeg_core.cli.main import main\n"
        f"code = main(['plan', {str(experiment())!r}, '-o', {str(tmp_path / 'p.json')!r}])\n"
        "print(code, 'numpy' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True False"


@pytest.mark.parametrize("command", ["init", "plan", "predict", "explain"])
def test_help_imports_no_numpy(command) -> None:
    code = (
        "import sys\nfrom rpeg_core.cli.main import main\n"
        f"main([{command!r}, '--help'])\n"
        "print(sorted({'numpy', 'numba', 'networkx', 'yaml', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_experiment_is_never_overwritten(rpeg, experiment) -> None:
    path = experiment()
    before = path.read_text()
    ran = rpeg("plan", path, "-o", path)
    assert ran.code == 4
    assert "it is the input" in ran.err
    assert path.read_text() == before


def test_a_plan_that_cannot_be_written_is_shown(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(), "-o", "/dev/full")
    assert ran.code == 4
    assert "cannot write /dev/full" in ran.err
    assert ran.table("plan")[1][0] == "actor_generation"
    assert "plan written" not in ran.out
