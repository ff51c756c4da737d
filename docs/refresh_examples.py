"""Write into the documents what their commands print now: `python -m docs.refresh_examples`.

A shown line becomes the printed one of the same shape, which is the line without its numbers. Lines
with times stay: they are of the machine that the document names.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.commands import ROOT
from tests.documents.test_examples import COMMANDS, is_exact, is_timed, shape


def main() -> None:
    """Run every command of which lines are shown, and replace those that changed."""
    for command in COMMANDS:
        if not is_exact(command):
            continue
        sys.stdout.write(f"{command.document}: {command.text}\n")
        words = [str(Path(sys.executable).with_name("kvgraft")), *shlex.split(command.text)[1:]]
        wide = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=wide)
        printed: dict[str, list[str]] = {}
        for line in map(str.rstrip, done.stdout.splitlines()):
            printed.setdefault(shape(line), []).append(line)
        path = ROOT / command.document
        text = path.read_text(encoding="utf-8")
        for line in command.shown:
            now = printed.get(shape(line))
            if now and not is_timed(line) and line not in now:
                text = text.replace(f"\n{line}\n", f"\n{now[0]}\n", 1)
                sys.stdout.write(f"- {line}\n+ {now[0]}\n")
            if now:
                now.remove(line if line in now else now[0])
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
