"""One grammar for the comment, read in two languages: hook, client filter and helper must understand the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lua_hook import INTERPRETERS, LuaHook, literal, make_hook

from slurm_gpushare.protocol.tag import Consent, UnclearConsent, parse_consent, without_consent
from slurm_gpushare.protocol.tokens import OPTION, check_characters

TOKEN = "gs-" + "k" * 20
CHECKED = "gs2-" + "k" * 17 + check_characters("k" * 17)
PLAIN = (TOKEN, None, False)
CAPPED = (TOKEN, 10, False)
AUTO = (TOKEN, None, True)
NOTHING = None
UNCLEAR = "unclear"

CASES = [
    (f"gpushare:{TOKEN}", PLAIN),
    (f"gpushare={TOKEN}", PLAIN),
    (f"gpushare:{CHECKED}", (CHECKED, None, False)),
    (f"gpushare:{CHECKED[:-1]}3", UNCLEAR),  # one letter is wrong
    (f"gpushare:{CHECKED[:6]}j{CHECKED[7:]}", UNCLEAR),
    (f"gpushare:{CHECKED[:-2]}", UNCLEAR),
    ("gpushare:$(gpushare", UNCLEAR),
    (f"GPUSHARE:{TOKEN}", PLAIN),
    (f"GpuShare={TOKEN}", PLAIN),
    (f"  gpushare:{TOKEN}  ", PLAIN),
    (f"grant 7 gpushare:{TOKEN} and more", PLAIN),
    (f"gpushare:{TOKEN},", PLAIN),
    (f"gpushare:{TOKEN},max=10", CAPPED),
    (f"gpushare:{TOKEN} max=10", CAPPED),
    (f"gpushare:{TOKEN}, max=10", CAPPED),
    (f"gpushare:{TOKEN} MAX=10", CAPPED),
    (f"gpushare:{TOKEN},Max=10%", CAPPED),
    (f"gpushare:{TOKEN}\tgrant max=10", CAPPED),
    (f"gpushare={TOKEN},max=0", (TOKEN, 0, False)),
    (f"gpushare={TOKEN},max=999", (TOKEN, 999, False)),
    (f"maximum effort gpushare:{TOKEN} maximal", PLAIN),
    (f"max=5 gpushare:{TOKEN}", PLAIN),  # before the token it is somebody else's word
    ("", NOTHING),
    ("max=10", NOTHING),
    ("nothing of ours", NOTHING),
    (f"xgpushare:{TOKEN}", NOTHING),
    (f"gpusharer:{TOKEN}", NOTHING),
    (TOKEN, NOTHING),
    ("gpushare", UNCLEAR),
    ("gpushare:", UNCLEAR),
    ("gpushare=bert", UNCLEAR),
    (f"gpushare : {TOKEN}", UNCLEAR),
    (f"gpushare: {TOKEN}", UNCLEAR),
    (f"gpushare:{TOKEN.upper()}", UNCLEAR),
    (f"gpushare:{TOKEN}x!", UNCLEAR),
    ("gpushare:gs-short", UNCLEAR),
    ("gpushare:gs-" + "a" * 33, UNCLEAR),
    (f"gpushare:{TOKEN} gpushare:{TOKEN}", UNCLEAR),
    (f"gpushare:{TOKEN},max=", UNCLEAR),
    (f"gpushare:{TOKEN},requeue=maybe", UNCLEAR),
    (f"gpushare:{TOKEN},requeue=yes,requeue=no", UNCLEAR),
    (f"gpushare:{TOKEN} requeue=yes,max=10", CAPPED),
    (f"gpushare:{TOKEN},cpus=auto", AUTO),
    (f"gpushare={TOKEN} grant CPUs=Auto", AUTO),
    (f"gpushare:{TOKEN},cpus=auto requeue=yes,max=10", (TOKEN, 10, True)),
    (f"cpus=4 gpushare:{TOKEN}", PLAIN),
    (f"gpushare:{TOKEN},cpus=4", UNCLEAR),
    (f"gpushare:{TOKEN} cpus", UNCLEAR),
    (f"gpushare:{TOKEN},cpus=auto,cpus=auto", UNCLEAR),
    (f"gpushare:{TOKEN},max=much", UNCLEAR),
    (f"gpushare:{TOKEN},max=1000", UNCLEAR),
    (f"gpushare:{TOKEN},max=-1", UNCLEAR),
    (f"gpushare:{TOKEN} max:10", UNCLEAR),
    (f"gpushare:{TOKEN} max 10", UNCLEAR),
    (f"gpushare:{TOKEN},max=5,max=6", UNCLEAR),
    (f"gpushare:{TOKEN},max=5 max=6", UNCLEAR),
    (f"gpushare:{TOKEN},share", UNCLEAR),
    (f"gpushare:{TOKEN} " + "x" * 1000, UNCLEAR),
    (f"gpushare:{TOKEN}' OR '1'='1", UNCLEAR),
    (f"gpushare:{TOKEN}\u00a0max=10", UNCLEAR),  # a blank that only Unicode knows
    (f"gpushare:{TOKEN} caf\u00e9", PLAIN),
]


def python_answer(comment: str) -> object:
    try:
        found = parse_consent(comment)
    except UnclearConsent:
        return UNCLEAR
    return None if found is None else (found.token, found.max_isd_pct, found.cpus_auto)


@pytest.mark.parametrize(("comment", "answer"), CASES)
def test_helper_understands(comment: str, answer: object) -> None:
    assert python_answer(comment) == answer


def said_by_hook(hook: LuaHook, comments: list[str]) -> list[object]:
    """The same from the hook: the token, the most slow-down, and whether CPUs are asked for by the curve."""
    written = ", ".join(literal(comment) for comment in comments)
    printed = hook.chunk(
        f"""for _, comment in ipairs({{ {written} }}) do
          local consent, unclear = run.load("gpushare_job").consent(comment)
          if unclear then print("unclear") elseif not consent then print("nothing")
          else print(string.format("%s %d %s", consent.token, consent.max or -1, tostring(consent.cpus_auto == true)))
          end
        end"""
    )
    answers: list[object] = []
    for line in printed.splitlines():
        if line in {"unclear", "nothing"}:
            answers.append(UNCLEAR if line == "unclear" else NOTHING)
        else:
            token, cap, auto = line.split()
            answers.append((token, None if cap == "-1" else int(cap), auto == "true"))
    return answers


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_hook_understands(interpreter: str, tmp_path: Path) -> None:
    answers = said_by_hook(make_hook(interpreter, tmp_path), [comment for comment, _ in CASES])
    assert list(zip(CASES, answers, strict=True)) == [(case, case[1]) for case in CASES]


def sent_by_client(hook: LuaHook, comments: list[str]) -> list[str]:
    """What the filter in the user's own sbatch makes of the comments."""
    written = ", ".join(literal(comment) for comment in comments)
    printed = hook.chunk(
        f"""for _, comment in ipairs({{ {written} }}) do
          local options = {{ type = "sbatch", comment = comment }}
          slurm_cli_pre_submit(options)
          print((options.comment:gsub(".", function(char) return string.format("%02x", char:byte()) end)))
        end"""
    )
    return [bytes.fromhex(line).decode() for line in printed.split("\n")[: len(comments)]]


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("name", ["resnet", "my net", "max", "gs-bicycle"])
def test_name_in_a_comment_is_understood_as_its_token_would_be(interpreter: str, name: str, tmp_path: Path) -> None:
    hook = make_hook(interpreter, tmp_path)
    tokens = tmp_path / ".config/gpushare/tokens"
    tokens.parent.mkdir(parents=True)
    tokens.write_text(f"{TOKEN} {name}\n")
    cases = [case for case in CASES if case[0].count(TOKEN) < 2]  # who says it twice is told so, with names or tokens
    sent = sent_by_client(hook, [comment.replace(TOKEN, name) for comment, _ in cases])
    # Where the client has said that no token is called so, the hook says nothing more.
    expected = [None if "gpushare:?" in comment else answer for comment, (_, answer) in zip(sent, cases, strict=True)]
    assert said_by_hook(hook, sent) == expected
    assert [python_answer(comment) for comment in sent] == [answer for _, answer in cases]


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_comment_with_a_token_leaves_the_client_as_it_was_written(interpreter: str, tmp_path: Path) -> None:
    comments = [comment for comment, answer in CASES if isinstance(answer, tuple)]
    assert sent_by_client(make_hook(interpreter, tmp_path), comments) == comments


