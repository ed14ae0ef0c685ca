"""``mkernel completion``: prints what makes a shell complete the commands and options of ``mkernel``.

bash:  mkernel completion bash > ~/.local/share/bash-completion/completions/mkernel
zsh:   mkernel completion zsh > ~/.zfunc/_mkernel          (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)
tcsh:  mkernel completion tcsh > ~/.mkernel.tcsh           (with `source ~/.mkernel.tcsh` in ~/.tcshrc)
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence

from mkernel.errors import Error
from mkernel.version import VERSION

__all__ = ["main", "whole_parser"]

_SHELLS = ("bash", "zsh", "tcsh")
# Where the options of a command are defined, if not in the module that runs it.
_PARSERS = {"bench": "mkernel.bench.command"}


def main(argv: Sequence[str]) -> int:
    """Print the script. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        import shtab
    except ImportError:
        raise Error("shell completion needs shtab: pip install 'mkernel[cli]'") from None
    from mkernel.cli.main import COMMANDS

    print(shtab.complete(whole_parser(COMMANDS), options.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mkernel completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def whole_parser(commands: Mapping[str, tuple[str, str]]) -> argparse.ArgumentParser:
    """One parser of all commands and their options. ``mkernel`` itself imports a command only when it runs it.

    Parameters
    ----------
    commands
        By name: the module that runs the command, and its line of help.
    """
    parser = argparse.ArgumentParser(prog="mkernel")
    parser.add_argument("--version", action="version", version=VERSION, help="show the version")
    found = parser.add_subparsers()
    for name, (module, text) in commands.items():
        of_command: argparse.ArgumentParser = importlib.import_module(_PARSERS.get(name, module))._parser()
        for action in of_command._actions:
            if isinstance(action.choices, Mapping):  # shtab takes it for a command with commands of its own
                action.choices = list(action.choices)
        # The options, --help among them, come from the command's own parser. shtab takes a % in a help text as it is.
        found.add_parser(name, parents=[of_command], add_help=False, help=text, description=text)
    return parser
