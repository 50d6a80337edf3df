"""Who is on which GPU, on Slurm releases that say it in different ways."""

from __future__ import annotations

from world import NEW, OLD, TOKEN_A, job, node, running

from slurm_gpushare.helper.occupancy import CardUse, GpuAddress, occupancy, parse_card, placed_card

USED_OLD = "gpu:v100_0:0(IDX:N/A),gpu:v100_1:0(IDX:N/A),shard:v100_0:1(IDX:0),shard:v100_1:0(IDX:N/A)"


def test_two_sharers_are_seen_on_their_card_in_order_of_arrival() -> None:
    first = running("2", "n0", "gres:shard:v100_0:1", start_s=100)
    second = running("1", "n0", "gres:shard:v100_0:0,gres:shard:v100_0:1", start_s=200)
    for release in (OLD, NEW):
        used = USED_OLD if release is OLD else "gpu:v100_0:0(IDX:N/A),shard:v100_0:2(2/2,0/2)"
        use = occupancy([node(used=used, release=release)], [second, first])
        assert [share.job.key for share in use[GpuAddress("n0", 0)].occupants] == ["2", "1"]
        assert not use[GpuAddress("n0", 0)].stranger
        assert use[GpuAddress("n0", 1)] == CardUse(shards_total=2)


def test_all_shards_of_a_gpu_are_the_whole_card() -> None:
    use = occupancy([node(used=USED_OLD, release=OLD)], [running("1", "n0", "gres:shard:v100_0:2")])
    assert use[GpuAddress("n0", 0)].occupants[0].whole


def test_a_whole_gpu_without_type_is_found_on_the_node() -> None:
    used = "gpu:v100_0:0(IDX:N/A),gpu:v100_1:1(IDX:1),shard:v100_0:0(0/2,0/2),shard:v100_1:0(0/2,0/2)"
    use = occupancy([node(used=used)], [running("7", "n0", "gres/gpu:1")])
    share = use[GpuAddress("n0", 1)].occupants[0]
    assert (share.job.key, share.whole) == ("7", True)
    assert use[GpuAddress("n0", 0)] == CardUse(shards_total=2)


def test_two_untyped_jobs_of_a_node_have_a_card_each() -> None:
    used = "gpu:v100_0:1(IDX:0),gpu:v100_1:1(IDX:1)"
    use = occupancy([node(used=used)], [running("7", "n0", "gres/gpu:1"), running("8", "n0", "", per_job="gres/gpu:1")])
    shares = [share for index in (0, 1) for share in use[GpuAddress("n0", index)].occupants]
    assert sorted((share.job.key, share.whole) for share in shares) == [("7", True), ("8", True)]


def test_shards_asked_for_by_hand_block_the_cards_they_may_be_on() -> None:
    by_hand = running("7", "n0", "gres:shard:1")
    sharer = running("8", "n0", "gres:shard:v100_0:1")
    used = "shard:v100_0:1(IDX:0),shard:v100_1:1(IDX:1)"
    use = occupancy([node(used=used, release=OLD)], [by_hand, sharer])
    assert use[GpuAddress("n0", 0)].stranger, "22.05 does not say whether the job by hand is beside the sharer"
    assert use[GpuAddress("n0", 1)].stranger
    exact = occupancy([node(used="shard:v100_0:1(1/2,0/2),shard:v100_1:1(0/2,1/2)")], [by_hand, sharer])
    assert not exact[GpuAddress("n0", 0)].stranger
    assert exact[GpuAddress("n0", 1)].stranger


def test_all_shards_without_a_type_are_a_whole_card() -> None:
    used = "gpu:v100_0:0(IDX:N/A),shard:v100_0:0(IDX:N/A),shard:v100_1:1(IDX:1)"
    use = occupancy([node(used=used, release=OLD)], [running("7", "n0", "gres:shard:2")])
    assert [(share.job.key, share.whole) for share in use[GpuAddress("n0", 1)].occupants] == [("7", True)]
    assert not use[GpuAddress("n0", 1)].stranger
    assert use[GpuAddress("n0", 0)] == CardUse(shards_total=2)


def test_a_card_in_use_by_nobody_we_see_is_not_free() -> None:
    use = occupancy([node(used="gpu:v100_0:1(IDX:0)")], [])
    assert use[GpuAddress("n0", 0)].stranger


def test_a_placed_job_holds_its_place_until_it_starts() -> None:
    tag = f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n0:1"
    placed = job("5", per_node="gres/shard:v100_1:1", wanted_nodes="n0", tag=tag)
    use = occupancy([node()], [placed])
    assert [share.job.key for share in use[GpuAddress("n0", 1)].coming] == ["5"]


def test_a_tag_that_the_request_no_longer_bears_out_places_nobody() -> None:
    tag = f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n0:1"
    assert placed_card(job("5", per_node="gres/gpu:1", tag=tag)) is None
    assert placed_card(job("5", per_node="gres/shard:v100_0:1", wanted_nodes="n0", tag=tag)) is None


def test_an_address_reads_back() -> None:
    assert parse_card(str(GpuAddress("n-1.x", 3))) == GpuAddress("n-1.x", 3)
    assert parse_card("n0") is None
    assert parse_card(None) is None
