"""``rpeg doctor``: loads everything, probes backends, says with its exit code whether a plugin failed."""

from __future__ import annotations

import json

import pytest

BACKEND = """
from rpeg_core import BackendSpec, hookimpl

def probe():
    {body}

@hookimpl
def rpeg_backends():
    return BackendSpec(
        name="toy", summary="Toy.", can=frozenset({{"export"}}), probe=probe, render=print
    )
"""


def doctor(installed, **options):
    done = installed.rpeg("doctor", "--json", **options)
    return done.returncode, json.loads(done.stdout)


def test_a_healthy_installation_is_described_and_ends_with_0(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", "x1-40gb", "x1-80gb")
    code, document = doctor(installed)
    assert (code, document["ok"], document["rpeg_core"]) == (0, True, "0.1.0")
    assert document["plugins"] == [
        {
            "kind": "hardware",
            "name": "x1",
            "distribution": "rpeg-plugin-x1",
            "version": "0.1.0",
            "status": "ok",
            "records": 2,
            "message": "",
        }
    ]
    assert document["cores"] >= 1
    assert document["memory_bytes"] > 2**28


def test_a_plugin_that_failed_ends_with_3_and_the_others_are_described_too(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    installed.add("rpeg-plugin-zap", "rpeg.search", "zap", "raise ImportError('libfoo.so')\n")
    code, document = doctor(installed)
    assert (code, document["ok"]) == (3, False)
    assert [(row["name"], row["status"], row["message"]) for row in document["plugins"]] == [
        ("x1", "ok", ""),
        ("zap", "import-failed", "ImportError: libfoo.so"),
    ]


def test_a_disabled_plugin_is_no_failure(installed) -> None:
    installed.add("rpeg-plugin-zap", "rpeg.search", "zap", "1/0\n")
    assert doctor(installed, env={"RPEG_DISABLE_PLUGINS": "zap"})[0] == 0


@pytest.mark.parametrize(
    ("body", "code", "usable", "reason"),
    [
        ("return None", 0, True, ""),
        ("return 'no GPU here'", 0, False, "no GPU here"),
        ("raise OSError('driver')", 3, False, "probe() raised OSError: driver"),
        ("return 3", 3, False, "probe() returned int; it must return text or None"),
    ],
)
def test_backends_are_probed(installed, body, code, usable, reason) -> None:
    installed.add("rpeg-plugin-toy", "rpeg.backends", "toy", BACKEND.format(body=body))
    found, document = doctor(installed)
    assert document["backends"] == [{"name": "toy", "can": ["export"], "usable": usable, "reason": reason}]
    assert found == code


def test_the_numba_cache_is_where_numba_is_told_and_checked_for_writing(installed, tmp_path) -> None:
    good, bad = tmp_path / "new" / "cache", tmp_path / "file"
    bad.write_text("")
    for path, writable in ((good, True), (bad, False)):
        document = doctor(installed, env={"NUMBA_CACHE_DIR": str(path)})[1]
        assert (document["numba_cache"], document["numba_cache_writable"]) == (str(path), writable)


def test_in_a_pipe_it_prints_fields_then_tables(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    lines = installed.rpeg("doctor").stdout.splitlines()
    assert lines[1] == "rpeg_core\t0.1.0"
    assert lines[-2:] == [
        "kind\tname\tdistribution\tversion\tstatus\trecords\tmessage",
        "hardware\tx1\trpeg-plugin-x1\t0.1.0\tok\t1\t",
    ]
