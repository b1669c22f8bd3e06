"""Completion of commands in a shell, from the parsers themselves, so that no list can be out of date.

`kubectl_complete-regroup` is the program that kubectl asks for words of its plugin. `regroup completion bash` prints what a
shell needs to ask `regroup` itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

ASK_S = 3.0
"""Longest wait for the names of jobs."""
RESOURCE = "distributedtrainingjobs.regroup.dev"
NO_FILES, FILES = 4, 0
"""Directives of kubectl's protocol: whether the shell completes file names if there are no words."""
NAMES = ("JOB", "DIR")
"""Metavars of arguments that name a job."""

SCRIPTS = {
    "bash": """_regroup() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        [ -z "$word" ] || COMPREPLY+=("$word")
    done < <(regroup complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _regroup regroup
""",
    "zsh": """#compdef regroup
_regroup() {
    local -a found
    found=(${(f)"$(regroup complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _regroup regroup
""",
}


def words(parser: argparse.ArgumentParser, given: Sequence[str], jobs: Callable[[], Iterable[str]]) -> list[str]:
    """Return the words that may stand in place of the last of `given`, which may be empty or begun.

    `jobs` returns the names of jobs, and is asked only where a job is named.
    """
    *before, begun = given or [""]
    wanted: argparse.Action | None = None
    positionals = _positionals(parser)
    for word in before:
        if wanted is not None:  # it is the value of an option
            wanted = None
        elif word.startswith("-") and word != "-":
            option = parser._option_string_actions.get(word)
            wanted = option if option is not None and option.nargs != 0 else None
        elif positionals and isinstance(positionals[0], argparse._SubParsersAction):
            if word not in positionals[0].choices:
                return []
            parser = positionals[0].choices[word]
            positionals = _positionals(parser)
        elif positionals and positionals[0].nargs != argparse.REMAINDER:
            positionals = positionals[1:]
    if wanted is not None:
        found = [str(choice) for choice in wanted.choices or ()]
    elif begun.startswith("-"):
        found = [name for name in parser._option_string_actions if name.startswith("--") or begun == "-"]
    elif positionals and positionals[0].choices:
        found = [str(choice) for choice in positionals[0].choices]
    elif positionals and positionals[0].metavar in NAMES:
        found = list(jobs())
    else:
        found = []
    return sorted(word for word in found if word.startswith(begun))


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def kubectl_main() -> int:
    """Answer kubectl, which starts this program with the words of its plugin's command line. A failure completes nothing."""
    from regroup_cli import plugin

    given = sys.argv[1:]
    found = words(plugin.parser(), given, lambda: _cluster_jobs(given))
    print("\n".join([*found, f":{NO_FILES if found else FILES}"]))
    return 0


def _cluster_jobs(given: Sequence[str]) -> list[str]:
    """Return the names of jobs in the namespace that the command line names so far, or none if the cluster does not answer."""
    from regroup_cli import plugin

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    plugin.add_where(parser)
    try:
        args, _ = parser.parse_known_args(list(given))
        where = plugin.target(args)
        options = [f"--namespace={where.namespace}"] if where.namespace else []
        command = ["kubectl", "get", RESOURCE, "--output=name", f"--request-timeout={ASK_S:.0f}s"]
        command += [*where.options(), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * ASK_S, check=False)
    except (argparse.ArgumentError, OSError, subprocess.SubprocessError, SystemExit):
        return []
    return [line.partition("/")[2] for line in done.stdout.splitlines()]
