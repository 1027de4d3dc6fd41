"""Completion in bash, zsh and fish: the shell asks the command itself what may come next.

Keys are completed up to the next dot. A key that a shell would not take as plain text is never offered: keys come from
a file, and what is completed is run.
"""

import argparse
import os
import re
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["SCRIPTS", "VARIABLE", "candidates"]

#: With this variable set the command prints what may stand in place of its last word.
VARIABLE = "_FUNCTIONAL_CKPT_COMPLETE"
_PLAIN = re.compile(r"[A-Za-z0-9_./@%+,-]+")

SCRIPTS = {
    "bash": """\
_functional_ckpt() {
    local IFS=$'\\n'
    COMPREPLY=($(_FUNCTIONAL_CKPT_COMPLETE=1 functional-ckpt "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]]; then
        compopt -o nospace 2>/dev/null || :
    fi
}
complete -o default -F _functional_ckpt functional-ckpt
""",
    "zsh": """\
#compdef functional-ckpt
_functional_ckpt() {
    local -a found
    found=("${(@f)$(_FUNCTIONAL_CKPT_COMPLETE=1 functional-ckpt "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z ${found[1]} ]]; then
        _files
        return
    fi
    compadd -- ${found:#*.}
    compadd -S '' -- ${(M)found:#*.}
}
if [[ ${funcstack[1]} == _functional_ckpt ]]; then
    _functional_ckpt "$@"
else
    compdef _functional_ckpt functional-ckpt
fi
""",
    "fish": """\
function __functional_ckpt
    set -l words (commandline -opc)
    _FUNCTIONAL_CKPT_COMPLETE=1 functional-ckpt $words[2..-1] "$(commandline -ct)" 2>/dev/null
end
complete -c functional-ckpt -a '(__functional_ckpt)'
""",
}


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return what may stand in place of the last of `words`; nothing where a path does, which the shell knows better.

    Examples
    --------
    >>> from functional_ckpt.cli.parser import make_parser
    >>> candidates(make_parser(), ["sh"]), candidates(make_parser(), ["ls", "checkpoint", "--pre"])
    (['show'], ['--prefix'])
    """
    *before, current = words or [""]
    commands = _commands(parser)
    if not before:
        found = [*commands, *parser._option_string_actions] if current[:1] == "-" else [*commands]
        return sorted(name for name in found if name.startswith(current))
    command = commands.get(before[0])
    if command is None:
        return []
    options = command._option_string_actions
    if current.startswith("-"):
        return sorted(name for name in options if name.startswith(current))
    if before[-1] in options and _takes_word(options[before[-1]]):
        is_key = before[-1] == "--prefix"
        return _keys(_positional(before[1:], options), current) if is_key else []
    return _of_place(command, _positional(before[1:], options), current)


def _of_place(command: argparse.ArgumentParser, given: Sequence[str], current: str) -> list[str]:
    """Return what may stand where the next positional argument does."""
    places = [action for action in command._actions if not action.option_strings]
    if len(given) >= len(places):
        return []
    if places[len(given)].choices:
        return sorted(str(choice) for choice in places[len(given)].choices or () if str(choice).startswith(current))
    return _keys(given, current) if places[len(given)].dest == "key" else []


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _takes_word(action: argparse.Action) -> bool:
    return action.nargs != 0


def _positional(words: Sequence[str], options: dict[str, argparse.Action]) -> list[str]:
    """Return the words that are neither options nor what follows one."""
    found: list[str] = []
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            found.append(word)
        is_value = word in options and _takes_word(options[word]) and not is_value
    return found


def _keys(given: Sequence[str], current: str) -> list[str]:
    """Return the keys that begin so, up to the next dot."""
    if not given or os.path.isfile(given[0]):
        return []
    from functional_ckpt.errors import CheckpointError
    from functional_ckpt.store.reading import read_manifest

    with suppress(CheckpointError, OSError):
        manifest = read_manifest(given[0])
        keys = [*manifest.by_key, *(value.key for value in manifest.values)]
        found = {key[: key.find(".", len(current)) + 1] or key for key in keys if key.startswith(current)}
        return sorted(name for name in found if _PLAIN.fullmatch(name))
    return []
