"""The examples under a command's help."""

from __future__ import annotations


def examples(*lines: str) -> str:
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"[cyan]$ {line}[/cyan]" for line in lines)
