# ruff: noqa: E501 - programs are data
"""B and C, from inside the shell whose process runs the scripts of a trajectory."""

from __future__ import annotations

from tool_service.sandbox.hostile.case import ERROR, LOST, OK, SIGNALED, TIMEOUT, Case, bash, case, py

CASES: tuple[Case, ...] = (
    case(
        "B1-signals-to-the-shell",
        "kills and stops everything, its own shell, and what runs that",
        bash("kill -9 -1; echo after", SIGNALED, LOST),
        bash("kill -TERM $$", SIGNALED),
        bash("trap '' TERM INT HUP QUIT PIPE; kill -TERM 0; echo lives", shows="lives"),
        bash("kill -9 $PPID; sleep 5", SIGNALED, LOST),
        bash("echo next", shows="next"),
        bash("kill -STOP $$", TIMEOUT, timeout=0.5),
    ),
    case(
        "B4-jobs-of-the-shell",
        "coprocesses, job control, process substitutions, daemons, a wait for ever",
        bash("coproc C { cat; }; echo hi >&${C[1]}; read -t 2 x <&${C[0]}; echo $x", shows="hi"),
        bash(
            "set -m; sleep 1000 & sleep 0 & fg; disown -a; cat <(echo a) > >(cat); (setsid sleep 1000 &); echo x",
            shows="x",
        ),
        bash("sleep 1000 & wait", TIMEOUT, timeout=0.5),
        bash("mkfifo p; echo x > p", TIMEOUT, timeout=0.5),
        bash("jobs; echo next", shows="next"),
    ),
    case(
        "C2-marks-of-the-harness",
        "writes marks of exit codes to every descriptor, reads its own commands and history",
        bash(
            "for p in /proc/$$/fd/*; do echo ':1:0:' > $p; done 2>/dev/null; for f in {0..30}; do echo ':12345:0:' >&$f; done 2>/dev/null; false",
            ERROR,
        ),
        bash('read x; echo "got<$x>"; cat <&0', shows="got<>"),
        bash("(timeout .2 cat /proc/$PPID/fd/0 /proc/$$/fd/255) 2>&1; set -o history; history; true"),
        bash("(exit 7)", ERROR),
        bash("true"),
    ),
    case(
        "C22-exit-codes",
        "every way to end with a code, in subshells, pipes, functions, traps and by signals",
        *(
            bash(text, ERROR)
            for text in (
                "(exit 5)",
                "true | false",
                "set -o pipefail; false | true",
                "! true",
                "((0))",
                "[[ a == b ]]",
                "nothing-of-this-name",
                "(kill -9 $BASHPID)",
                "f() { return 9; }; f",
                "return 4",
            )
        ),
        bash("set +o pipefail; echo on", shows="on"),
        *(
            bash(text, ERROR)
            for text in (
                "f() { exit 6; }; f",
                "trap 'exit 7' USR1; kill -USR1 $$",
                "exit 300",
                "exit x",
                "set -eu; echo $nothing",
            )
        ),
        bash("exit 256"),
        bash("kill -9 $BASHPID", SIGNALED),
        bash("echo next", shows="next"),
    ),
    case(
        "C22-descriptors-of-the-shell",
        "opens, redirects and closes descriptors 3 to 255, and the first three for good",
        bash(
            'for i in {3..255}; do eval "exec $i>&1" || break; done 2>/dev/null; echo opened', OK, LOST, shows="opened"
        ),
        bash("echo here", shows="here"),
        bash('for i in {3..255}; do eval "exec $i>&-"; done; echo x', OK, ERROR, LOST),
        bash("exec >/dev/null 2>&1 </dev/zero"),
        bash("echo still", shows="still"),
        bash("exec 0<&- 1>&- 2>&-; echo x", OK, ERROR, LOST),
        bash("echo there", shows="there"),
    ),
    case(
        "C22-settings-of-the-shell",
        "BASH_ENV, PROMPT_COMMAND, readonly variables, every option, limits of 0",
        bash(
            "export BASH_ENV=./e ENV=./e PROMPT_COMMAND='exit 8' PS4='$(exit 8)'; echo 'exit 9' > e; readonly IFS=x LINENO HOME PWD OLDPWD PPID UID _; echo a",
            shows="a",
        ),
        bash("echo b", shows="b"),
        bash("set -o noclobber; set -fukTEPBC; set -o posix; set -r; echo c", shows="c"),
        bash("echo d", OK, ERROR),
        bash("set -n", LOST),
        bash("ulimit -n 3; ulimit -u 0; ulimit -v 1000; ulimit -f 0; echo e", OK, LOST),
        bash("set -t", OK, LOST),
        bash("echo next", shows="next"),
    ),
    case(
        "C24-words-of-the-harness",
        "functions, aliases and disabled built-ins in the place of eval, builtin, [[ and !",
        bash(
            "eval() { /bin/echo hijacked; }; export -f eval; shopt -s expand_aliases; alias '!=echo'", OK, ERROR, LOST
        ),
        bash("echo a", OK, LOST, hides="hijacked"),
        bash("builtin() { /bin/echo hijacked; }", OK, ERROR, LOST),
        bash("echo b", OK, LOST, hides="hijacked"),
        bash("enable -n eval builtin command echo printf exit cd test [ set trap", OK, ERROR, LOST),
        bash("/bin/echo next", shows="next"),
    ),
    case(
        "C24-traps",
        "traps on DEBUG, ERR, RETURN and EXIT that print, skip, kill and never end",
        bash("trap 'echo D' DEBUG; trap 'echo E; false' ERR; trap 'echo R' RETURN; echo a", shows="a"),
        bash("(exit 3)", ERROR),
        bash("trap - DEBUG ERR RETURN; shopt -s extdebug; trap 'false' DEBUG", OK, ERROR, LOST),
        bash("echo b", OK, ERROR, LOST),
        bash("trap 'kill -9 $$' DEBUG", OK, SIGNALED, LOST),
        bash("trap 'sleep 1000' EXIT; exit 3", TIMEOUT, timeout=0.5),
        bash("echo next", shows="next"),
    ),
    case(
        "C22-shapes-of-scripts",
        "heredocs in heredocs, quotes of every kind, a megabyte on one line, nesting without end",
        bash("cat <<A <<'B' <<-C\nx\nA\ny $(exit 3)\nB\n\tz\n\tC\necho q", shows="z\nq"),
        bash("echo 'a'\\''b' \"\\\"\" \\\\ $'\\x41'", shows="a'b \" \\ A"),
        bash("x=" + "a" * 1_000_000 + "; echo ${#x}", shows="1000000"),
        bash(":" + " ;:" * 100_000, OK, SIGNALED, ERROR),
        bash("(" * 3000 + ":" + ")" * 3000, OK, SIGNALED, ERROR),
        bash("echo {1..100000000}", OK, ERROR),
        bash("a=a[a]; echo $((a))", ERROR, shows="recursion"),
        bash("echo $((-9223372036854775808 / -1))", OK, ERROR),
        bash("echo next", shows="next"),
    ),
    case(
        "C22-a-folder-that-is-gone",
        "removes the folder that it stands in, and everything else",
        bash("mkdir d; cd d; rmdir ../d; pwd; touch x", ERROR),
        bash(
            "cd /; rm -rf /workspace/* /workspace/.[!.]* $TMPDIR/* 2>/dev/null; cd; echo made > f; cat f", shows="made"
        ),
        bash("exit 1", ERROR),
        bash("cat f", shows="made"),
        py("open('f').read()", shows="made"),
    ),
)
