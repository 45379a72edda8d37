"""The `bash` tool through the service, in real sandboxes: what the agent sees of a shell that lives as long as its
trajectory, whatever its scripts do to it."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tool_harness import Service, Trajectory, error_of, nothing_left, text_of
from workspace_harness import BACKENDS, service_on, turns

from tool_service.action import ToolAction
from tool_service.base import TurnContext
from tool_service.sandbox.base import Turn, TurnResult, TurnStatus
from tool_service.tools.bash_tool import BashTool
from turnwire.client.tools import tool_call

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESTARTED = "[the shell was restarted: its directory, variables and jobs are lost]"
ENDED = "[the shell has ended: the next call starts another]"
LOST = "[session lost: the next call starts afresh]"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with service_on(request.param, limits={"observation_bytes": 2000, "action_bytes": 400_000}) as running:
        yield running


@pytest.mark.parametrize(
    ("script", "text", "error"),
    [
        ("echo hi", "hi", ""),
        ("", "", ""),
        ("# only a comment", "", ""),
        ("\necho a\n\necho b\n", "a\nb", ""),
        ("printf 'no newline'", "no newline", ""),
        ("pwd; echo $HOME $0", "/workspace\n/workspace bash", ""),
        ("echo out; echo err >&2; echo out", "out\nerr\nout", ""),
        ("printf '\\xff\\xfe'", "\ufffd\ufffd", ""),
        ("echo 'é\U0001f600'", "é\U0001f600", ""),
        ("echo \"it's\" '\\n' $'\\t|'", "it's \\n \t|", ""),
        ("false", "[exit code 1]", "TOOL_ERROR"),
        ("echo x; (exit 7)", "x\n[exit code 7]", "TOOL_ERROR"),
        ("\n\nnosuch", "bash: line 1: nosuch: command not found\n[exit code 127]", "TOOL_ERROR"),
        ("true\nnosuch", "bash: line 2: nosuch: command not found\n[exit code 127]", "TOOL_ERROR"),
        ("sh -c 'kill -11 $$'", None, "TOOL_ERROR"),
        ('cat; read line; echo "read: $?"', "read: 1", ""),
        ("tty; [ -t 0 ] || echo no terminal", "not a tty\nno terminal", ""),
        ("yes | head -1; echo ${PIPESTATUS[0]}", "y\n141", ""),
        ("echo a\r\necho b", "a\r\nb", ""),
        # scripts that bash cannot read
        ("echo 'unbalanced", None, "TOOL_ERROR"),
        ("if true; then echo a", None, "TOOL_ERROR"),
        ("echo a)", None, "TOOL_ERROR"),
        ("cat <<END\nabc", None, ""),
        # what looks like an end of the turn
        ("echo '[exit code 9]'; echo :12345:9:", "[exit code 9]\n:12345:9:", ""),
        ("echo bash: line 3: '((: :1:0: : syntax error' >&2; false", None, "TOOL_ERROR"),
    ],
)
async def test_a_command_reads_like_a_terminal(service: Service, script: str, text: str | None, error: str) -> None:
    observation = await service.call("bash", script)
    assert error_of(observation) == error
    if text is not None:
        assert text_of(observation) == text


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        ("x=5; cd /tmp", "echo $x $PWD", "5 /tmp"),
        ("export E=1; f() { echo F$1; }", "f 2; env | grep ^E=", "F2\nE=1"),
        ("shopt -s expand_aliases; alias ll='echo LL'", "ll", "LL"),
        ("set -o pipefail; trap 'echo bye' EXIT", "false | true; echo $?", "1"),
        ("exec 3>notes; echo one >&3", "echo two >&3; cat notes", "one\ntwo"),
        ("sleep 100 & echo started", "jobs | grep -c Running; kill %1", "1"),
        ("umask 077; ulimit -f 10", "umask; ulimit -f", "0077\n10"),
    ],
)
async def test_what_a_command_changes_stays(service: Service, first: str, then: str, text: str) -> None:
    said = await turns(service, "bash", first, then)
    assert text_of(said[1]) == text
    assert "restarted" not in said[1].data


@pytest.mark.parametrize(
    "prank",
    [
        "cd() { :; }; echo() { :; }; exit() { :; }; printf() { builtin printf 'no'; }; read() { :; }; eval() { :; }",
        "shopt -s expand_aliases; alias eval=false true=false exit=true [[=false",
        "PS1='# '; PROMPT_COMMAND='exit 9'; PS4='$(exit 9)'; set -x",
        "unset PATH; hash -r",
        "set -euo pipefail",
        "set -o posix; set -f; IFS=:; shopt -s nullglob failglob extglob",
        "set -v",
        "trap 'true' DEBUG ERR RETURN; set -T",
        "trap '' TERM INT HUP CHLD PIPE",
        "exec >/tmp/taken 2>&1",
        "exec 2>&1 0</dev/zero",
        "exec 0<&- 1>&- 2>&-",
        'for n in {3..9} {13..260}; do eval "exec $n>&-"; done 2>/dev/null',
        "for n in {3..260}; do echo '((: :1:0:' >&$n; done 2>/dev/null",
        "declare -r LINENO REPLY",
        "unset -v LINENO _; unset -f builtin",
        "export LC_ALL=xx_XX LANG=",
        "return 3",
        "break; continue",
        "echo $((1 / 0)); echo never",
    ],
)
async def test_a_shell_that_bash_would_keep_is_kept(service: Service, prank: str) -> None:
    check = "builtin printf '%s\\n' \"${mark-lost}\" end"
    said = await turns(service, "bash", "mark=kept", prank, check, "set +e; (builtin exit 4)")
    assert text_of(said[2]).splitlines()[-2:] == ["kept", "end"]
    assert text_of(said[3]).endswith("[exit code 4]")
    assert said[3].data["exit_code"] == 4


@pytest.mark.parametrize(
    ("script", "error", "text", "data"),
    [
        ("echo a; exit 3", "TOOL_ERROR", f"a\n[exit code 3]\n{ENDED}", {"exit_code": 3}),
        ("exit 0", "", ENDED, {"exit_code": 0}),
        ("exec true", "", ENDED, {"exit_code": 0}),
        ("exec sh -c 'echo other; exit 5'", "TOOL_ERROR", f"other\n[exit code 5]\n{ENDED}", {"exit_code": 5}),
        ("exec /nonexistent", "TOOL_ERROR", None, {"exit_code": 127}),
        ("set -e; false; echo never", "TOOL_ERROR", f"[exit code 1]\n{ENDED}", {"exit_code": 1}),
        ("echo ${nothing:?is not set}", "TOOL_ERROR", None, {"exit_code": 1}),
        ("kill -9 $$", "SIGNALED", f"[killed by signal 9]\n{ENDED}", {"signal": 9}),
        ("kill -TERM $$; sleep 10", "SIGNALED", f"[killed by signal 15]\n{ENDED}", {"signal": 15}),
        ("trap 'echo bye; exit 6' EXIT; exit 2", "TOOL_ERROR", f"bye\n[exit code 6]\n{ENDED}", {"exit_code": 6}),
        ("set -n", "SESSION_LOST", LOST, {}),
        ("builtin() { echo mine; }", "SESSION_LOST", LOST, {}),
        ("enable -n builtin", "SESSION_LOST", LOST, {}),
        ("while read -r -u 12 line; do :; done; read -r -u 10 line", "", None, None),
        ("kill -9 -1", "SIGNALED", None, None),
        ("kill -9 $PPID; sleep 10", "SIGNALED", None, None),
        ("kill -STOP $$", "TIMEOUT", None, None),
    ],
)
async def test_an_end_of_the_shell_is_told_and_the_next_command_has_another(
    service: Service, script: str, error: str, text: str | None, data: dict[str, int] | None
) -> None:
    said = await turns(service, "bash", "mark=kept", script, 'echo "${mark-lost}"', "echo again", seconds=4)
    if text is not None or error:
        assert error_of(said[1]) == error
    if text is not None:
        assert text_of(said[1]) == text
    if data is not None:
        assert {name: said[1].data[name] for name in data} == data
    assert text_of(said[2]) == f"{RESTARTED}\nlost"
    assert said[2].data["restarted"] is True
    assert text_of(said[3]) == "again"


async def test_a_job_in_the_background_holds_up_no_turn_and_is_heard_in_a_later_one(service: Service) -> None:
    async with nothing_left(service):
        said = await turns(
            service,
            "bash",
            "mkfifo go; (read -r x <go; echo late) & echo now",
            "echo >go; wait",
            "nohup setsid sh -c 'trap \"\" HUP TERM; sleep 1000' >/dev/null 2>&1 & disown; echo left",
        )
        assert [text_of(observation) for observation in said] == ["now", "late", "left"]


async def test_a_command_that_does_not_end_is_stopped_with_all_its_processes(service: Service) -> None:
    async with nothing_left(service):
        said = await turns(
            service, "bash", "echo first; (setsid sleep 1000 &); sleep 1000", "pgrep -c sleep; echo alive", seconds=2
        )
        assert error_of(said[0]) == "TIMEOUT"
        assert text_of(said[0]).startswith("first\n[timeout: stopped after 2")
        assert text_of(said[1]).endswith("0\nalive") or "pgrep" in text_of(said[1])
        assert text_of(said[1]).startswith(RESTARTED)


async def test_a_script_may_be_long_and_holds_no_nul(service: Service) -> None:
    script = "start=1\n" + "x=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n" * 5000 + "echo $start $x"
    assert len(script) > 200_000
    observation = await service.call("bash", script)
    assert text_of(observation) == "1 " + "a" * 38
    trajectory = Trajectory(service, "nul")
    await trajectory.open("bash")
    await trajectory.send(action={"turn": 0, "calls": {"calls": [tool_call("bash", command="echo a\0b")]}})
    (observation,) = (await trajectory.receive()).observation.observations
    assert (text_of(observation), error_of(observation)) == (
        "invalid action: a bash script cannot hold NUL characters",
        "INVALID_ACTION",
    )
    await trajectory.close()


async def test_a_long_output_is_cut_and_says_so(service: Service) -> None:
    observation = await service.call("bash", "head -c 5000 /dev/zero | tr '\\0' x; exit 2")
    text = text_of(observation)
    assert text.startswith("xxx")
    assert f"of {5000} bytes shown]" in text
    assert text.endswith(f"[exit code 2]\n{ENDED}")
    assert observation.truncated


async def test_trajectories_have_shells_of_their_own(service: Service) -> None:
    async with nothing_left(service):
        said = await asyncio.gather(
            *(turns(service, "bash", f"mine={n}; echo {n} >f", "sleep 0.1; echo $mine $(cat f); ls") for n in range(4))
        )
        assert [text_of(each[1]) for each in said] == [f"{n} {n}\nf" for n in range(4)]


async def test_python_and_bash_work_in_one_folder_and_an_exit_of_the_shell_costs_python_nothing(
    service: Service,
) -> None:
    trajectory = Trajectory(service, "both")
    await trajectory.open("python", "bash")
    await trajectory.act(0, "<python>x = 41; open('f', 'w').write('from python')</python>")
    answer = await trajectory.act(1, "<bash>cat f; exit 1</bash><python>x + 1</python>")
    assert [text_of(observation) for observation in answer.observations] == [
        f"from python\n[exit code 1]\n{ENDED}",
        "42",
    ]
    await trajectory.close()


async def test_a_sandbox_without_bash_is_our_failure_and_says_what_to_do() -> None:
    """No machine of ours lacks it, so the runtime runs alone, where PATH leads nowhere, and its value is given to the
    tool by hand."""
    code = (
        "from tool_service.sandbox.inside import runtimes, worker_bash\n"
        "print(worker_bash.Session(runtimes.Context('/', 1000)).run(b'echo', 1.0).body.decode())"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=True)  # noqa: ASYNC221
    body = done.stdout
    value = json.loads(body.partition("\0")[2])
    assert value == {"missing": "there is no bash in /nowhere"}

    class Access:
        async def run(self, turn: Turn) -> TurnResult:
            return TurnResult(TurnStatus.TOOL_ERROR, value=value)

    turn = TurnContext("t", 0, time.monotonic() + 5, 1000, Access())  # type: ignore[arg-type]
    action = ToolAction("bash", BashTool.Arguments("echo"))
    observation = await BashTool(BashTool.Config()).execute(action, turn)
    assert (observation.error, observation.content) == ("INFRA", "the tool is not available now")
    assert observation.detail == (
        "there is no bash in /nowhere: choose an image with bash, or leave the tool out: plugins.exclude: [bash]"
    )


async def test_programs_cannot_reach_into_what_drives_the_shell(service: Service) -> None:
    script = "ls /proc/$PPID/fd; cat /proc/$PPID/environ /proc/$PPID/mem; ls /proc/self/fd | tr '\\n' ' '"
    text = text_of(await service.call("bash", script))
    assert text.count("Permission denied") >= 2
    assert text.splitlines()[-1].split()[:3] == ["0", "1", "2"]
    assert len(text.splitlines()[-1].split()) == 4  # and the folder that ls itself has open
