"""What the terms say of their own errors: where they were measured, where they were not."""

from rpeg_plugin_analytical import rpeg_cost_terms
from rpeg_plugin_analytical.measured_errors import POPULATIONS, STEPS

from rpeg_core import Target

TERMS = {term.name: term for term in rpeg_cost_terms()}


def chosen(name, role, *, mixture=False, named=False, of_step=False):
    return next(
        (
            error
            for error in TERMS[name].errors
            if error.of_step is of_step and error.concerns(role, mixture=mixture, named_framework=named)
        ),
        None,
    )


def test_errors_are_those_of_the_population_with_its_ranges():
    error = chosen("analytical.gemm", "training")
    population = POPULATIONS["own training"]
    assert (error.log_bias, error.log_std, error.rows) == population["terms"]["gemm"]
    assert (dict(error.ranges), error.hardware) == (population["ranges"], population["hardware"])
    assert chosen("analytical.gemm", "inference") == error


def test_populations_are_kept_apart():
    errors = [
        chosen("analytical.gemm", role, mixture=mixture, named=named)
        for role, mixture, named in (
            ("training", False, False),
            ("training", True, False),
            ("generation", False, False),
            ("training", False, True),
            ("training", True, True),
            ("generation", False, True),
        )
    ]
    assert len(set(errors)) == 6


def test_what_no_run_tells_has_no_error():
    """No 16-bit generation of a mixture, and none with a pipeline, is among the runs; nor is any transfer."""
    assert chosen("analytical.gemm", "generation", mixture=True) is None
    assert chosen("analytical.pipeline_bubble", "generation") is None
    assert all(not term.errors for term in TERMS.values() if term.target is not Target.OPERATOR)


def test_the_paper_model_declares_nothing():
    assert all(not term.errors for name, term in TERMS.items() if name.startswith("paper."))


def test_whole_steps_have_an_error_beside_their_operators():
    step = chosen("analytical.loop_overhead", "generation", of_step=True)
    assert (step.log_bias, step.rows) == (STEPS["own steps"]["bias"], STEPS["own steps"]["rows"])
    assert chosen("analytical.loop_overhead", "generation", mixture=True, of_step=True) is None
    assert chosen("analytical.loop_overhead", "generation", mixture=True, named=True, of_step=True) is not None


def test_steps_that_generate_nothing_are_not_those_that_were_measured():
    assert chosen("analytical.loop_overhead", "training", of_step=True) is None
