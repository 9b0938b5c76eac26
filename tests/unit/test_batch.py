"""The tensors that a model gets for the documents of a micro-batch."""

import datetime
from pathlib import Path

import pytest
import torch
from helpers.chats import chats
from helpers.data_run import write, write_dataset
from transformers import AutoModelForCausalLM

from shardtune.config import DataConfig, ModelConfig
from shardtune.data.batch import Batch, build_batch
from shardtune.data.dataset import TokenDataset, build_encoder, open_prepared, prepare_data
from shardtune.distributed.layout import Layout
from shardtune.model.loss import summed_loss


@pytest.fixture
def three(tmp_path: Path) -> TokenDataset:
    return write_dataset(
        tmp_path,
        [
            ([11, 12, 13], [False, True, True]),
            ([21, 22], [0.0, 0.5]),
            ([31, 32, 33, 34], [False, False, True, False]),
        ],
    )


def listed(batch: Batch) -> dict[str, object]:
    values = vars(batch).items()
    return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in values}


def test_a_flat_batch_is_one_row_whose_positions_restart(three):
    assert listed(build_batch(three, [2, 0, 1], is_flat=True)) == {
        "input_ids": [[31, 32, 33, 34, 11, 12, 13, 21, 22]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 0, 1]],
        "attention_mask": None,
        "predicting": [1, 4, 5, 7],
        "targets": [33, 12, 13, 22],
        "lengths": [4, 3, 2],
        "boundaries": [0, 4, 7, 9],
        "slices": None,
        "weights": [1.0, 1.0, 1.0, 0.5],
    }


def test_a_padded_batch_has_a_row_for_each_document(three):
    assert listed(build_batch(three, [2, 0, 1], is_flat=False)) == {
        "input_ids": [[31, 32, 33, 34], [11, 12, 13, 0], [21, 22, 0, 0]],
        "position_ids": None,
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
        "predicting": [1, 4, 5, 8],
        "targets": [33, 12, 13, 22],
        "lengths": [4, 3, 2],
        "boundaries": [0, 4, 7, 9],
        "slices": None,
        "weights": [1.0, 1.0, 1.0, 0.5],
    }


def test_each_rank_that_shares_a_row_has_a_slice_of_it(three):
    slices = [listed(build_batch(three, [2, 0, 1], True, (number, 4))) for number in range(4)]
    whole = {"attention_mask": None, "lengths": [4, 3, 2], "boundaries": [0, 4, 7, 9]}
    whole["slices"] = [Layout(4, context=4, max_length=9).tokens_per_rank, 2, 2, 2]
    own = [
        ([31, 32, 33], [0, 1, 2], [1], [33], [1.0]),
        ([34, 11], [3, 0], [1], [12], [1.0]),
        ([12, 13], [1, 2], [0], [13], [1.0]),
        ([21, 22], [0, 1], [0], [22], [0.5]),
    ]
    for batch, (ids, positions, predicting, targets, weights) in zip(slices, own, strict=True):
        assert batch == whole | {
            "input_ids": [ids],
            "position_ids": [positions],
            "predicting": predicting,
            "targets": targets,
            "weights": weights,
        }


def test_a_row_of_fewer_tokens_than_ranks_has_an_untrained_one_for_each(three):
    slices = [build_batch(three, [1], True, (number, 5)) for number in range(5)]
    assert [each.input_ids.tolist() for each in slices] == [[[21]], [[22]], [[21]], [[22]], [[21]]]
    assert [each.targets.tolist() for each in slices] == [[22], [], [], [], []]
    assert slices[0].lengths == [2, 3]


@pytest.mark.parametrize("is_flat", [True, False])
def test_the_batch_of_a_rank_without_rows_trains_nothing(is_flat, three):
    batch = build_batch(three, [], is_flat)
    assert batch.input_ids.tolist() == [[21, 22]]  # the shortest of the data
    assert batch.predicting.shape == batch.targets.shape == (0,)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm"])
def test_flat_and_padded_batches_have_the_same_loss_and_an_empty_one_none(family, models, tmp_path):
    train = write(tmp_path / "train.jsonl", chats(12))
    data = DataConfig(train=str(train), max_length=250)
    encoder = build_encoder(ModelConfig(path=str(models[family])), data, datetime.date(2025, 1, 1))
    dataset = open_prepared(prepare_data(data, encoder)).train
    model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    model.config.use_cache = False
    alone = sum(summed_loss(model, build_batch(dataset, [i], False)).item() for i in range(12))
    for is_flat in True, False:
        together = summed_loss(model, build_batch(dataset, list(range(12)), is_flat))
        assert together.item() == pytest.approx(alone, rel=1e-6)
        nothing = summed_loss(model, build_batch(dataset, [], is_flat))
        assert nothing.item() == 0
        nothing.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients and not any(gradient.any() for gradient in gradients)
        model.zero_grad()
