from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpushare_lab.known_profiles import KnownProfile, enter_profiles

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.tokens import TOKEN, TokenFile, has_wrong_letter, new_token, token_path
from slurm_gpushare.store import Store


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}


def gpushare(home: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slurm_gpushare", *arguments]
    return subprocess.run(command, env=home, capture_output=True, text=True, check=False)


def test_a_workload_that_took_the_whole_card_in_advance_is_marked(home: dict[str, str], tmp_path: Path) -> None:
    token = gpushare(home, "token", "big net").stdout.strip()
    conf, url = tmp_path / "gpushare.conf", f"sqlite:///{tmp_path}/store.sqlite"
    conf.write_text(f"Partitions=gpu\nStoreUrl={url}\n")
    home = {**home, "GPUSHARE_CONF": str(conf)}
    features = {"mgmap": 97.0, "gpu_mem_pct_mean": 96.0}
    with Store.create(url) as store:
        enter_profiles(store, [KnownProfile(token, os.geteuid(), "V100", 15_900, 16_384, 1, 600.0, features)])
    said = gpushare(home, "token", "list").stdout
    assert "15.5G*" in said
    assert "constant and nearly the whole card" in said
    assert max(map(len, said.splitlines())) <= 80
    assert "15.5G|" in gpushare(home, "token", "list", "-nP").stdout
    (told,) = json.loads(gpushare(home, "token", "list", "--json").stdout)
    assert told["preallocated"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "shown"), [(600.0, "a-name-of-t"), (20 * 86_400.0, "a-name-o")])
def test_a_long_name_is_cut_to_what_80_columns_leave_and_scripts_get_it_whole(
    home: dict[str, str], tmp_path: Path, seconds: float, shown: str
) -> None:
    name = "a-name-of-twenty-three-"
    token, _ = gpushare(home, "token", name).stdout.strip(), gpushare(home, "token", "short")
    conf, url = tmp_path / "gpushare.conf", f"sqlite:///{tmp_path}/store.sqlite"
    conf.write_text(f"Partitions=gpu\nStoreUrl={url}\n")
    home = {**home, "GPUSHARE_CONF": str(conf)}
    with Store.create(url) as store:
        enter_profiles(store, [KnownProfile(token, os.geteuid(), "V100", 15_900, 16_384, 1, seconds, {"mgmap": 9.0})])
    lines = gpushare(home, "token", "list").stdout.splitlines()
    assert max(map(len, lines)) == 80
    assert f"  {shown}  " in lines[1] + lines[2]
    assert f"|{name}|" in gpushare(home, "token", "list", "-nP").stdout
    assert name in {item["name"] for item in json.loads(gpushare(home, "token", "list", "--json").stdout)}


def test_tokens_are_random_and_of_the_one_form() -> None:
    made = {new_token() for _ in range(200)}
    assert len(made) == 200
    assert all(TOKEN.fullmatch(token) and len(token) == 23 for token in made)


def test_one_wrong_letter_or_two_that_changed_places_are_told() -> None:
    for token in {new_token() for _ in range(20)}:
        assert not has_wrong_letter(token)
        for place in range(4, len(token)):
            other = "a" if token[place] != "a" else "b"
            assert has_wrong_letter(token[:place] + other + token[place + 1 :])
        for place in range(4, len(token) - 3):
            swapped = token[:place] + token[place + 1] + token[place] + token[place + 2 :]
            assert has_wrong_letter(swapped) == (swapped != token)
    assert not has_wrong_letter("gs-" + "a" * 20), "tokens of earlier releases stay valid as they are"


def test_the_line_for_a_job_script_is_printed_as_it_is_put_there(home: dict[str, str]) -> None:
    token = gpushare(home, "token", "resnet").stdout
    assert gpushare(home, "token", "resnet", "--sbatch").stdout == f"#SBATCH --comment=gpushare:{token}"


def test_only_the_token_is_printed_and_it_stays_the_same(home: dict[str, str]) -> None:
    first, second = gpushare(home, "token", "res net"), gpushare(home, "token", "res net")
    assert TOKEN.fullmatch(first.stdout.rstrip("\n"))
    assert (first.stdout, first.stderr, first.returncode) == (second.stdout, "", 0)


def test_the_file_is_the_users_alone_even_under_a_lax_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = TokenFile(tmp_path / "new" / "tokens")
        token = file.get_or_make("a")
    finally:
        os.umask(before)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert file.path.read_text() == f"{token} a\n"


