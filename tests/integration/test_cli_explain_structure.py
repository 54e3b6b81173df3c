"""``rpeg explain`` says why the structure: what a choice saves and adds, against the other ones in the same places."""

from __future__ import annotations

import json

import pytest

from rpeg_core.planning.plan import load_plan


def test_the_structure_is_explained_in_words_and_numbers(rpeg, experiment) -> None:
    assert rpeg("plan", experiment(structure={"staleness": [0, 1]}), "-o", "plan.json").code == 0
    text = rpeg("explain", "plan.json")
    document = json.loads(rpeg("explain", "plan.json", "--json").out)
    assert len(document["structure_choices"]) == 2  # one for each trained model
    for rival in document["structure_choices"]:
        assert f"- {rival['sentence']}" in " ".join(text.out.split())
        assert rival["step_s"] == pytest.approx(load_plan("plan.json").prediction.step_s)
    assert document["structure_choices"][0]["chosen"].endswith(" of actor")
