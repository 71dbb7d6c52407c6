"""The training loop resumes exactly, and never overwrites a checkpoint by accident."""

import pytest
import torch

from tests.training.tiny import check_resumes_exactly, tiny_model
from training import tiny_qwen3, tiny_qwen3_draft
from training.loop import IGNORE, Batch, LoopConfig, learning_rate, train
from training.scoring import Score, summary


def batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(50, (3, 12), generator=generator)
    labels = ids.clone()
    labels[:, :4] = IGNORE
    return [Batch(ids[:2], labels[:2]), Batch(ids[2:], labels[2:])]


def run(path, make_batches) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tiny_model()
    config = LoopConfig(run_dir=path, steps=6, warmup_steps=2, save_every=2)
    losses = train(model, make_batches, config, device=torch.device("cpu")).losses
    return losses, model.state_dict()


def test_a_run_that_was_killed_and_resumed_ends_exactly_where_an_uninterrupted_one_does(tmp_path):
    check_resumes_exactly(tmp_path, run, batches)


def test_a_finished_run_trains_no_further(tmp_path):
    losses, _ = run(tmp_path, batches)

    def none_left(step: int) -> list[Batch]:
        raise AssertionError(f"step {step} was trained again")

    assert run(tmp_path, none_left)[0] == losses


def test_a_run_may_end_before_its_plan_does(tmp_path):
    def losses(stop_at: float) -> list[float]:
        config = LoopConfig(run_dir=tmp_path / str(stop_at), steps=6, stop_at=stop_at)
        return train(tiny_model(), batches, config, device=torch.device("cpu")).losses

    assert losses(0.5) == losses(1.0)[:3]


def test_the_time_of_all_stretches_of_a_run_is_added_up(tmp_path):
    def stretch(steps: int) -> float:
        config = LoopConfig(run_dir=tmp_path, steps=steps)
        return train(tiny_model(), batches, config, device=torch.device("cpu")).seconds

    first = stretch(2)
    assert 0 < first < stretch(4) == stretch(4)


def test_the_learning_rate_warms_up_stays_and_decays(tmp_path):
    config = LoopConfig(run_dir=tmp_path, steps=1000, warmup_steps=100)
    rates = [learning_rate(config, step) for step in range(1000)]
    assert rates[0] == 0.01 and rates[99] == rates[299] == 1.0
    assert rates[-1] == pytest.approx(config.final_lr) and rates[300:] == sorted(rates[300:], reverse=True)


@pytest.mark.parametrize("recipe", [tiny_qwen3, tiny_qwen3_draft], ids=lambda recipe: recipe.__name__)
def test_training_refuses_to_overwrite_a_checkpoint(tmp_path, capsys, recipe):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    assert recipe.main(["--output", str(tmp_path), "--run-dir", str(tmp_path / "run")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious" and not (tmp_path / "run").exists()


def test_the_summary_adds_up_a_skill_over_its_sizes():
    scores = [Score("recall", "3", 4, 5), Score("recall", "9", 1, 5), Score("repeat", "3", 2, 2)]
    assert summary(scores) == [Score("recall", "all", 5, 10), Score("repeat", "all", 2, 2)]
    assert summary(scores)[0].share == 0.5