def test_the_name_is_the_rest_of_the_line(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    token = file.get_or_make("  größe 50 #2 ")
    assert [(item.token, item.name) for item in file.all()] == [(token, "größe 50 #2")]


def test_many_at_once_agree_and_lose_nothing(home: dict[str, str]) -> None:
    names = [f"n{i % 4}" for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(lambda name: gpushare(home, "token", name).stdout.strip(), names))
    kept = {item.name: item.token for item in TokenFile(token_path(home)).all()}
    assert tokens == [kept[name] for name in names]


def test_a_removed_name_gets_a_new_token(home: dict[str, str]) -> None:
    old = gpushare(home, "token", "a").stdout
    assert gpushare(home, "token", "rm", "a").returncode == 0
    assert gpushare(home, "token", "list", "-n").stdout == ""
    assert gpushare(home, "token", "a").stdout != old


@pytest.fixture
def site(home: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The helper publishes, and has met no job of this user's."""
    conf, public = tmp_path / "gpushare.conf", tmp_path / "public"
    (public / "owners").mkdir(parents=True)
    conf.write_text(f"Partitions=gpu\nPublicDir={public}\nStoreUrl=sqlite:///{tmp_path}/none\n")
    return {**home, "GPUSHARE_CONF": str(conf)}


def test_who_has_no_token_yet_is_told_in_one_line_how_to_get_one(site: dict[str, str]) -> None:
    said = gpushare(site, "token", "list")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == "No tokens yet. 'gpushare token NAME' makes one for the workload that you call NAME.\n"
    assert json.loads(gpushare(site, "token", "list", "--json").stdout) == []
    assert [gpushare(site, "token", "list", option).stdout.count("\n") for option in ("-nP", "-P")] == [0, 1]


def test_a_token_that_no_job_has_brought_is_not_known_yet_which_is_no_warning(site: dict[str, str]) -> None:
    token = gpushare(site, "token", "net").stdout.strip()
    said = gpushare(site, "token", "list", "-P")
    assert said.stdout.splitlines()[1] == f"{token}|net|no|---|0|---|---|---"
    assert said.stderr == ""


def test_list_shows_names_beside_tokens(home: dict[str, str], tmp_path: Path) -> None:
    conf = tmp_path / "gpushare.conf"
    conf.write_text(f"Partitions=gpu\nPublicDir={tmp_path}/nowhere\nStoreUrl=sqlite:///{tmp_path}/none\n")
    token = gpushare(home, "token", "my net").stdout.strip()
    said = gpushare(home | {"GPUSHARE_CONF": str(conf)}, "token", "list", "-nP").stdout
    assert said == f"{token}|my net|---|---|---|---|---|---\n"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a,b",
        "a\nb",
        "a\0b",
        "list",
        "rm",
        "gs-" + "a" * 20,
        "x" * 201,
        "net max=10",
        "a net Requeue:x",
        "a cpus",
    ],
)
def test_a_name_that_could_not_be_used_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput):
        TokenFile(tmp_path / "tokens").get_or_make(name)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("name", ["gs-bicycle", "gs-" + "a" * 33, "max", "max=5", "my maximal net", "cpus2 net"])
def test_a_name_that_a_comment_tells_from_tokens_and_options_is_taken(tmp_path: Path, name: str) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    assert tokens.get_or_make(name) == tokens.find(name)


def test_removing_what_is_not_there_says_so(home: dict[str, str]) -> None:
    result = gpushare(home, "token", "rm", "ghost")
    assert result.returncode == 2
    assert result.stderr == "gpushare: error: token: no token is called 'ghost'. See 'gpushare token list'.\n"


def test_a_broken_line_is_named_and_the_file_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{new_token()} fine\nnonsense here\n")
    with pytest.raises(GpushareError, match="tokens:2: not 'TOKEN NAME'"):
        TokenFile(path).get_or_make("another")
    assert path.read_text().endswith("nonsense here\n")


def test_a_home_that_cannot_be_written_is_one_line(home: dict[str, str]) -> None:
    (Path(home["HOME"]) / ".config").write_text("a file")
    result = gpushare(home, "token", "a")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("gpushare: error: ")
    assert result.stderr.count("\n") == 1


def test_place_follows_xdg() -> None:
    assert token_path({"HOME": "/h"}) == Path("/h/.config/gpushare/tokens")
    assert token_path({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/gpushare/tokens")
    assert token_path({"HOME": "/h", "XDG_CONFIG_HOME": "rel"}) == Path("/h/.config/gpushare/tokens")
