"""``rpeg show``: records in full, with units, sources, settings and origins."""

from __future__ import annotations

import json

import pytest

from rpeg_core.cli.main import main


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


@pytest.mark.parametrize("kind", ["search", "searches"])
def test_a_kind_lists_its_records(installed, kind) -> None:
    installed.search("rpeg-plugin-hop", "hop")
    done = installed.rpeg("show", kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done.stdout) == [
        ["name", "summary", "distribution", "version"],
        ["hop", "A toy search.", "rpeg-plugin-hop", "0.1.0"],
    ]


def test_a_search_strategy_shows_its_settings(installed) -> None:
    installed.search("rpeg-plugin-hop", "hop")
    done = installed.rpeg("show", "search", "hop")
    assert rows(done.stdout) == [
        ["name", "hop"],
        ["summary", "A toy search."],
        ["distribution", "rpeg-plugin-hop"],
        ["version", "0.1.0"],
        ["guarantee", "baseline"],
        [""],
        ["name", "type", "value", "unit", "origin", "help"],
        ["seed", "int", "0", "", "default", "Seed of the [random] choices."],
        ["seconds", "float", "10", "s", "default", "Wall-clock budget."],
    ]


def test_hardware_shows_every_number_with_unit_and_source(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    done = installed.rpeg("show", "hardware", "x1", "--json")
    document = json.loads(done.stdout)
    values = {row["name"]: row for row in document.pop("values")}
    assert document == {
        "schema": 1,
        "name": "x1",
        "summary": "A toy GPU [of] x1.",
        "distribution": "rpeg-plugin-x1",
        "version": "0.1.0",
        "default_costs": ["analytical"],
    }
    assert values["device.memory_bytes"] == {
        "name": "device.memory_bytes",
        "value": 80_000,
        "unit": "B",
        "source": "a datasheet",
    }
    assert {name: row["unit"] for name, row in values.items()} == {
        "gpus_per_node": "GPUs",
        "device.memory_bytes": "B",
        "device.memory_bandwidth_bytes_per_s": "B/s",
        "device.peak_flops_per_s": "FLOP/s",
        **{
            f"tiers.{tier}.{traffic}.{number}": unit
            for tier in ("intra_node", "inter_node", "inter_rack")
            for traffic in ("collective", "p2p")
            for number, unit in (("latency_s", "s"), ("bandwidth_bytes_per_s", "B/s"))
        },
        "efficiency.gamma_m_rows": "rows",
        "efficiency.gamma_k_columns": "columns",
        "non_gemm_layer_s": "s",
        "non_gemm_reference_batch": "sequences",
    }


def test_a_cost_model_shows_its_terms_and_their_settings(installed) -> None:
    installed.costs("rpeg-plugin-toy", "toy", "toy.b", "toy.a")
    done = installed.rpeg("show", "cost", "toy")
    assert rows(done.stdout) == [
        ["name", "toy"],
        ["distribution", "rpeg-plugin-toy"],
        ["version", "0.1.0"],
        [""],
        ["name", "target", "quantity", "memory", "summary"],
        ["toy.a", "operator", "toy", "", "A toy term."],
        ["toy.b", "operator", "toy", "", "A toy term."],
        [""],
        ["term", "name", "type", "value", "unit", "origin", "help"],
        ["toy.a", "factor", "float", "1", "", "default", "Multiplies the time."],
        ["toy.b", "factor", "float", "1", "", "default", "Multiplies the time."],
    ]


def test_one_cost_term_shows_itself(installed) -> None:
    installed.costs("rpeg-plugin-toy", "toy", "toy.b", "toy.a")
    document = json.loads(installed.rpeg("show", "cost", "toy.a", "--json").stdout)
    assert (document["name"], document["target"], document["quantity"]) == ("toy.a", "operator", "toy")
    assert [row["name"] for row in document["settings"]] == ["factor"]


def test_an_algorithm_shows_its_roles(installed) -> None:
    source = """
    from rpeg_core import AlgorithmTemplate, ModelRole, hookimpl

    @hookimpl
    def rpeg_algorithms():
        roles = (
            ModelRole(name="actor", trainable=True, head="lm"),
            ModelRole(name="reward", trainable=False, head="scalar", optional=True),
        )
        return AlgorithmTemplate(name="toy", summary="Toy.", roles=roles, build=print, structures=("fusion",))
    """
    installed.add("rpeg-plugin-toy", "rpeg.algorithms", "toy", source)
    shown = rows(installed.rpeg("show", "algorithm", "toy").stdout)
    assert shown[4:6] == [["structures", "fusion"], ["semantics", ""]]
    assert shown[7:10] == [
        ["role", "trainable", "head", "optional"],
        ["actor", "true", "lm", "false"],
        ["reward", "false", "scalar", "true"],
    ]


def test_bundled_models_are_listed_with_their_counts(capsys) -> None:
    assert main(["show", "models"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown[0] == ["name", "family", "total_parameters", "layers", "hidden"]
    assert ["Qwen/Qwen3-8B", "qwen3", "8190735360", "36", "4096"] in shown


def test_a_model_shows_its_dimensions_and_counts(installed) -> None:
    document = json.loads(installed.rpeg("show", "model", "Qwen/Qwen3-8B", "--json").stdout)
    values = {row["name"]: row["value"] for row in document["values"]}
    assert (values["layers"], values["total_parameters"]) == (36, 8_190_735_360)


def test_an_unknown_model_is_an_error_of_the_model_table(installed) -> None:
    done = installed.rpeg("show", "model", "Qwen/Qwen3-9B")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error[unknown-model]: ")


def test_an_unknown_name_is_a_missing_plugin(installed) -> None:
    installed.search("rpeg-plugin-hop", "hop")
    done = installed.rpeg("show", "search", "hopp")
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "",
        "error[missing-plugin]: no installed plugin offers search 'hopp'\n"
        "  installed: hop\n"
        "hint: did you mean 'hop'?\n",
    )


def test_a_broken_plugin_beside_the_one_shown_is_one_warning(installed) -> None:
    installed.search("rpeg-plugin-hop", "hop")
    installed.add("rpeg-plugin-zap", "rpeg.search", "zap", "1/0\n")
    done = installed.rpeg("show", "search", "hop")
    assert (done.returncode, done.stderr) == (
        0,
        "warning: plugin search:zap (rpeg-plugin-zap 0.1.0) is not used: import-failed: "
        "ZeroDivisionError: division by zero\n",
    )


def test_an_unknown_kind_names_the_kinds(capsys) -> None:
    assert main(["show", "sarch"]) == 2
    assert capsys.readouterr().err == (
        "error[usage]: there is no kind 'sarch'\n"
        "  allowed: algorithm, hardware, cost, search, backend, model\n"
        "hint: did you mean 'search'?\n"
    )