WORDS_OF_A_COMMENT = ["max", "max=", "MAX:1", "max=10%", "requeue=yes", "Requeue", "cpus=auto", "cpus:", "maximal"]
WORDS_OF_A_COMMENT += ["max-1", "xmax=1", "max10", "cpu=1", "requeued=1", "gpushare:max=1", "max,5", "=max", "net", "2"]


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_the_same_words_are_options_in_both_languages(interpreter: str, tmp_path: Path) -> None:
    written = ", ".join(literal(word) for word in WORDS_OF_A_COMMENT)
    printed = make_hook(interpreter, tmp_path).chunk(
        f"""for _, word in ipairs({{ {written} }}) do print(run.load("gpushare_job").is_option(word)) end"""
    )
    assert printed.split() == [str(OPTION.fullmatch(word) is not None).lower() for word in WORDS_OF_A_COMMENT]


@pytest.mark.parametrize(
    ("comment", "kept"),
    [
        (f"gpushare:{TOKEN},max=10", ""),
        (f"grant 7 GPUSHARE={TOKEN} max=10 more", "grant 7 more"),
        (f"grant 7 gpushare:{TOKEN} cpus=auto more", "grant 7 more"),
        ("max=3 gpushare:oops", "max=3"),
        ("nothing of ours", "nothing of ours"),
    ],
)
def test_opting_out_leaves_the_rest_of_the_comment(comment: str, kept: str) -> None:
    assert without_consent(comment) == kept
    assert parse_consent(without_consent(comment)) is None


