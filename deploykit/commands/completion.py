"""Print a completion script for your shell.

bash: deploykit completion bash > ~/.local/share/bash-completion/completions/deploykit
zsh:  deploykit completion zsh > ~/.zfunc/_deploykit   (a folder in your fpath)
"""

from __future__ import annotations

import argparse

from deploykit.commands import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the shell."""
    parser.add_argument("shell", choices=["bash", "zsh"], help="your shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    output.block(f"{shtab.complete(args.whole(), shell=args.shell)}\n")
    return 0
