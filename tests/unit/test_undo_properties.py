"""Whatever we do to a pending job, in any order: `restore` gives the owner's own request back, from the tag alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from world import NEW, NOW, OLD, TOKEN_A, job

from slurm_gpushare.helper.changes import Change, place, restore, touched
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import parse_gres


def after(found: Job, change: Change | None) -> Job:
    """The job as Slurm has it after an update."""
    if change is None:
        return found
    fields = change.fields
    gres = fields.get("Gres")
    kept = [item for item in parse_gres(gres) if item.count] if gres is not None else None
    return replace(
        found,
        per_node=found.per_node if kept is None else ",".join(f"gres/{item}" for item in kept),
        wanted_nodes=fields.get("ReqNodeList", found.wanted_nodes),
        nice=int(fields.get("Nice", found.nice)),
        admin_comment=fields.get("AdminComment", found.admin_comment),
        tag=parse_tag(fields.get("AdminComment", found.admin_comment)),
        eligible_s=NOW if fields.get("StartTime") == "now" else found.eligible_s,
    )


STEPS = st.lists(
    st.tuples(st.sampled_from(["place", "guest", "successor", "restore"]), st.integers(0, 3), st.integers(0, 1)),
    max_size=8,
)


@given(
    STEPS,
    st.sampled_from([NEW, OLD]),
    st.sampled_from(["", "n2", "n[1-3]"]),
    st.integers(-100, 100),
    st.booleans(),
    st.sampled_from(["", "an administrator's note"]),
)
def test_any_sequence_of_our_changes_can_be_undone(
    steps: list[tuple[str, int, int]], release: Release, nodes: str, nice: int, lease: bool, note: str
) -> None:
    original = "gpu:1" if release is NEW else "shard:v100_0:2"
    tag = f"GS1:c=1;t={TOKEN_A};o={original}" + (f";w={nodes}" if nodes else "") + (";l=1" if lease else "")
    asked = job("7", per_node=f"gres/{original}", wanted_nodes=nodes, nice=nice, tag=f"{note} {tag}".strip(),
                eligible_s=NOW + 20 if lease else NOW - 5)  # fmt: skip
    now = asked
    for what, node, index in steps:
        if what == "restore":
            now = after(now, restore(now, release, NOW))
            continue
        card = GpuAddress(f"n{node}", index)
        now = after(now, place(now, card, f"v100_{index}", 1, release, NOW, what == "guest", what == "successor"))
    undone = after(now, restore(now, release, NOW))
    assert restore(undone, release, NOW) is None, "nothing of ours is left"
    assert not touched(undone)
    assert [str(item) for item in parse_gres(undone.per_node)] == [original]
    assert (undone.wanted_nodes, undone.nice) == (nodes, nice)
    assert undone.eligible_s is not None
    assert undone.eligible_s <= NOW, "no lease runs on"
    assert undone.admin_comment.startswith(note)
    assert undone.tag is not None
    assert (undone.tag.token, undone.tag.original) == (TOKEN_A, original)
