"""``gpushare off`` and ``on``: nodes and cards out of sharing, and back, without a drain; ``gpushare optout``: jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

import click

from slurm_gpushare.cli import console
from slurm_gpushare.protocol.errors import BadInput, Exit
from slurm_gpushare.protocol.text import moment
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.values import check_job_ids, expand

Address = tuple[str, int]


@click.command("off")
@click.argument("places", nargs=-1, metavar="[NODE[:CARD]]...")
@click.option("--why", default="", metavar="TEXT", help="What 'gpushare status' says of them.")
@console.DRY_RUN
@console.JSON
def off(places: Sequence[str], why: str, dry_run: bool, as_json: bool) -> None:
    """Take nodes or cards out of sharing at once, without a drain.

    From the helper's next look on nobody is put beside anybody on these cards; Slurm hands them out whole, as ever. Who
    shares one now goes on sharing it to the end. NODE is a name or gpu[0-3], CARD an index or several with commas;
    without any the command lists what is off. It holds until 'gpushare on', also when the helper or the controller
    starts anew.
    """
    from slurm_gpushare.store.store import OffCard

    config = console.settings()
    wanted = addresses(places, connect().nodes()) if places else []
    with console.open_store(config, read_only=dry_run or not places) as store:
        known = {(card.node, card.gpu): card for card in store.knowledge.off_cards()}
        now_s = int(time.time())
        known |= {(node, gpu): OffCard(node, gpu, why, now_s) for node, gpu in wanted}
        cards = sorted(known.values())
        if places and not dry_run:
            store.knowledge.keep_off(cards)
    if as_json:
        console.echo_json(
            [{"node": card.node, "gpu": card.gpu, "why": card.why, "since_s": card.since_s} for card in cards]
        )
    elif places:
        click.echo(f"{named(wanted)}: {'would be' if dry_run else 'is'} out of sharing, for whole GPUs alone")
    elif cards:
        rows = [(card.node, card.gpu, moment(card.since_s), card.why) for card in cards]
        click.echo(console.table(["NODE", "GPU>", "SINCE", "WHY"], rows))
    else:
        click.echo("no card is off")


@click.command("on")
@click.argument("places", nargs=-1, metavar="NODE[:CARD]...")
@click.option("-a", "--all", "everything", is_flag=True, help="All that is off.")
@console.DRY_RUN
def on(places: Sequence[str], everything: bool, dry_run: bool) -> None:
    """Let nodes or cards share again that were taken out."""
    if bool(places) == everything:
        raise BadInput("on: name what shall share again, or --all", "'gpushare off' lists what is off.")
    config = console.settings()
    with console.open_store(config, read_only=dry_run) as store:
        cards = store.knowledge.off_cards()
        known = [(card.node, card.gpu) for card in cards]
        wanted = known if everything else addresses(places, connect().nodes())
        back = [address for address in known if address in wanted]
        if back and not dry_run:
            store.knowledge.keep_off([card for card in cards if (card.node, card.gpu) not in back])
    if back:
        click.echo(f"{named(back)}: {'would share' if dry_run else 'shares'} again")
    else:
        click.echo("none of these is off")


def addresses(places: Iterable[str], nodes: Iterable[Node]) -> list[Address]:
    """The cards that ``NODE``, ``gpu[0-1]:2`` and their like name; BadInput for one that is not there."""
    known = {node.name: node for node in nodes}
    found: dict[Address, None] = {}
    for place in places:
        head, _, cards = place.rpartition(":") if ":" in place else (place, "", "")
        for name in expand(head):
            console.check_names("node", [name], known)
            indices = sorted(known[name].gpus)
            wanted = [int(word) if word.isdecimal() else -1 for word in cards.split(",")] if cards else indices
            if unknown := [index for index in wanted if index not in indices] or not indices:
                which = f"card {cards}" if unknown and indices else "card with an address of its own"
                raise BadInput(f"{place}: {name} has no {which}", f"It has: {', '.join(map(str, indices)) or 'none'}.")
            found |= dict.fromkeys((name, index) for index in wanted)
    return list(found)


def named(cards: Iterable[Address]) -> str:
    """``gpu0:0,1 gpu1:3``."""
    of_node: dict[str, list[str]] = {}
    for node, index in cards:
        of_node.setdefault(node, []).append(str(index))
    return " ".join(f"{node}:{','.join(indices)}" for node, indices in of_node.items())


@click.command("optout")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@console.DRY_RUN
def optout(jobs: tuple[str, ...], dry_run: bool) -> None:
    """Take pending jobs of yours out of sharing.

    An array's id stands for all of its tasks that wait.
    Our word is taken off the job's comment; the submit hook then gives the job the whole GPU that it asked for. It
    keeps its place in the queue. A job that runs already stays where it is. Before Slurm 23.11.5, on partitions with
    DefMemPerGPU and as a gang, a submitted job cannot be changed back: cancel it and submit it without the token.
    """
    from slurm_gpushare.helper.changes import Change, Outcome, apply
    from slurm_gpushare.protocol.tag import without_consent

    jobs = tuple(check_job_ids(jobs))
    slurm = connect(patient=True)
    pending = [job for job in slurm.jobs(jobs) if job.pending]
    found = {job.key: job for job in pending}
    known = {name for job in pending for name in (job.key, str(job.raw_id), str(job.array_id))}
    if missing := [key for key in jobs if key not in known]:
        raise BadInput(f"no pending job {missing[0]}", "A job that runs keeps its card; 'gpushare jobs' lists them.")
    failed, comments = False, slurm.comments(jobs)
    for key, job in found.items():
        comment = comments.get(key, "")
        kept = without_consent(comment)
        if kept == comment:
            click.echo(f"{key}: takes no part in sharing")
            continue
        fields = {"Comment": kept}
        if job.tag is not None and job.tag.placed and job.tag.nodes is None:
            fields["ReqNodeList"] = ""  # the helper's choice
        applied = apply(slurm, Change(key, fields), dry_run)
        failed |= applied.outcome not in (Outcome.DONE, Outcome.DRY)
        said = {Outcome.DONE: "out of sharing", Outcome.DRY: "would be taken out of sharing, for a whole GPU"}
        click.echo(f"{key}: {said.get(applied.outcome, str(applied.outcome))}")
        if applied.message:
            console.warn(applied.message)
    if failed:
        sys.exit(Exit.FAILURE)
