"""The structural space, listed by hand."""

from __future__ import annotations

from rpeg_core.planning.structures import Structure, StructureChoices, enumerate_structures


def test_by_default_there_is_one_synchronous_structure():
    found = enumerate_structures(StructureChoices(), ["actor"], None)
    assert found == (Structure(staleness=(("actor", 0),)),)


def test_staleness_varies_per_trainable_model_the_last_fastest():
    found = enumerate_structures(StructureChoices(staleness=(0, 1)), ["actor", "critic"], None)
    assert [dict(s.staleness) for s in found] == [
        {"actor": 0, "critic": 0},
        {"actor": 0, "critic": 1},
        {"actor": 1, "critic": 0},
        {"actor": 1, "critic": 1},
    ]


def test_the_order_of_the_choices_does_not_matter():
    forward = StructureChoices(staleness=(0, 1, 2), actor_critic_sharing=(False, True), fusion=(False, True))
    backward = StructureChoices(staleness=(2, 1, 0, 1), actor_critic_sharing=(True, False), fusion=(True, False))
    assert enumerate_structures(forward, ["a"], ["s"]) == enumerate_structures(backward, ["a"], ["s"])


def test_options_off_come_first_and_sharing_has_its_own_models():
    choices = StructureChoices(staleness=(0, 1), actor_critic_sharing=(False, True), fusion=(False, True))
    found = enumerate_structures(choices, ["actor", "critic"], ["shared"])
    options = [(s.actor_critic_sharing, s.fusion) for s in found]
    assert (
        options == [(False, False)] * 4 + [(False, True)] * 4 + [(True, False)] * 2
    )  # one training fuses with nothing
    assert [s.staleness for s in found[8:10]] == [(("shared", 0),), (("shared", 1),)]


def test_sharing_is_left_out_when_the_template_does_not_offer_it():
    choices = StructureChoices(actor_critic_sharing=(False, True))
    assert enumerate_structures(choices, ["actor"], None) == (Structure(staleness=(("actor", 0),)),)


def test_a_repeated_choice_gives_no_second_structure():
    choices = StructureChoices(staleness=(1, 1), actor_critic_sharing=(False, False), fusion=(True, True))
    assert enumerate_structures(choices, ["actor"], None) == (Structure(staleness=(("actor", 1),), fusion=True),)


def test_tau_of_a_model_that_is_not_named_is_zero():
    structure = Structure(staleness=(("actor", 2),))
    assert (structure.tau("actor"), structure.tau("reward")) == (2, 0)


def test_text_of_a_structure():
    assert str(Structure(staleness=(("actor", 1), ("critic", 1)))) == "staleness 1"
    assert str(Structure(staleness=(("actor", 1), ("critic", 0)))) == "staleness actor=1, critic=0"
    shared = Structure(staleness=(("actor", 0),), actor_critic_sharing=True, fusion=True)
    assert str(shared) == "staleness 0, actor critic sharing, fusion"
    assert str(Structure(staleness=())) == "nothing trained"
