"""Shards that Slurm 22.05 lost are said once, and so is their return."""

from __future__ import annotations

import logging

import pytest
from world import node

from slurm_gpushare.helper.observe import LostShards
from slurm_gpushare.slurm.values import parse_gres


def test_lost_shards_are_said_once_and_so_is_their_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watch = LostShards()
    whole, lost = node(), node(gres=parse_gres("gpu:v100_0:1,gpu:v100_1:1,shard:v100_0:0,shard:v100_1:2"))
    for seen in (whole, lost, lost):
        watch.look([seen], 2)
    (warning,) = caplog.messages
    assert warning.startswith("event=lost-shards node=n0 gpus=0 ")
    watch.look([whole], 2)
    assert caplog.messages[-1] == "event=shards-back node=n0"
