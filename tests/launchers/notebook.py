"""A notebook that trains on two processes, then goes on in the kernel alone: `notebook.py FOLDER` runs its cells in a real kernel."""

from __future__ import annotations

import sys

import nbformat
from nbclient import NotebookClient

CELLS = """\
from pathlib import Path
from tests.launchers.program import main
folder = Path({folder!r})

main(folder, more=5, strategy="mfsdp_notebook", devices=2)

main(folder, more=6, devices=1)
"""

if __name__ == "__main__":
    cells = CELLS.format(folder=sys.argv[1]).split("\n\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300).execute()
