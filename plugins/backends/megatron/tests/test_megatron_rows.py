"""Masks and positions of rows, on cases drawn by hand."""

from __future__ import annotations

import torch
from rpeg_plugin_megatron import rows

PAD, END = 0, 9


def test_a_prompt_counts_after_its_leading_pads_only() -> None:
    prompts = torch.tensor([[0, 0, 5, 0, 6], [1, 2, 3, 4, 5], [0, 0, 0, 0, 7]], dtype=torch.int32)
    expected = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert rows.prompt_mask(prompts, PAD).int().tolist() == expected


def test_a_response_counts_up_to_and_including_its_first_end() -> None:
    responses = torch.tensor([[5, 9, 0, 0], [5, 6, 7, 8], [9, 9, 5, 9], [0, 3, 9, 0]], dtype=torch.int32)
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert rows.response_mask(responses, [END]).int().tolist() == expected
    assert rows.last_response_index(responses, [END]).tolist() == [1, 3, 0, 2]


def test_any_of_several_tokens_ends_a_response_and_padding_may_be_one_of_them() -> None:
    responses = torch.tensor([[5, 8, 3, 9], [5, 9, 9, 9]])
    assert rows.response_mask(responses, [9, 8]).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert rows.clean_response(responses, PAD, [9, 8]).tolist() == [[5, 8, 0, 0], [5, 9, 0, 0]]


def test_positions_count_from_the_first_token() -> None:
    row = torch.tensor([[0, 0, 5, 6, 7, 9, 0], [4, 5, 6, 7, 8, 8, 8]])
    mask = rows.row_mask(row, 4, PAD, [END])
    assert mask.int().tolist() == [[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]
    assert rows.position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6]]


def test_a_query_sees_itself_and_the_counting_tokens_before_it() -> None:
    mask = torch.tensor([[False, True, True, False]])
    expected = [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 1],
    ]
    assert rows.attention_mask(mask).int().tolist() == [[expected]]


def test_padding_and_stripping_are_inverse() -> None:
    sequences = [[3, 4], [5, 0, 6, 7], [8]]
    left = rows.left_pad(sequences, 5, PAD)
    assert left.tolist() == [[0, 0, 0, 3, 4], [0, 5, 0, 6, 7], [0, 0, 0, 0, 8]]
    assert [rows.strip_prompt(prompt, PAD) for prompt in left] == sequences
    right = rows.right_pad([[*sequence, END] for sequence in sequences], 5, PAD)
    assert right.tolist() == [[3, 4, 9, 0, 0], [5, 0, 6, 7, 9], [8, 9, 0, 0, 0]]
    assert [rows.strip_response(response, [END]) for response in right] == sequences
    assert rows.join(left, right).shape == (3, 10)
    assert rows.join(left, right).dtype == torch.int32