def test_consent_is_plain_data() -> None:
    assert parse_consent(f"gpushare:{TOKEN},max=10") == Consent(TOKEN, 10)
    assert parse_consent(f"gpushare:{TOKEN},requeue=yes") == Consent(TOKEN, None, requeue=True)
    assert parse_consent(f"gpushare:{TOKEN} Requeue=NO") == Consent(TOKEN, None, requeue=False)
    assert parse_consent(f"gpushare:{TOKEN},cpus=auto") == Consent(TOKEN, cpus_auto=True)


WORDS = st.one_of(
    st.sampled_from(
        [
            f"gpushare:{TOKEN}",
            f"GPUSHARE={TOKEN}",
            "gpushare",
            "gpushare:",
            TOKEN,
            "max=10",
            "MAX=7%",
            "max:",
            "max",
            "cpus=auto",
            "cpus",
            "requeue=yes",
        ]
    ),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=6),
    st.sampled_from([",max=5", ",cpus=auto", ",", "=", ":", "%", "max=1000", "max=", "gs-"]),
)
COMMENTS = st.builds(
    lambda words, blanks: "".join(word + blank for word, blank in zip(words, blanks, strict=False)),
    st.lists(WORDS, max_size=5),
    st.lists(st.sampled_from(["", " ", "\t", "\n", "\v", "\u00a0", "\u2003"]), min_size=5, max_size=5),
)


@settings(max_examples=25)
@given(st.lists(COMMENTS, min_size=30, max_size=60))
def test_hook_and_helper_agree_on_any_comment(tmp_path_factory: pytest.TempPathFactory, comments: list[str]) -> None:
    answers = said_by_hook(make_hook("lua5.4", tmp_path_factory.mktemp("hook")), comments)
    for comment, said in zip(comments, answers, strict=True):
        assert said == python_answer(comment), repr(comment)
