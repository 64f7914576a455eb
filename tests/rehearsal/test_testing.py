"""`accel_fsdp.testing`: functions of a test run on ranks that live as long as the session."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn

from accel_fsdp import testing


def held() -> tuple[int, int]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return sum(one.to_local().numel() for one in model.parameters()), os.getpid()


def trained(steps: int) -> list[float]:
    """Losses of one rank's rows, averaged over the ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.arange(16.0).reshape(4, 4) / 16
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(steps):
        loss = model(mine).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def alone(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows, losses = torch.arange(16.0).reshape(4, 4) / 16, []
    for _ in range(steps):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no such row")
    dist.barrier()


def waits() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_the_same_processes_serve_every_call(fsdp_ranks: testing.Ranks) -> None:
    first, second = fsdp_ranks(held), fsdp_ranks(held)
    assert [elements for elements, _ in first] == [63, 63]
    assert first == second
    assert len({process for _, process in first} | {os.getpid()}) == 3


@pytest.mark.parametrize("name", ["fsdp1_full_shard", "fsdp2", "fsdp2_no_reshard"])
def test_a_yaml_decides_what_accelerate_does(name: str, tmp_path: Path) -> None:
    text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        text.replace("mixed_precision: bf16", "mixed_precision: 'no'")
        .replace("num_processes: 8", "num_processes: 2")
        .replace("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    )
    ranks = testing.Ranks(config_file=config)
    try:
        ours = ranks(trained, 3)
    finally:
        ranks.close()
    assert ours[0] == ours[1] == pytest.approx(alone(3), rel=1e-5)


def test_a_failure_has_the_ranks_traceback_and_the_next_call_works(fsdp_ranks: testing.Ranks) -> None:
    with pytest.raises(testing.RankError, match=r"(?s)rank 1:.*in fails_on.*ValueError: no such row"):
        fsdp_ranks(fails_on, 1)
    assert [elements for elements, _ in fsdp_ranks(held)] == [63, 63]


def test_ranks_that_wait_are_ended() -> None:
    ranks = testing.Ranks(timeout_seconds=3)
    try:
        with pytest.raises(TimeoutError, match="no answer of rank 0 after 3 s"):
            ranks(waits)
        assert ranks._started == []
    finally:
        ranks.close()
