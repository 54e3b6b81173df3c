"""Noise and sampled lengths: means, spread, independence of the order of execution, and what stays as predicted."""

import numpy as np
import pytest
from rpeg_plugin_simulator import Durations

from rpeg_core.passes.lower import NodeKind
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import SKEWED, on, toy_plan, toy_ppo, toy_workload

WORKLOAD = toy_workload(prompts=8, response_lengths=SKEWED)
SPLIT = toy_plan(
    actor_generation=on(0, 2),
    reference_inference=on(2),
    reward_inference=on(2),
    critic_inference=on(0, 2),
    actor_training=on(0, 2),
    critic_training=on(2, 4),
)
TOGETHER = toy_plan(**dict.fromkeys(SPLIT, on(0, 2)))
STEPS = 3000


def window(plan=SPLIT) -> Window:
    return Window(toy_ppo(tau=1), plan, WORKLOAD)


def sampled(window: Window, **kwargs: object) -> dict[str, np.ndarray]:
    """Seconds of the nodes of a steady step, by label without its step, over many steps; 1 s predicted each."""
    durations = Durations(window, WORKLOAD, lambda node: 1.0, **kwargs)
    shape = window.shape(window.steady_step)
    first = window.steady_step
    values = np.array([[durations.seconds(k, p) for p in range(len(shape.nodes))] for k in range(first, first + STEPS)])
    return {(node.kind, node.operator, node.phase, node.container): values[:, p] for p, node in enumerate(shape.nodes)}


def test_without_noise_durations_are_the_predicted_ones() -> None:
    assert all((values == 1.0).all() for values in sampled(window()).values())


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_noise_has_mean_one_and_the_standard_deviation_asked_for(noise: float) -> None:
    found = sampled(window(), noise=noise)
    values = np.concatenate(list(found.values()))
    assert values.mean() == pytest.approx(1.0, abs=4 * noise / np.sqrt(len(values)))
    assert values.std() == pytest.approx(noise, rel=0.05)
    assert (values > 0).all()
    matrix = np.corrcoef(np.array(list(found.values())))
    assert np.abs(matrix - np.eye(len(matrix))).max() < 0.1


def test_draws_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    one, two = (Durations(window(), WORKLOAD, lambda node: 1.0, noise=0.3, seed=7) for _ in range(2))
    asked = [(step, position) for step in range(30) for position in range(5)]
    forward = {at: one.seconds(*at) for at in asked}
    backward = {at: two.seconds(*at) for at in reversed(asked)}
    assert forward == backward
    assert Durations(window(), WORKLOAD, lambda node: 1.0, noise=0.3, seed=8).seconds(0, 0) != forward[0, 0]


def test_lengths_scale_phases_by_the_share_alive_and_finishing() -> None:
    """Half of the responses finish in phase 0, a quarter in each of the others."""
    found = sampled(window(), sample_lengths=True)
    generation = [found[NodeKind.OP, "actor_generation", q, None] for q in range(3)]
    scoring = [found[NodeKind.OP, "reward_inference", q, None] for q in range(3)]
    assert (generation[0] == 1.0).all()  # everything is alive at first
    # The share alive in phase 1 is what did not finish in phase 0: 8 responses of which half are expected to.
    assert generation[1] * 0.5 == pytest.approx(1.0 - scoring[0] * 0.5)
    assert generation[2] * 0.25 == pytest.approx(1.0 - scoring[0] * 0.5 - scoring[1] * 0.25)
    assert scoring[2] == pytest.approx(generation[2])
    for values in (*generation, *scoring):
        assert values.mean() == pytest.approx(1.0, abs=0.06)
    assert scoring[0].std() * 0.5 * 8 == pytest.approx(np.sqrt(8 * 0.5 * 0.5), rel=0.05)  # binomial


def test_everything_else_keeps_its_predicted_time() -> None:
    found = sampled(window(), sample_lengths=True)
    scaled = {"actor_generation", "reference_inference", "reward_inference"}
    rest = [v for (kind, op, phase, _), v in found.items() if kind is not NodeKind.OP or op not in scaled]
    assert len(rest) > 5
    assert all((values == 1.0).all() for values in rest)


def test_an_unsplit_generation_scales_with_its_decode_steps() -> None:
    """Expected: 100 % for 25 steps, 50 % for 25, 25 % for 50: 50 sequence-steps for each response."""
    values = sampled(window(TOGETHER), sample_lengths=True)[NodeKind.OP, "actor_generation", None, None]
    steps = 8 * 50 * values
    assert np.allclose(steps, np.round(steps))
    assert set(np.round(steps) % 25) == {0.0}  # n responses in phase 0, 1, 2 decode 25, 50, 100 steps
    assert steps.min() >= 8 * 25
    assert steps.max() <= 8 * 100
    assert values.mean() == pytest.approx(1.0, abs=0.02)
